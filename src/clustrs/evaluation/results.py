"""What a run's record says: the score of every answer, what failed, what is not judged, what is missing."""

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.jsonl import excerpt, identity, lines, need
from clustrs.evaluation.store import read_config
from clustrs.evaluation.verdicts import Verdicts, read_verdicts

MISSING, SCORED, FAILED, UNJUDGED = range(4)
STATES = ("missing", "scored", "failed", "not judged")
LARGEST_GRID = 200_000_000
DESCENDING = ("jpeg",)
"""Corruptions whose lower levels are the worse ones."""

_Places = Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True)
class Method:
    """A method of the run. `keep` is None for the unpruned model; `parameters` are all but name and keep."""

    name: str
    label: str
    keep: int | float | None
    parameters: Mapping[str, Any]

    @property
    def budget(self) -> str:
        """`keep` as tables show it: a count and a share of the same value are two budgets."""
        return "all" if self.keep is None else str(self.keep)


@dataclass(frozen=True)
class Condition:
    """What was done to the images: a corruption and its level, or "clean" and None."""

    name: str
    level: float | None = None

    @property
    def level_text(self) -> str:
        if self.level is None:
            return ""
        return str(int(self.level)) if self.level.is_integer() else str(self.level)

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level_text}"


@dataclass(frozen=True)
class Cell:
    """One method (its label) at one budget under one corruption with one seed."""

    method: str
    keep: int | float | None
    corruption: str
    level: float | None
    seed: int


@dataclass(frozen=True)
class Answer:
    """One answer of a cell; `state` is "scored", "failed" or "not judged"."""

    item: str
    state: str
    score: float | None


@dataclass(frozen=True)
class Kept:
    """The tokens kept in a cell: for each answer the number of its item, how many, and, all in a row, which."""

    items: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.int32]


@dataclass(frozen=True)
class Run:
    """A record, ready for arithmetic. `scores` and `states` are [methods, conditions, seeds, items].

    A score is NaN unless its state is SCORED. Items are sorted by name: the order of the record does not matter.
    """

    config: Mapping[str, Any]
    judge: str | None
    methods: tuple[Method, ...]
    conditions: tuple[Condition, ...]
    seeds: tuple[int, ...]
    items: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    scores: NDArray[np.float64]
    states: NDArray[np.int8]
    kept: Mapping[tuple[int, int, int], Kept]
    errors: Mapping[str, int]
    judge_errors: Mapping[str, int]

    @property
    def scale(self) -> float:
        """What a score is multiplied with to be shown."""
        return float(self.config["scale"])

    @property
    def expected(self) -> int:
        """How many answers the whole grid has."""
        return len(self.methods) * len(self.conditions) * len(self.seeds) * int(self.config["items"])

    @property
    def present(self) -> int:
        """How many answers are there, failed ones included."""
        return int((self.states != MISSING).sum())

    def count(self, state: int) -> int:
        """How many answers are in that state; MISSING counts against the whole grid."""
        return self.expected - self.present if state == MISSING else int((self.states == state).sum())

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells of the grid, whether or not they have answers."""
        return tuple(
            Cell(method.label, method.keep, condition.name, condition.level, seed)
            for method in self.methods
            for condition in self.conditions
            for seed in self.seeds
        )

    def answers(self, cell: Cell) -> list[Answer]:
        """What is there of a cell."""
        place = np.unravel_index(self.cells.index(cell), self.scores.shape[:3])
        return [
            Answer(item, STATES[state], None if np.isnan(score) else float(score))
            for item, state, score in zip(self.items, self.states[place], self.scores[place], strict=True)
            if state != MISSING
        ]

    @cached_property
    def unpruned(self) -> int | None:
        """Number of the method that keeps everything."""
        return next((i for i, method in enumerate(self.methods) if method.keep is None), None)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The pruning methods, whatever their budget."""
        return tuple(dict.fromkeys(method.label for method in self.methods if method.keep is not None))

    @cached_property
    def budgets(self) -> tuple[str, ...]:
        """The budgets, counts before shares; ("all",) when nothing was pruned."""
        pruning = sorted((isinstance(m.keep, float), m.keep, m.budget) for m in self.methods if m.keep is not None)
        return tuple(dict.fromkeys(budget for *_, budget in pruning)) or ("all",)

    def find(self, label: str, budget: str) -> int | None:
        """The number of a method by label and budget."""
        found = (i for i, method in enumerate(self.methods) if (method.label, method.budget) == (label, budget))
        return next(found, None)

    @cached_property
    def families(self) -> dict[str, tuple[int, ...]]:
        """For each corruption the numbers of its conditions, mild before severe; "clean" is one of them."""
        found: dict[str, list[int]] = {}
        for number, condition in enumerate(self.conditions):
            found.setdefault(condition.name, []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}


