"""Drawn scenes and questions about them: the task that the embedded models were trained for."""

from clustrs.images.scenes.questions import KINDS, Question, every
from clustrs.images.scenes.rendering import Drawing, draw
from clustrs.images.scenes.scene import COLOURS, SHAPES, Scene, Thing, sample
from clustrs.images.scenes.testset import Example, examples

__all__ = [
    "COLOURS",
    "KINDS",
    "SHAPES",
    "Drawing",
    "Example",
    "Question",
    "Scene",
    "Thing",
    "draw",
    "every",
    "examples",
    "sample",
]
