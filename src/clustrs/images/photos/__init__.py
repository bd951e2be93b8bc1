"""Photographs, alone and in collages of four, and questions about them: the task that photo-llava was trained for."""

from clustrs.images.photos.collage import PLACES, SIDE, collage, square
from clustrs.images.photos.kinds import GROUPS, KINDS, Kind, Photo, list_photos
from clustrs.images.photos.questions import QUESTION_KINDS, every
from clustrs.images.photos.testset import Example, examples

__all__ = [
    "GROUPS",
    "KINDS",
    "PLACES",
    "QUESTION_KINDS",
    "SIDE",
    "Example",
    "Kind",
    "Photo",
    "collage",
    "every",
    "examples",
    "list_photos",
    "square",
]
