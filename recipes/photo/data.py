"""Batches for the training of projector and language model, from the features that are there."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors import safe_open
from torch import Tensor

from clustrs_models.photographs import KINDS, QUESTION_KINDS, Kind, Question, by_answer, every, generator_for
from recipes.data import IGNORED, blocks, pad

PADDING = {"ids": 0, "segments": -1, "positions": 0, "targets": IGNORED, "kinds": -1}


class Shards:
    """The files of a folder of features. Files that appear later are taken in when the folder is looked at again."""

    def __init__(self, folder: Path, empty: bool = False) -> None:
        self.folder = folder
        self.opened: set[str] = set()
        self.files: list[Any] = []
        self.index: list[tuple[int, int]] = []
        self.refresh()
        if not self.files and not empty:
            raise SystemExit(f"{folder} has no features: compute some first (python -m recipes.photo.features --help)")

    def refresh(self) -> None:
        """Open the files that are new."""
        new = [path for path in sorted(self.folder.glob("*.safetensors")) if path.name not in self.opened]
        for path in new:
            file = safe_open(path, "pt").__enter__()
            self.opened.add(path.name)
            self.index += [(len(self.files), row) for row in range(file.get_slice("features").get_shape()[0])]
            self.files.append(file)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """An image: features (576, D), the kinds in its quarters (4,), whether it is a single photograph."""
        file, row = self.index[number]
        return {
            "features": self.files[file].get_slice("features")[row],
            "quarters": self.files[file].get_slice("kinds")[row],
            "single": self.files[file].get_slice("single")[row],
        }


def some_questions(kinds: Sequence[Kind], counts: dict[str, int], generator: Generator) -> list[Question]:
    """So many questions of each kind, as far as there are any, in which all answers are equally frequent."""
    table, chosen = by_answer(every(kinds)), []
    for kind in (kind for kind in QUESTION_KINDS if kind in table):
        groups = list(table[kind].values())
        order = generator.permutation(len(groups))
        for i in range(counts[kind]):
            group = groups[order[i % len(groups)]]
            chosen.append(group[generator.integers(len(group))])
    return chosen


def batch_of(
    images: list[dict[str, Tensor]], words: dict[str, int], counts: dict[str, int], key: tuple[int, ...]
) -> dict[str, Tensor]:
    """Features and packed questions of some images. `key` decides which questions."""
    rows: list[dict[str, Any]] = []
    for i, image in enumerate(images):
        kinds = [KINDS[index] for index in image["quarters"].tolist()][: 1 if image["single"] else None]
        rows.append(blocks(some_questions(kinds, counts, generator_for(*key, i)), words, QUESTION_KINDS))
    for name, value in PADDING.items():
        pad(rows, name, value)
    text = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in PADDING}
    return text | {name: torch.stack([image[name] for image in images]) for name in images[0]}


def batches(
    shards: Shards, words: dict[str, int], seed: int, images: int, counts: dict[str, int], steps: range
) -> Iterator[dict[str, Tensor]]:
    """The batches of some steps: random images of those present, and random questions about each."""
    for step in steps:
        if step % 20 == 0:
            shards.refresh()
        chosen = generator_for(seed, 6, step).choice(len(shards), images, replace=False)
        yield batch_of([shards[int(n)] for n in chosen], words, counts, (seed, 7, step))


def development_batches(
    shards: Shards, words: dict[str, int], seed: int, images: int, counts: dict[str, int]
) -> list[dict[str, Tensor]]:
    """All images of the development set with fixed questions."""
    return [
        batch_of([shards[n] for n in range(first, min(first + images, len(shards)))], words, counts, (seed, 8, first))
        for first in range(0, len(shards), images)
    ]
