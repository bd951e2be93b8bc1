"""Features on disk with their questions, and which questions are asked in a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from recipes.smol.questions import Question

COLLAGE = {
    "name": 5, "neighbor": 2, "where": 1, "across": 1, "place": 1, "describe": 1, "which": 1, "presence": 1,
    "count": 0.5,
}  # fmt: skip
"""Questions of each kind about a collage in one step; all questions about the other images are asked. "across" are
those about left and right: of the order of tokens only rows are read off easily, so from step 738 to 900, until they
were learned, four of these were asked, and three names."""
SINGLE, SCENE = 0.6, 1.0
"""Chances of the other images, relative to a collage."""


class Features:
    """The shards of one folder of features; those that appear later are taken in by `refresh`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: set[str] = set()
        self.files: list[Any] = []
        self.rows: list[tuple[int, int, dict[str, Any]]] = []
        self.refresh()

    def refresh(self) -> None:
        """Open new files."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name not in self.opened:
                self.opened.add(path.name)
                texts = json.loads(path.with_suffix(".json").read_text())
                self.rows += [(len(self.files), row, text) for row, text in enumerate(texts)]
                self.files.append(safe_open(path, "pt").__enter__())

    def chances(self) -> NDArray[np.float64]:
        """Return the chance of each image to be drawn."""
        weights = np.array([(SCENE, SINGLE, 1, 1, 1)[len(text["names"])] for _, _, text in self.rows])
        return weights / weights.sum()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, list[str], list[Question]]:
        """Return an image's features [N, D] in float16, the names of what it shows, and its questions."""
        file, row, text = self.rows[number]
        questions = [Question(**question) for question in text["questions"]]
        return self.files[file].get_slice("features")[row], list(text["names"]), questions


def generator_for(*key: int) -> Generator:
    """Return a random stream of its own for each key."""
    return default_rng(SeedSequence(key))


def kind_of(question: Question) -> str:
    """Return the key of a question in `COLLAGE`."""
    return "across" if question.kind == "place" and "left" in question.text else question.kind


def choose(questions: Sequence[Question], names: Sequence[str], generator: Generator) -> list[Question]:
    """Choose the questions of one step in random order."""
    order = [questions[i] for i in generator.permutation(len(questions))]
    if len(names) != 4:
        return order
    chosen: list[Question] = []
    for kind, count in COLLAGE.items():
        number = int(count) + (generator.random() < count % 1)
        chosen += [question for question in order if kind_of(question) == kind][:number]
    return chosen


def stack(features: Features, count: int) -> Tensor:
    """Return the features of the first images [count, N, D] in float32."""
    return torch.stack([features[number][0] for number in range(min(count, len(features)))]).float()
