"""The results of a run: the score of every answer, what failed, what is not judged, what is missing."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.store import AnswerRecord, identity, location, need, read_config, read_records
from clustrs.evaluation.verdicts import Verdicts, read_verdicts
from clustrs.pruners import variant_labels
from clustrs.validation import excerpt

MISSING, SCORED, FAILED, UNJUDGED = range(4)
STATES = ("missing", "scored", "failed", "not judged")
LARGEST_GRID = 20_000_000
LARGEST_COUNT = 1_000_000_000
"""Of items or kept tokens that a configuration may ask for."""
LARGEST_SHORT, LARGEST_INDEX = 2**15 - 1, 2**31 - 1
DESCENDING = ("jpeg",)
"""Corruptions whose lower levels are the worse ones."""

_Index = tuple[int, int, int]
"""Of a method, a condition and a seed."""


@dataclass(frozen=True)
class Method:
    """A method of the run. `keep` is None for the unpruned model; `parameters` are all but name and keep."""

    name: str
    label: str
    keep: int | float | None
    parameters: Mapping[str, Any]

    @property
    def budget(self) -> str:
        """`keep` as tables show it: a count and a fraction of the same value are two budgets."""
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
        return str(int(self.level)) if self.level.is_integer() and abs(self.level) < 1e15 else str(self.level)

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
class ScoredAnswer:
    """One answer of a cell; `state` is "scored", "failed" or "not judged"."""

    item: str
    state: str
    score: float | None


@dataclass(frozen=True)
class KeptTokens:
    """The tokens kept in a cell: for each answer the index of its item and how many; then the tokens of all answers.

    -1 is the CLS token.
    """

    items: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Run:
    """The results of a run, ready for arithmetic. `scores` and `states` are [methods, conditions, seeds, items].

    A score is NaN unless its state is SCORED. Items are sorted by name: the order of the records does not matter.
    `kept` has the cells whose tokens can be compared: of pruning methods, where there are clean and corrupted images.
    `visual_tokens` is what the language model read of an image on average, with each method, and `unpruned_tokens` what
    it would have read; NaN for a method without an answer.
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
    kept: Mapping[_Index, KeptTokens]
    errors: Mapping[str, int]
    judge_errors: Mapping[str, int]
    visual_tokens: NDArray[np.float64]
    unpruned_tokens: NDArray[np.float64]

    @property
    def scale(self) -> float:
        """The factor by which scores are multiplied to be shown."""
        return float(self.config["scale"])

    @property
    def totals_only(self) -> bool:
        """Whether there is one score for all questions instead of one each, as results from elsewhere may have it."""
        return bool(self.config.get("totals_only"))

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

    def answers(self, cell: Cell) -> list[ScoredAnswer]:
        """The answers that a cell has so far."""
        index = np.unravel_index(self.cells.index(cell), self.scores.shape[:3])
        return [
            ScoredAnswer(item, STATES[state], None if np.isnan(score) else float(score))
            for item, state, score in zip(self.items, self.states[index], self.scores[index], strict=True)
            if state != MISSING
        ]

    @cached_property
    def unpruned(self) -> int | None:
        """The index of the method that keeps everything."""
        return next((i for i, method in enumerate(self.methods) if method.keep is None), None)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The pruning methods, whatever their budget."""
        return tuple(dict.fromkeys(method.label for method in self.methods if method.keep is not None))

    @cached_property
    def budgets(self) -> tuple[str, ...]:
        """The budgets, counts before fractions; ("all",) when nothing was pruned."""
        pruning = sorted((isinstance(m.keep, float), m.keep, m.budget) for m in self.methods if m.keep is not None)
        return tuple(dict.fromkeys(budget for *_, budget in pruning)) or ("all",)

    def find(self, label: str, budget: str) -> int | None:
        """The index of a method by label and budget."""
        matches = (i for i, method in enumerate(self.methods) if (method.label, method.budget) == (label, budget))
        return next(matches, None)

    @cached_property
    def families(self) -> dict[str, tuple[int, ...]]:
        """For each corruption the indices of its conditions, mild before severe; "clean" is one of them."""
        families: dict[str, list[int]] = {}
        for index, condition in enumerate(self.conditions):
            families.setdefault(condition.name, []).append(index)
        return {name: tuple(indices) for name, indices in families.items()}


def load_run(folder: Path, judge: str | None = None) -> Run:
    """Read a run's folder. A judged run with several judges needs the name of one of them."""
    try:
        return _load_run(Path(folder), judge)
    except RecursionError:
        raise ValueError(f"run {str(folder)!r}: config.json or a record is nested too deeply") from None


