"""Drawn scenes and questions about them: the task that the embedded models were trained for."""

from clustrs.scenes.questions import KINDS, Question, every
from clustrs.scenes.rendering import Drawing, draw
from clustrs.scenes.scene import COLOURS, SHAPES, Scene, Thing, sample
from clustrs.scenes.testset import Example, examples

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
