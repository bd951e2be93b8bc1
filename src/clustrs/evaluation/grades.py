"""MM-Vet's grade files, as the official evaluator writes them (`MODEL_JUDGE-grade-3runs.json`), and its totals.

    {"v1_0": {"model": ["gpt-4-0613", ...], "content": ["0.5", ...], "score": [0.5, ...]}, ...}

One entry of each list is one run of the judge. The predictions themselves are in another file.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clustrs import validation
from clustrs.evaluation.jsonl import need, read_bytes, read_object
from clustrs.evaluation.records import VerdictRecord
from clustrs.evaluation.store import write_whole
from clustrs.evaluation.task import Item
from clustrs.validation import excerpt

DECIMALS = 1
"""To which the official evaluator rounds, in per cent."""


@dataclass(frozen=True)
class Grades:
    """The scores of each question, one per judge run. `judge` is the model that the file names, or several of them.

    `without_number` counts the scores of 0 that the evaluator gave because the judge's reply was no number.
    """

    judge: str
    scores: Mapping[str, tuple[float, ...]]
    without_number: int

    @property
    def runs(self) -> int:
        return len(next(iter(self.scores.values())))


@dataclass(frozen=True)
class Totals:
    """What the official evaluator prints, in per cent, rounded as it rounds: `std` is over the judge runs.

    `capabilities` are its cap-score table, `integrations` its cap-int-score table: each question counts once there,
    under all of its capabilities together.
    """

    total: float
    std: float
    runs: tuple[float, ...]
    capabilities: Mapping[str, float]
    integrations: Mapping[str, float]

    def __str__(self) -> str:
        tables = (self.capabilities, self.integrations)
        each, together = (", ".join(f"{name} {value}" for name, value in table.items()) for table in tables)
        end = f"total {self.total}, std {self.std}, runs {list(self.runs)}"
        return f"{each}, {end}\n{together}, {end}"


def holds_grades(path: Path) -> bool:
    """Tell a grade file from a file of predictions, whose values are strings."""
    try:
        content = json.loads(read_bytes(Path(path)).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    values = list(content.values()) if isinstance(content, dict) else []
    return bool(values) and all(isinstance(value, dict) and "score" in value for value in values)


def read_grades(path: Path) -> Grades:
    """Read a grade file; every question needs a score from each judge run."""
    content = read_object(Path(path))
    if not content:
        raise ValueError(f"{str(path)!r} holds no grades")
    judges: set[str] = set()
    scores: dict[str, tuple[float, ...]] = {}
    without_number = 0
    for item, entry in content.items():
        where = f"{str(path)!r}, {excerpt(item)}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {excerpt(entry)} stands where model, content and score are expected")
        models, replies, marks = (need(where, entry, key, list) for key in ("model", "content", "score"))
        if not marks or not len(models) == len(replies) == len(marks):
            raise ValueError(f"{where}: model, content and score need one entry for each judge run")
        scores[item] = tuple(_score(where, mark) for mark in marks)
        judges |= {str(model) for model in models}
        without_number += sum(
            score == 0 and _is_no_number(reply) for score, reply in zip(scores[item], replies, strict=True)
        )
    counts = {item: len(own) for item, own in scores.items()}
    most = max(counts.values())
    short = [item for item, count in counts.items() if count < most]
    if short:
        raise ValueError(
            f"{str(path)!r}: {excerpt(short[0])} has {counts[short[0]]} of {most} judge runs, every question needs all"
        )
    return Grades(" + ".join(sorted(judges)), scores, without_number)


def totals(grades: Grades, items: Sequence[Item]) -> Totals:
    """Average as the official evaluator does: each judge run over the questions, then over the runs.

    Capabilities, and the combinations of them, come in the order of how many questions they have.
    """
    graded = [item for item in items if item.id in grades.scores]
    single: dict[str, list[str]] = {}
    together: dict[frozenset[str], list[Item]] = {}
    for item in graded:
        for kind in item.kinds:
            single.setdefault(kind, []).append(item.id)
        together.setdefault(frozenset(item.kinds), []).append(item)
    combined = {"_".join(group[0].kinds): [item.id for item in group] for group in together.values()}
    runs = _run_means(grades, [item.id for item in graded])
    capabilities, integrations = (
        {name: _rounded(_run_means(grades, ids).mean()) for name, ids in sorted(table.items(), key=_most_first)}
        for table in (single, combined)
    )
    rounded = tuple(_rounded(value) for value in runs)
    return Totals(_rounded(runs.mean()), _rounded(runs.std()), rounded, capabilities, integrations)


def _run_means(grades: Grades, ids: Sequence[str]) -> NDArray[np.float64]:
    """Average some questions in each judge run, in per cent."""
    return sum((np.array(grades.scores[item]) for item in ids), np.zeros(grades.runs)) / len(ids) * 100


def _most_first(entry: tuple[str, Sequence[str]]) -> int:
    return -len(entry[1])


def check_grades(grades: Grades, items: Sequence[Item], texts: Mapping[str, str]) -> None:
    """Refuse grades of questions that the task does not have, or that have no prediction."""
    known = {item.id for item in items}
    for name in grades.scores:
        if name not in known:
            raise ValueError(f"the grades have {excerpt(name)}, which the task does not")
        if name not in texts:
            raise ValueError(f"the grades have {excerpt(name)}, which has no prediction")


def write_grades(folder: Path, grades: Grades, texts: Mapping[str, str]) -> None:
    """Write the grades as the verdicts of a run, one round per judge run."""
    records = [
        VerdictRecord(item=item, text=texts[item], judge=grades.judge, round=number, score=score, error=None)
        for number in range(grades.runs)
        for item, score in ((item, own[number]) for item, own in grades.scores.items())
    ]
    write_whole(folder / "verdicts.jsonl", "".join(msgspec.json.encode(each).decode() + "\n" for each in records))


def _score(where: str, mark: Any) -> float:
    if not validation.is_number(mark) or not 0 <= mark <= 1:
        raise ValueError(f"{where}: score has {excerpt(mark)}, numbers from 0 to 1 are expected")
    return float(mark)


def _is_no_number(reply: Any) -> bool:
    """Whether a judge's reply is not what the evaluator takes: a number from 0 to 1 before the first space."""
    first = reply.split(" ")[0].strip() if isinstance(reply, str) else ""
    return not (re.fullmatch(r"[+]?(\d+\.?\d*|\.\d+)", first) and 0 <= float(first) <= 1)


def _rounded(value: Any) -> float:
    return float(np.round(value, DECIMALS))