def _load_run(folder: Path, judge: str | None) -> Run:
    config = _config(folder)
    if judge is not None and not config["judged"]:
        raise ValueError(f"judge={judge!r}: the answers of this run need no judge, leave it out")
    methods = _methods(config["methods"])
    given = [_condition(text) for text in config["corruptions"]]
    conditions = _sorted(given)
    seeds = tuple(config["seeds"])
    if len({*given}) < len(given) or len({*seeds}) < len(seeds):
        raise ValueError("corruptions and seeds of config.json: each may be given once")
    axes = _Axes(
        methods={identity(method): i for i, method in enumerate(config["methods"])},
        conditions={text: conditions.index(c) for text, c in zip(config["corruptions"], given, strict=True)},
        seeds={seed: i for i, seed in enumerate(seeds)},
        compared=_compared(methods, conditions),
    )
    verdicts = read_verdicts(folder, judge) if config["judged"] else Verdicts(None, {}, {}, Counter())
    answers = _Answers(folder / "answers.jsonl", axes, verdicts.scores)
    shape = (len(methods), len(conditions), len(seeds), len(answers.items))
    if len(answers.items) > config["items"]:
        raise ValueError(f"answers.jsonl has {len(answers.items)} questions, config.json says {config['items']}")
    if prod(shape) > LARGEST_GRID:
        raise ValueError(f"config.json: a grid of {prod(shape)} answers is more than a report can hold")
    names = list(answers.items)
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.argsort(np.array(order, dtype=np.int64))
    scores, states = answers.filled(shape, rank)
    return Run(
        config=config,
        judge=verdicts.judge,
        methods=methods,
        conditions=conditions,
        seeds=seeds,
        items=tuple(names[i] for i in order),
        kinds=tuple(answers.items[names[i]] for i in order),
        scores=scores,
        states=states,
        kept={cell: tokens.packed(rank) for cell, tokens in answers.kept.items()},
        errors=answers.errors,
        judge_errors=verdicts.errors,
        visual_tokens=answers.mean_tokens(0, len(methods)),
        unpruned_tokens=answers.mean_tokens(1, len(methods)),
    )


@dataclass(frozen=True)
class _Axes:
    """The index of every method, corruption and seed of the configuration, as records name them.

    `compared` are the methods whose kept tokens are needed to compare clean with corrupted images.
    """

    methods: Mapping[str, int]
    conditions: Mapping[str, int]
    seeds: Mapping[int, int]
    compared: frozenset[int]

    def cell(self, record: AnswerRecord, where: Callable[[], str]) -> _Index:
        """The indices of the record's method, corruption and seed."""
        method, corruption, seed = identity(record.method), record.corruption, record.seed
        if method not in self.methods:
            raise ValueError(f"{where()}: method {excerpt(method)} is not in config.json")
        if corruption not in self.conditions:
            raise ValueError(f"{where()}: corruption {excerpt(corruption)} is not in config.json")
        if seed not in self.seeds:
            raise ValueError(f"{where()}: seed {excerpt(seed)} is not in config.json")
        return self.methods[method], self.conditions[corruption], self.seeds[seed]


class _KeptReader:
    """The kept tokens of a cell while they are read: in two bytes each, unless an image has more tokens than that."""

    def __init__(self) -> None:
        self.items, self.counts, self.tokens = array("q"), array("q"), array("h")

    def append(self, item: int, kept: list[int]) -> None:
        if kept and max(kept) > LARGEST_SHORT and self.tokens.typecode == "h":
            self.tokens = array("i", self.tokens)
        self.tokens.extend(array(self.tokens.typecode, kept))
        self.items.append(item)
        self.counts.append(len(kept))

    def packed(self, rank: NDArray[np.int64]) -> KeptTokens:
        tokens = np.frombuffer(self.tokens, dtype=self.tokens.typecode) if self.tokens else np.empty(0, np.int16)
        return KeptTokens(rank[np.array(self.items, np.int64)], np.array(self.counts, np.int64), tokens)


