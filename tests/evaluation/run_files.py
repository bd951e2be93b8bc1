"""A tiny model and a task of our own, for tests of runs."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tiny_models

from clustrs.evaluation.config import Config, expand_methods
from clustrs.evaluation.store import AnswerRecord, Key, key_of, read_answers


def build(root: Path, images: int = 4, questions: int = 2) -> Path:
    """A model in `root/model`; images, each with some questions of different lengths."""
    tiny_models.build("llava", "clip", root / "model")
    entries = []
    for number in range(images):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        entries += [entry(number, i) for i in range(questions)]
    write(root, entries)
    return root


def entry(image: int, number: int, **changes: Any) -> dict[str, Any]:
    question = f"Why {number}{' or why not' * number}?"
    return {
        "id": f"{image}-{number}",
        "image": f"{image}.png",
        "question": question,
        "answer": "x",
        **changes,
    }


def write(root: Path, entries: list[dict[str, Any]]) -> None:
    (root / "questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def config(root: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "task": "custom",
        "data": str(root),
        "model": str(root / "model"),
        "methods": expand_methods(["none", "clustrs"], [4]),
        "batch_size": 4,
        "max_new_tokens": 3,
    }
    return Config(**{**values, **changes})


def answers(folder: Path) -> dict[Key, AnswerRecord]:
    records = list(read_answers(folder))
    results = {key_of(record): record for record in records}
    assert len(results) == len(records)
    return results


def errors(folder: Path) -> dict[str, str]:
    """What went wrong, by question."""
    return {record.item: record.error for record in read_answers(folder) if record.error is not None}


@contextmanager
def time_limit(seconds: int = 60) -> Iterator[None]:
    """End what hangs, far beyond what anything here takes."""

    def give_up(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
