"""The drawn scenes of the embedded models: nothing to download, answers of one word."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clustrs.evaluation.task import Item
from clustrs.images.scenes import examples


def said(text: str) -> str:
    """A word without what does not count: case, space around it, a full stop."""
    return text.strip().lower().removesuffix(".").rstrip()


class Scenes:
    """The fixed test set of `clustrs.images.scenes`; kinds are the kinds of its questions."""

    name = "scenes"
    max_new_tokens = 4
    judged = False
    scale = 100.0

    def __init__(self, items: Sequence[Item], pixels: Mapping[str, NDArray[np.uint8]]) -> None:
        self.items = items
        self.pixels = pixels

    def open(self, image: str) -> Image.Image:
        if image not in self.pixels:
            raise ValueError(f"image {image!r}: there are {len(self.pixels)}, from 'scene-0000' on")
        return Image.fromarray(self.pixels[image])

    def score(self, item: Item, text: str) -> float | None:
        """1 for the expected word and nothing else."""
        return float(said(text) == said(item.answer))


def load(data: Path | None = None, limit: int | None = None) -> Scenes:
    """Draws the images that are needed, about 4 ms each."""
    if data is not None:
        raise ValueError(f"data={str(data)!r}: the scenes are drawn, leave it out")
    items: list[Item] = []
    pixels = {}
    for example in examples():
        image = f"scene-{example.number:04}"
        pixels[image] = example.drawing.pixels
        for number, question in enumerate(example.questions):
            items.append(Item(f"{image}-{number}", image, question.text, question.answer, (question.kind,)))
        if limit is not None and len(items) >= limit:
            break
    return Scenes(items[:limit], pixels)