def load_run(folder: Path, judge: str | None = None) -> Run:
    """Read a run's folder. A judged run with several judges needs the name of one of them."""
    config = _config(folder)
    if judge is not None and not config["judged"]:
        raise ValueError(f"judge={judge!r}: the answers of this run need no judge, leave it out")
    methods = _methods(config["methods"])
    given = [_condition(text) for text in config["corruptions"]]
    conditions = _sorted(given)
    seeds = tuple(config["seeds"])
    if len({*given}) < len(given) or len({*seeds}) < len(seeds):
        raise ValueError("corruptions and seeds of config.json: each may be given once")
    places: _Places = {
        "method": {identity(method): i for i, method in enumerate(config["methods"])},
        "corruption": {text: conditions.index(c) for text, c in zip(config["corruptions"], given, strict=True)},
        "seed": {seed: i for i, seed in enumerate(seeds)},
    }
    verdicts = read_verdicts(folder, judge) if config["judged"] else Verdicts(None, {}, {}, Counter())
    rows = _Rows(folder / "answers.jsonl", places, verdicts.scores)
    shape = (len(methods), len(conditions), len(seeds), len(rows.items))
    if len(rows.items) > config["items"]:
        raise ValueError(f"answers.jsonl has {len(rows.items)} questions, config.json says {config['items']}")
    if prod(shape) > LARGEST_GRID:
        raise ValueError(f"config.json: a grid of {prod(shape)} answers is more than a report can hold")
    order = sorted(range(len(rows.items)), key=list(rows.items).__getitem__)
    rank = np.argsort(np.array(order, dtype=np.int64))
    scores, states = np.full(shape, np.nan), np.full(shape, MISSING, dtype=np.int8)
    *cell, item = np.array(rows.places, dtype=np.int64).reshape(-1, 4).T
    at = (*cell, rank[item])
    scores[at], states[at] = rows.scores, rows.states
    named = list(rows.items.items())
    return Run(
        config=config,
        judge=verdicts.judge,
        methods=methods,
        conditions=conditions,
        seeds=seeds,
        items=tuple(named[i][0] for i in order),
        kinds=tuple(named[i][1] for i in order),
        scores=scores,
        states=states,
        kept={place: tokens.packed(rank) for place, tokens in rows.kept.items()},
        errors=rows.errors,
        judge_errors=verdicts.errors,
    )


class _Tokens:
    """The kept tokens of a cell while they are read."""

    def __init__(self) -> None:
        self.items, self.counts, self.tokens = array("q"), array("q"), array("i")

    def packed(self, rank: NDArray[np.int64]) -> Kept:
        items, counts = (np.array(part, dtype=np.int64) for part in (self.items, self.counts))
        return Kept(rank[items], counts, np.array(self.tokens, dtype=np.int32))


class _Rows:
    """The rows of answers.jsonl: where each belongs, its state and its score."""

    def __init__(self, path: Path, places: _Places, verdicts: Mapping[tuple[str, str], float]) -> None:
        self.items: dict[str, tuple[str, ...]] = {}
        self.places: list[tuple[int, int, int, int]] = []
        self.scores: list[float] = []
        self.states: list[int] = []
        self.kept: dict[tuple[int, int, int], _Tokens] = {}
        self.errors: Counter[str] = Counter()
        numbers: dict[str, int] = {}
        seen = set()
        for where, row in lines(path):
            item, kinds = need(where, row, "item", str), need(where, row, "kinds", list)
            if not all(isinstance(kind, str) for kind in kinds):
                raise ValueError(f"{where}: kinds is {excerpt(kinds)}, strings are expected")
            method = identity(need(where, row, "method", dict))
            corruption, seed = need(where, row, "corruption", str), need(where, row, "seed", int)
            cell = []
            for name, value in (("method", method), ("corruption", corruption), ("seed", seed)):
                if value not in places[name]:
                    raise ValueError(f"{where}: {name} {excerpt(value)} is not in config.json")
                cell.append(places[name][value])
            place = (cell[0], cell[1], cell[2], numbers.setdefault(item, len(numbers)))
            if place in seen:
                raise ValueError(f"{where}: {excerpt(item)} was answered with this method, corruption and seed before")
            seen.add(place)
            self.items.setdefault(item, tuple(dict.fromkeys(kinds)))
            state, score = self._score(where, row, verdicts)
            self.places.append(place)
            self.states.append(state)
            self.scores.append(score)
            if state != FAILED:
                self._keep(where, need(where, row, "kept", list), place)

    def _score(
        self, where: str, row: Mapping[str, Any], verdicts: Mapping[tuple[str, str], float]
    ) -> tuple[int, float]:
        if row.get("error") is not None:
            self.errors[need(where, row, "error", str)] += 1
            return FAILED, np.nan
        text = need(where, row, "text", str)
        score = _score(where, row)
        if score is None:
            score = verdicts.get((row["item"], text))
        return (UNJUDGED, np.nan) if score is None else (SCORED, score)

    def _keep(self, where: str, kept: list[Any], place: tuple[int, int, int, int]) -> None:
        try:
            tokens = array("i", kept)
        except (TypeError, OverflowError):
            raise ValueError(f"{where}: kept is {excerpt(kept)}, token numbers are expected") from None
        if kept and min(kept) < -1:
            raise ValueError(f"{where}: kept is {excerpt(kept)}, numbers from 0 (or -1 for CLS) are expected")
        cell = self.kept.setdefault(place[:3], _Tokens())
        cell.items.append(place[3])
        cell.counts.append(len(tokens))
        cell.tokens.extend(tokens)


