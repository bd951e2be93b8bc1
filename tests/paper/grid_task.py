"""A task of our own for the grid studies: three images, one of them broken, and marks that depend on the answer."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from paper.study_command import parts

from clustrs.evaluation.tasks import Item, custom
from clustrs_paper.studies import StudyPart

QUESTIONS = 9
FAILING = 3


def build(root: Path) -> Path:
    """Nine questions, three per image; the last image can't be read."""
    root.mkdir()
    rows = []
    for number in range(3):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        rows += [
            {"id": f"{number}-{i}", "image": f"{number}.png", "question": f"Why {i}?", "answer": "x"} for i in range(3)
        ]
    (root / "2.png").write_bytes((root / "2.png").read_bytes()[:200])
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def mark(item: str, text: str) -> float:
    """From 0 to 1 in tenths, different for different answers."""
    return zlib.crc32(f"{item} {text}".encode()) % 11 / 10


def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens an answer, and our own marks for them where no judge is asked."""

    def score(self: custom.Custom, item: Item, text: str) -> float | None:
        return None if self.scoring == "judged" else mark(item.id, text)

    for scoring in ("exact", "judged"):
        monkeypatch.setitem(custom.NEW_TOKENS, scoring, 12)
    monkeypatch.setattr(custom.Custom, "score", score)


def run(study: Any, model: Path, data: Path, output: Path, *words: Any) -> StudyPart:
    """A study with these words on its command line."""
    (part,) = parts(study, model, "--output", output, "--task", "custom", "--data", data, *words)
    return part


def answers(output: Path) -> Iterator[dict[str, Any]]:
    for line in (output / "run" / "answers.jsonl").read_text().splitlines():
        yield json.loads(line)


def by_question(
    output: Path, keep: int, corruption: str, changed: dict[str, Any], marks: Any = lambda row: row["score"]
) -> dict[str, float]:
    """The mean over seeds of each question's score with a variant of ClustRS, from the record."""
    defaults = {"tau": 1.0, "distance": "huber", "shrink": True, "clip": [0.1, 0.95], "centroid": "mean"}
    parameters = {**defaults, **changed, "keep": keep}
    scores: dict[str, list[float]] = {}
    for row in answers(output):
        same = all(row["method"][name] == value for name, value in parameters.items())
        if same and row["corruption"] == corruption and row["error"] is None:
            scores.setdefault(row["item"], []).append(marks(row))
    return {item: sum(values) / len(values) for item, values in scores.items()}


def mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)
