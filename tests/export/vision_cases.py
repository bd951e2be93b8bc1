"""Tiny models of all exportable families, pixels of one crop each, and what an attached method keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import gemma as gemma_models
from tiny_models import load, make_image, prepare
from tiny_models import tiled as tiled_models
from torch import Tensor

from clustrs import Pruner, Selection

SIDES = {
    "llava": 28,
    "llava_next": 28,
    "llava_onevision": 28,
    "gemma3": 56,
    "paligemma": 28,
    "internvl": 56,
    "idefics3": 32,
    "smolvlm": 32,
}
"""Images of these sides stay whole, as one crop."""
FAMILIES = tuple(SIDES)
TOWERS = {"llava": "clip", "llava_next": "clip", "llava_onevision": "siglip"}


@dataclass(frozen=True)
class Case:
    """A tiny model of one family."""

    family: str
    model: Any
    prepare: Callable[[list[Any]], dict[str, Any]]

    def inputs(self, seed: int) -> dict[str, Any]:
        """A prompt with one image, of one crop (NeXT and OneVision: a base crop and others)."""
        side = SIDES[self.family]
        return self.prepare([make_image(side, side, seed)])

    def crop(self, inputs: dict[str, Any]) -> Tensor:
        """The pixels [1, 3, H, W] of the crop."""
        pixels: Tensor = inputs["pixel_values"]
        return pixels[:, 0] if pixels.dim() == 5 else pixels[:1]

    def attached(self, method: Pruner, inputs: dict[str, Any]) -> Selection:
        """What the method keeps when it is attached to the model."""
        with method(self.model, crops="base", attention="proportional") as handle, torch.no_grad():
            self.model(**inputs)
            return handle.last[0].selection


def build(family: str, folder_of: Callable[[str, str], Path], folder: Path) -> Case:
    if family in ("gemma3", "paligemma"):
        model, processor = gemma_models.load(family)
        text = gemma_models.question(family)
        return Case(family, model, lambda images: gemma_models.prompt(processor, text, images))
    if family in tiled_models.FAMILIES:
        tiled_models.build(family, folder)
        case = tiled_models.load_case(family, folder)
        options = {} if family == "internvl" else {"do_image_splitting": False}
        return Case(family, case.model, lambda images: case.prepare(["IMAGE what?"], [images], **options))
    model, processor = load(folder_of(family, TOWERS[family]))
    return Case(family, model, lambda images: prepare(processor, ["<image> what?"], [images]))