def _config(folder: Path) -> dict[str, Any]:
    """The configuration, with everything checked that is used here."""
    config, where = read_config(folder), repr(str(folder / "config.json"))
    for name, kind in (("task", str), ("model", str), ("items", int), ("judged", bool)):
        need(where, config, name, kind)
    for name, part in (("methods", dict), ("corruptions", str), ("seeds", int)):
        values = need(where, config, name, list)
        if not values or not all(isinstance(value, part) and not isinstance(value, bool) for value in values):
            raise ValueError(f"{where}: {name} is {excerpt(values)}, a list of {part.__name__} is expected")
    scale = config.get("scale")
    if config["items"] < 1:
        raise ValueError(f"{where}: items is {config['items']}, 1 or more is expected")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-6 <= scale <= 1e6:
        raise ValueError(f"{where}: scale is {excerpt(scale)}, a number above 0 is expected")
    return config


def _score(where: str, row: Mapping[str, Any]) -> float | None:
    score = row.get("score")
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise ValueError(f"{where}: score is {excerpt(score)}, a number from 0 to 1 or null is expected")
    return float(score)


def _methods(described: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    """The methods with labels that tell apart those of the same name and budget."""
    plain = []
    for stored in described:
        name, keep = stored.get("name"), stored.get("keep")
        if not isinstance(name, str) or not name:
            raise ValueError(f"method {stored!r} of config.json has no name")
        if name == "none":
            keep = None
        elif isinstance(keep, bool) or not isinstance(keep, int | float) or not isfinite(keep) or keep <= 0:
            raise ValueError(f"method {name!r} of config.json: keep is {keep!r}, a count or a share is expected")
        plain.append(Method(name, name, keep, {k: v for k, v in stored.items() if k not in ("name", "keep")}))
    labelled = []
    for method in plain:
        alike = [other for other in plain if (other.name, other.budget) == (method.name, method.budget)]
        names = dict.fromkeys(name for other in alike for name in other.parameters)
        differing = [name for name in names if len({identity(other.parameters.get(name)) for other in alike}) > 1]
        label = " ".join([method.name, *(f"{name}={_short(method.parameters.get(name))}" for name in differing)])
        labelled.append(Method(method.name, label, method.keep, method.parameters))
    if len({(method.label, method.budget) for method in labelled}) < len(labelled):
        raise ValueError("methods of config.json: two of them are the same")
    return tuple(labelled)


def _short(value: Any) -> str:
    """A parameter's value in a label: 2.0 as 2, a word without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, separators=(",", ":"))


def _condition(text: str) -> Condition:
    if text == "clean":
        return Condition("clean")
    name, _, level = text.rpartition(":")
    try:
        value = float(level)
    except ValueError:
        value = np.nan
    if not name or not isfinite(value):
        raise ValueError(f"corruption {text!r} of config.json: clean or NAME:LEVEL is expected")
    return Condition(name, value)


def _sorted(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Clean images first, then each corruption from mild to severe."""
    families = list(dict.fromkeys(condition.name for condition in conditions))

    def place(condition: Condition) -> tuple[bool, int, float]:
        level = condition.level or 0.0
        worse = -level if condition.name in DESCENDING else level
        return condition.level is not None, families.index(condition.name), worse

    return tuple(sorted(conditions, key=place))
