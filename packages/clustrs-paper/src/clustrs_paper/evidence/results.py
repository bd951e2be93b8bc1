"""Stored results of a model: the answers of its grids, one bit each, and the tables of its studies."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.metrics import Estimate, estimates
from clustrs.evaluation.results import SCORED, Condition, Method, Run
from clustrs.pruners import method_class

STORED = Path(__file__).parents[5] / "docs" / "results" / "evidence"
UNPRUNED = "none"
COLUMNS = ("task", "model", "method", "keep", "corruption", "level", "questions", "mean", "low", "high", "right")
NOISES = ("gaussian", "salt_pepper")
IMAGENET_C = "imagenet_c/"  # not in the paper
BLIND = 0.4
"""Under a corruption that leaves the unpruned model less than this share of its clean score nothing is compared."""
Bits = NDArray[np.bool_]
Row = Mapping[str, str]


@dataclass(frozen=True)
class Term:
    """A mean score with a weight: of a method at a budget (None: all tokens), over the conditions of a group.

    A group is "clean", a corruption (all its levels), one of its levels by rank ("gaussian 1" is the mildest), "noise",
    "other" (all corruptions that are not noise), or "all". The last two have the paper's corruptions alone.
    """

    weight: float
    method: str
    keep: int | None
    group: str


def lead(first: str, second: str, keep: int, group: str, weight: float = 1.0) -> tuple[Term, ...]:
    """Return the terms of the difference between two methods."""
    return (Term(weight, first, keep, group), Term(-weight, second, keep, group))


@dataclass(frozen=True)
class Answers:
    """Right and wrong answers by method, budget and condition."""

    task: str
    model: str
    right: Mapping[tuple[str, int | None, Condition], Bits]

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(dict.fromkeys(condition for *_, condition in self.right))

    @cached_property
    def seeing(self) -> tuple[Condition, ...]:
        """The conditions under which the unpruned model still answers; all of them where it was not measured."""
        scores = {c: self.right.get((UNPRUNED, None, c)) for c in self.conditions}
        clean = scores.get(Condition("clean"))
        if clean is None:
            return self.conditions
        return tuple(c for c in self.conditions if (own := scores[c]) is None or own.mean() >= BLIND * clean.mean())

    @property
    def questions(self) -> int:
        return max(len(cell) for cell in self.right.values())

    @property
    def fewest(self) -> int:
        """How many questions every cell has."""
        return min(len(cell) for cell in self.right.values())

    def group(self, name: str) -> tuple[Condition, ...]:
        """The conditions of a group of `Term`, those left out under which the model is blind."""
        corruption, _, rank = name.partition(" ")
        if corruption == "noise":
            found = [c for c in self.seeing if c.name in NOISES]
        elif corruption == "other":
            found = [c for c in self.seeing if c.name not in (*NOISES, "clean") and not c.name.startswith(IMAGENET_C)]
        elif corruption == "all":
            found = [c for c in self.seeing if not c.name.startswith(IMAGENET_C)]
        else:
            found = [c for c in self.seeing if c.name == corruption]
        if rank:
            levels = [c for c in self.conditions if c.name == corruption]
            found = [c for c in levels[int(rank) - 1 : int(rank)] if c in found]
        return tuple(found)

    def contrast(self, terms: Iterable[Term]) -> Estimate | None:
        """The weighted sum of mean scores, in points, with a 95 % interval over the first questions, which all cells
        have; None if a cell is missing."""
        parts = []
        for term in terms:
            cells = [self.right.get((term.method, term.keep, c)) for c in self.group(term.group)]
            found = [cell for cell in cells if cell is not None]
            if not cells or len(found) < len(cells):
                return None
            parts.append((term.weight, found))
        shared = min(len(cell) for _, found in parts for cell in found)
        total = np.asarray(sum(100 * w * np.mean([cell[:shared] for cell in found], axis=0) for w, found in parts))
        estimate = estimates(total[None])[0]
        if np.ptp(total) == 0:  # resampling equal values shows no spread: the rule of three says what is left open
            reach = 300 / (shared * sum(len(found) for _, found in parts) / 2)
            return Estimate(shared, float(total[0]), float(total[0]) - reach, float(total[0]) + reach)
        return estimate


def spec(method: Method) -> str:
    """A method by its name and the parameters that are not as proposed; the seed of its draws does not count."""
    defaults = {one.name: one.default for one in fields(method_class(method.name)) if one.default is not MISSING}
    words = [method.name]
    for key, value in method.parameters.items():
        default = defaults.get(key)
        if key != "seed" and value != (list(default) if isinstance(default, tuple) else default):
            words.append(f"{key}={plain(value)}")
    return " ".join(words)


def plain(value: Any) -> str:
    """A parameter's value without what a table does not need: 0-1 for [0.0, 1.0], true, 2 for 2.0."""
    if isinstance(value, list):
        return "-".join(map(plain, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def compact_rows(run: Run) -> list[dict[str, Any]]:
    """A row per cell of a complete run with one seed, whose scores are 0 or 1."""
    if (run.states != SCORED).any() or len(run.seeds) != 1 or not np.isin(run.scores, (0, 1)).all():
        raise ValueError("a complete run with one seed, and scores of 0 or 1, is expected")
    rows = []
    for m, method in enumerate(run.methods):
        found = estimates(100 * run.scores[m, :, 0])
        for condition, estimate, scores in zip(run.conditions, found, run.scores[m, :, 0], strict=True):
            bits = np.packbits(scores.astype(bool)).tobytes().hex()
            numbers = [f"{value:.3f}" for value in (estimate.mean, estimate.low, estimate.high) if value is not None]
            keep = "" if method.keep is None else method.keep
            cell = (run.config["task"], run.config["model"], spec(method), keep, condition.name, condition.level_text)
            rows.append(dict(zip(COLUMNS, (*cell, estimate.n, *numbers, bits), strict=True)))
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """A stored table; empty if there is none yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_answers(rows: Sequence[Row]) -> Answers | None:
    """The answers behind the rows of `compact_rows`; None where there are none."""
    if not rows:
        return None
    right = {}
    for row in rows:
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(row["right"]), dtype=np.uint8), count=int(row["questions"]))
        condition = Condition(row["corruption"], float(row["level"]) if row["level"] else None)
        right[row["method"], int(row["keep"]) if row["keep"] else None, condition] = bits.astype(bool)
    return Answers(rows[0]["task"], rows[0]["model"], right)


@dataclass(frozen=True)
class Stored:
    """Everything that is stored of a model; a part that was not measured is None or empty."""

    model: str
    grid: Answers | None = None
    parameters: Answers | None = None
    tables: Mapping[str, Sequence[Row]] | None = None
    report: str | None = None
    """The name of the file with the grid's report."""
    both: Answers | None = None
    """The grid with place and weight, where it is stored beside the other one."""

    def table(self, name: str) -> Sequence[Row]:
        return (self.tables or {}).get(name, ())


TABLES = ("levels", "stability", "denoising", "geometry", "overhead")


def load(model: str, folder: Path = STORED) -> Stored:
    """Load the results of a model from a folder."""
    names = ("grid", "parameters", "grid-both")
    grid, parameters, both = (read_answers(read_rows(folder / f"{model}-{name}.csv")) for name in names)
    tables = {name: read_rows(folder / f"{model}-{name}.csv") for name in TABLES}
    report = f"{model}-report.md"
    return Stored(model, grid, parameters, tables, report if (folder / report).exists() else None, both)


LABELS = {
    "none": "all tokens",
    "clustrs": "ClustRS",
    "clustrs shrink=false": "ClustRS without shrinkage",
    "clustrs distance=euclidean shrink=false": "Euclidean clustering alone",
    "divprune": "DivPrune",
    "visionzip": "VisionZip",
    "vispruner": "VisPruner",
    "fastervlm": "FasterVLM",
    "denoise inner={'name': 'fastervlm', 'keep': 16}": "FasterVLM with shrinkage",
    "denoise": "FasterVLM with shrinkage",
    "tome": "ToMe",
    "clustermeans": "ClusterMeans",
    "grid": "grid",
    "random": "random",
}
"""Names of methods in tables, in the order in which they stand there; others follow under their own names."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A Markdown table; the last `numbers` columns are aligned to the right."""
    marks = "|" + ":--|" * (len(head) - numbers) + "--:|" * numbers
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, marks, *others]) + "\n"
