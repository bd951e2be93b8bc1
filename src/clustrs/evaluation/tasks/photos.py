"""Photographs, alone and in collages of four: nothing to download, answers of one word."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from clustrs.corruptions.images import open_image
from clustrs.embedded import photo_folder
from clustrs.evaluation.task import Item
from clustrs.evaluation.tasks.scenes import said
from clustrs.images.photos.collage import SIDE, collage, square
from clustrs.images.photos.kinds import Photo, list_photos
from clustrs.images.photos.testset import examples


class Photos:
    """The fixed test set of `clustrs.images.photos`; kinds are the kinds of its questions."""

    name = "photos"
    max_new_tokens = 4
    judged = False
    scale = 100.0

    def __init__(self, items: Sequence[Item], photos: Mapping[str, tuple[Photo, ...]]) -> None:
        self.items = items
        self.photos = photos

    def open(self, image: str) -> Image.Image:
        """The image as the model sees it, 336 pixels a side."""
        if image not in self.photos:
            raise ValueError(f"image {image!r}: there are {len(self.photos)}, from {next(iter(self.photos))!r} on")
        shown = self.photos[image]
        side = SIDE if len(shown) == 1 else SIDE // 2
        return collage([square(open_image(photo.path), side) for photo in shown])

    def score(self, item: Item, text: str) -> float | None:
        """1 for the expected word and nothing else."""
        return float(said(text) == said(item.answer))


def load(data: Path | None = None, limit: int | None = None) -> Photos:
    """From a folder of Caltech-101 (its photographs that are kept for testing), or else from those in
    `clustrs-models`, which are some of them."""
    photos = list_photos(photo_folder()) if data is None else list_photos(data, test=True)
    items: list[Item] = []
    images = {}
    for example in examples(photos):
        images[example.name] = example.photos
        for number, question in enumerate(example.questions):
            items.append(
                Item(f"{example.name}-{number}", example.name, question.text, question.answer, (question.kind,))
            )
        if limit is not None and len(items) >= limit:
            break
    return Photos(items[:limit], images)
