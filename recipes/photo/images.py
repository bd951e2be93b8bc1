"""Training images: photographs of the training half, alone and in collages. Image n is the same in every run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image, ImageOps
from torch import Tensor

from clustrs_models.photographs import KINDS, SIDE, Kind, Photo, collage, draw_kinds, generator_for, list_photos, square
from recipes.data import corrupted

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, which the tower was trained with."""
INDEX = {kind: i for i, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class TrainingImage:
    """The pixels, and what they show: one kind, or four in the order of `PLACES`."""

    pixels: Image.Image
    kinds: tuple[Kind, ...]


class TrainingImages:
    """Images drawn from the photographs of the training half (or some of them), by number."""

    def __init__(self, settings: dict[str, Any], photos: Sequence[Photo], purpose: int = 1) -> None:
        self.settings, self.purpose = settings, purpose
        self.by_kind: dict[Kind, list[Photo]] = {}
        for photo in photos:
            self.by_kind.setdefault(photo.kind, []).append(photo)
        self.opened: dict[Path, Image.Image] = {}

    def __getitem__(self, number: int) -> TrainingImage:
        generator = generator_for(self.settings["seed"], self.purpose, number)
        single = generator.random() < self.settings["features"]["singles"]
        kinds = [KINDS[generator.integers(len(KINDS))]] if single else draw_kinds(generator)
        image = collage([self.cut(kind, SIDE if single else SIDE // 2, generator) for kind in kinds])
        if generator.random() < self.settings["photometry"]["share"]:
            image = Image.fromarray(corrupted(np.asarray(image), self.settings["photometry"], generator))
        return TrainingImage(image, tuple(kinds))

    def cut(self, kind: Kind, side: int, generator: Generator) -> Image.Image:
        """A square of one of a kind's photographs, sometimes mirrored."""
        photos = self.by_kind[kind]
        photo = self.opened_photo(photos[generator.integers(len(photos))])
        zoom = generator.uniform(self.settings["features"]["zoom"], 1)
        part = square(photo, side, zoom, generator.uniform(0.2, 0.8), generator.uniform(0.2, 0.8))
        return ImageOps.mirror(part) if generator.random() < 0.5 else part

    def opened_photo(self, photo: Photo) -> Image.Image:
        if photo.path not in self.opened:
            with Image.open(photo.path) as file:
                self.opened[photo.path] = file.convert("RGB")
        return self.opened[photo.path]


def halves(photos: Sequence[Photo], share: float, seed: int) -> tuple[list[Photo], list[Photo]]:
    """The photographs to learn from, and the share that is held out, of every kind alike."""
    by_kind: dict[Kind, list[Photo]] = {}
    for photo in photos:
        by_kind.setdefault(photo.kind, []).append(photo)
    learn: list[Photo] = []
    held: list[Photo] = []
    for number, group in enumerate(by_kind.values()):
        order = generator_for(seed, 3, number).permutation(len(group))
        count = max(1, round(share * len(group)))
        held += [group[i] for i in sorted(order[:count])]
        learn += [group[i] for i in sorted(order[count:])]
    return learn, held


def training_images(settings: dict[str, Any], data: Path) -> tuple[TrainingImages, TrainingImages]:
    """Images to learn from, and those of the development set, whose photographs are not among them: by these the run is
    watched, so that the test set is looked at once, at the end."""
    learn, held = halves(list_photos(data, test=False), settings["development"]["share"], settings["seed"])
    return TrainingImages(settings, learn), TrainingImages(settings, held, purpose=2)


def pixel_values(images: Sequence[Image.Image]) -> Tensor:
    """(B, 3, side, side), normalized as the model's processor does it."""
    bytes_ = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (bytes_.float() / 255 - mean) / std


def kind_indices(kinds: Sequence[Kind]) -> Tensor:
    """(4,): the kind in each quarter of the image; a single photograph fills all of them."""
    return torch.tensor([INDEX[kind] for kind in (kinds if len(kinds) > 1 else [*kinds] * 4)], dtype=torch.int64)