class _Answers:
    """The records of answers.jsonl, in columns: where each belongs, its state and its score."""

    def __init__(self, path: Path, axes: _Axes, verdicts: Mapping[tuple[str, str], float]) -> None:
        self.path = path
        self.items: dict[str, tuple[str, ...]] = {}
        self.kept: dict[_Index, _KeptReader] = {}
        self._columns: tuple[array[Any], ...] = (*(array("i") for _ in range(4)), array("b"), array("d"))
        self.errors: Counter[str] = Counter()
        self._tokens: dict[int, list[int]] = {}
        self._verdicts = verdicts
        numbers: dict[str, int] = {}
        kinds: dict[str, str] = {}
        for line, record in read_records(path, AnswerRecord):
            where = partial(location, path, line)
            cell = axes.cell(record, where)
            item = numbers.setdefault(record.item, len(numbers))
            if record.item not in self.items:
                unique = dict.fromkeys(record.kinds)
                self.items[record.item] = tuple(kinds.setdefault(kind, kind) for kind in unique)
            state, score = self._score(record, where)
            for column, value in zip(self._columns, (*cell, item, state, score), strict=True):
                column.append(value)
            if record.error is not None:
                self.errors[record.error] += 1
            else:
                kept = self._checked(record.kept, where)
                self._count_tokens(cell[0], record)
                if cell[0] in axes.compared:
                    self.kept.setdefault(cell, _KeptReader()).append(item, kept)

    def _score(self, record: AnswerRecord, where: Callable[[], str]) -> tuple[int, float]:
        if record.error is not None:
            return FAILED, np.nan
        if record.text is None:
            raise ValueError(f"{where()}: text is None and there is no error, a string is expected")
        score = self._verdicts.get((record.item, record.text)) if record.score is None else record.score
        if score is None:
            return UNJUDGED, np.nan
        if not 0 <= score <= 1:
            raise ValueError(f"{where()}: score is {excerpt(score)}, a number from 0 to 1 or null is expected")
        return SCORED, score

    def _checked(self, kept: list[int] | None, where: Callable[[], str]) -> list[int]:
        """The token indices, which have to fit into 32 bits."""
        if kept is None:
            raise ValueError(f"{where()}: kept is None and there is no error, a list of int is expected")
        if kept and (min(kept) < -1 or max(kept) > LARGEST_INDEX):
            raise ValueError(f"{where()}: kept is {excerpt(kept)}, token indices from 0 (or -1 for CLS) are expected")
        return kept

    def _count_tokens(self, method: int, record: AnswerRecord) -> None:
        """Add up the tokens of a method's answers; records that were imported have none."""
        if record.visual_tokens is not None and record.unpruned_tokens is not None:
            sums = self._tokens.setdefault(method, [0, 0, 0])
            for i, value in enumerate((record.visual_tokens, record.unpruned_tokens, 1)):
                sums[i] += value

    def mean_tokens(self, which: int, methods: int) -> NDArray[np.float64]:
        """The mean over each method's answers of the tokens that were read (0), or would have been unpruned (1)."""
        sums = [self._tokens.get(method) for method in range(methods)]
        return np.array([np.nan if one is None else one[which] / one[2] for one in sums])

    def filled(self, shape: tuple[int, ...], rank: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
        """Scores and states in arrays of this shape; `rank` is the index of each item there."""
        scores, states = np.full(shape, np.nan), np.full(shape, MISSING, dtype=np.int8)
        if self._columns[0]:
            method, condition, seed, item, state, score = (np.frombuffer(c, dtype=c.typecode) for c in self._columns)
            flat = np.ravel_multi_index((method, condition, seed, rank[item]), shape)
            self._check_unique(flat, item)
            scores.reshape(-1)[flat], states.reshape(-1)[flat] = score, state
        return scores, states

    def _check_unique(self, flat: NDArray[np.int64], item: NDArray[np.int32]) -> None:
        """Refuse a second answer to the same question with the same method, corruption and seed."""
        order = np.argsort(flat, kind="stable")
        repeated = order[1:][flat[order[1:]] == flat[order[:-1]]]
        if len(repeated):
            first = int(repeated.min())
            name = list(self.items)[item[first]]
            where = location(self.path, first + 1)
            raise ValueError(f"{where}: {excerpt(name)} was answered with this method, corruption and seed before")


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
    if not 1 <= config["items"] <= LARGEST_COUNT:
        raise ValueError(f"{where}: items is {excerpt(config['items'])}, 1 to {LARGEST_COUNT} is expected")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-6 <= scale <= 1e6:
        raise ValueError(f"{where}: scale is {excerpt(scale)}, a number above 0 is expected")
    return config


def _compared(methods: Sequence[Method], conditions: Sequence[Condition]) -> frozenset[int]:
    """The methods whose kept tokens can be compared between clean and corrupted images."""
    both = {condition.level is None for condition in conditions} == {True, False}
    return frozenset(i for i, method in enumerate(methods) if both and method.keep is not None)


def _methods(described: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    """The methods with labels that tell apart variants of the same method."""
    plain = []
    for stored in described:
        name, keep = stored.get("name"), stored.get("keep")
        if not isinstance(name, str) or not name:
            raise ValueError(f"method {excerpt(stored)} of config.json has no name")
        if name == "none":
            keep = None
        elif isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= LARGEST_COUNT:
            kept = excerpt(keep)
            raise ValueError(
                f"method {excerpt(name)} of config.json: keep is {kept}, a count or a fraction is expected"
            )
        plain.append(Method(name, name, keep, {k: v for k, v in stored.items() if k not in ("name", "keep")}))
    labels = variant_labels([{**method.parameters, "name": method.name} for method in plain])
    labelled = [replace(method, label=label) for method, label in zip(plain, labels, strict=True)]
    if len({(method.label, method.budget) for method in labelled}) < len(labelled):
        raise ValueError("methods of config.json: two of them are the same")
    return tuple(labelled)


def _condition(text: str) -> Condition:
    if text == "clean":
        return Condition("clean")
    name, _, level = text.rpartition(":")
    try:
        value = float(level)
    except ValueError:
        value = np.nan
    if not name or not isfinite(value):
        raise ValueError(f"corruption {excerpt(text)} of config.json: clean or NAME:LEVEL is expected")
    return Condition(name, value)


def _sorted(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Clean images first, then each corruption from mild to severe."""
    families = list(dict.fromkeys(condition.name for condition in conditions))

    def severity(condition: Condition) -> tuple[bool, int, float]:
        level = condition.level or 0.0
        worse = -level if condition.name in DESCENDING else level
        return condition.level is not None, families.index(condition.name), worse

    return tuple(sorted(conditions, key=severity))
