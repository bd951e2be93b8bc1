"""Results of a run as arrays: the score of every answer, and which are failed, not judged or missing."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.store import AnswerRecord, identity, location, read_config, read_records, require
from clustrs.evaluation.verdicts import Pair, Verdicts, read_verdicts
from clustrs.pruners import variant_labels
from clustrs.validation import excerpt

MISSING, SCORED, FAILED, UNJUDGED = range(4)
"""States of an answer."""
LARGEST_GRID = 20_000_000
LARGEST_COUNT = 1_000_000_000
"""Largest number of items or kept tokens that a configuration may ask for."""
LARGEST_SHORT, LARGEST_INDEX = 2**15 - 1, 2**31 - 1
DESCENDING = ("jpeg",)
"""Corruptions whose lower levels are more severe."""

_Index = tuple[int, int, int]
"""Indices of a method, a condition and a seed."""
_Axes = Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True)
class Method:
    """Method of a run. `keep` is None for the unpruned model; `parameters` are all but name and keep."""

    name: str
    label: str
    keep: int | float | None
    parameters: Mapping[str, Any]

    @property
    def budget(self) -> str:
        """Return `keep` as tables show it: a count and a fraction of the same value are two budgets."""
        return "all" if self.keep is None else str(self.keep)


@dataclass(frozen=True)
class Condition:
    """Corruption of the images and its level, or "clean" and None."""

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
class KeptIndices:
    """Tokens kept by a method under a condition with a seed: of each answer the item and the number of tokens, then
    the tokens of all answers; -1 is the CLS token.
    """

    items: NDArray[np.int64]
    counts: NDArray[np.int64]
    tokens: NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class Run:
    """Results of a run, see `load_run`.

    Attributes:
        config: Content of config.json.
        judge: Model that scored the answers, or None.
        methods: The methods.
        conditions: The corruptions, from mild to severe; clean images come first.
        seeds: The seeds.
        items: Ids of the questions, sorted, so that the order of the records does not matter.
        kinds: Kinds of each question.
        scores: Scores [methods, conditions, seeds, items]; NaN unless the state is SCORED.
        states: MISSING, SCORED, FAILED or UNJUDGED [methods, conditions, seeds, items].
        kept: Kept tokens by indices of method, condition and seed, of pruning methods, if the run has clean and
            corrupted images to compare.
        errors: How often each error occurred.
        judge_errors: How often each error of the judge occurred.
        visual_tokens: Mean number of tokens that the language model read of an image [methods]; NaN without an answer.
        unpruned_tokens: Mean number that it would have read unpruned [methods].
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
    kept: Mapping[_Index, KeptIndices]
    errors: Mapping[str, int]
    judge_errors: Mapping[str, int]
    visual_tokens: NDArray[np.float64]
    unpruned_tokens: NDArray[np.float64]

    @property
    def scale(self) -> float:
        """Return the factor by which reports multiply scores."""
        return float(self.config["scale"])

    @property
    def totals_only(self) -> bool:
        """Check whether there is one score for all questions instead of one each, as in some imported results."""
        return bool(self.config.get("totals_only"))

    @property
    def expected(self) -> int:
        """Return the number of answers of the whole grid."""
        return len(self.methods) * len(self.conditions) * len(self.seeds) * int(self.config["items"])

    @property
    def present(self) -> int:
        """Return the number of answers so far, failed ones included."""
        return int((self.states != MISSING).sum())

    def count(self, state: int) -> int:
        """Count the answers in a state; MISSING counts against the whole grid."""
        return self.expected - self.present if state == MISSING else int((self.states == state).sum())

    @cached_property
    def unpruned(self) -> int | None:
        """Return the index of the method that keeps everything."""
        return next((i for i, method in enumerate(self.methods) if method.keep is None), None)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the labels of the pruning methods."""
        return tuple(dict.fromkeys(method.label for method in self.methods if method.keep is not None))

    @cached_property
    def budgets(self) -> tuple[str, ...]:
        """Return the budgets, counts before fractions; ("all",) if nothing was pruned."""
        pruning = sorted((isinstance(m.keep, float), m.keep, m.budget) for m in self.methods if m.keep is not None)
        return tuple(dict.fromkeys(budget for *_, budget in pruning)) or ("all",)

    def find(self, label: str, budget: str) -> int | None:
        """Return the index of a method by label and budget."""
        matches = (i for i, method in enumerate(self.methods) if (method.label, method.budget) == (label, budget))
        return next(matches, None)

    @cached_property
    def families(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of each corruption's conditions, mild before severe; "clean" is one of them."""
        families: dict[str, list[int]] = {}
        for index, condition in enumerate(self.conditions):
            families.setdefault(condition.name, []).append(index)
        return {name: tuple(indices) for name, indices in families.items()}


def load_run(folder: Path, judge: str | None = None) -> Run:
    """Read the results of a run.

    Args:
        folder: The folder of the run.
        judge: The judge whose scores count; needed if there are several.

    Returns:
        The results.

    Raises:
        ValueError: A file cannot be read, or does not fit the others.
    """
    try:
        return _load_run(Path(folder), judge)
    except RecursionError:
        raise ValueError(f"run {str(folder)!r}: config.json or a record is nested too deeply") from None


def _load_run(folder: Path, judge: str | None) -> Run:
    config = _config(folder)
    if judge is not None and not config["judged"]:
        raise ValueError(f"judge must be None, the answers of this run need no judge, got {judge!r}")
    methods = _methods(config["methods"])
    given = [_condition(text) for text in config["corruptions"]]
    conditions = _sorted(given)
    seeds = tuple(config["seeds"])
    if len({*given}) < len(given) or len({*seeds}) < len(seeds):
        raise ValueError("corruptions and seeds of config.json must not repeat")
    axes: dict[str, dict[Any, int]] = {
        "method": {identity(method): i for i, method in enumerate(config["methods"])},
        "corruption": {text: conditions.index(c) for text, c in zip(config["corruptions"], given, strict=True)},
        "seed": {seed: i for i, seed in enumerate(seeds)},
    }
    both = {condition.level is None for condition in conditions} == {True, False}
    compared = frozenset(i for i, method in enumerate(methods) if both and method.keep is not None)
    verdicts = read_verdicts(folder, judge) if config["judged"] else Verdicts(None, {}, {}, Counter())
    answers = _Answers(folder / "answers.jsonl", axes, compared, verdicts.scores)
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


class _KeptReader:
    """Collector of kept tokens, in two bytes each unless an image has more tokens than that."""

    def __init__(self) -> None:
        self.items, self.counts, self.tokens = array("q"), array("q"), array("h")

    def append(self, item: int, kept: list[int]) -> None:
        if kept and max(kept) > LARGEST_SHORT and self.tokens.typecode == "h":
            self.tokens = array("i", self.tokens)
        self.tokens.extend(array(self.tokens.typecode, kept))
        self.items.append(item)
        self.counts.append(len(kept))

    def packed(self, rank: NDArray[np.int64]) -> KeptIndices:
        tokens = np.frombuffer(self.tokens, dtype=self.tokens.typecode) if self.tokens else np.empty(0, np.int16)
        return KeptIndices(rank[np.array(self.items, np.int64)], np.array(self.counts, np.int64), tokens)


class _Answers:
    """Records of answers.jsonl in columns: indices of method, condition, seed and item, state and score.

    `axes` are the indices of methods, corruptions and seeds as records name them; `compared` are the methods whose kept
    tokens are compared between clean and corrupted images.
    """

    def __init__(
        self,
        path: Path,
        axes: Mapping[str, Mapping[Any, int]],
        compared: frozenset[int],
        verdicts: Mapping[Pair, float],
    ) -> None:
        self.path = path
        self.items: dict[str, tuple[str, ...]] = {}
        self.kept: dict[_Index, _KeptReader] = {}
        self._columns: tuple[array[Any], ...] = (*(array("i") for _ in range(4)), array("b"), array("d"))
        self.errors: Counter[str] = Counter()
        self._tokens: dict[int, list[int]] = {}
        numbers: dict[str, int] = {}
        kinds: dict[str, str] = {}
        for line, record in read_records(path, AnswerRecord):
            named = {"method": identity(record.method), "corruption": record.corruption, "seed": record.seed}
            try:
                method, condition, seed = (axes[name][value] for name, value in named.items())
                state, score = self._score(record, verdicts)
            except KeyError:
                name, value = next((name, value) for name, value in named.items() if value not in axes[name])
                where = location(path, line)
                raise ValueError(f"{where}: {name} {excerpt(value)} is not in config.json") from None
            except ValueError as error:
                raise ValueError(f"{location(path, line)}: {error}") from None
            item = numbers.setdefault(record.item, len(numbers))
            if record.item not in self.items:
                unique = dict.fromkeys(record.kinds)
                self.items[record.item] = tuple(kinds.setdefault(kind, kind) for kind in unique)
            for column, entry in zip(self._columns, (method, condition, seed, item, state, score), strict=True):
                column.append(entry)
            if record.error is not None:
                self.errors[record.error] += 1
                continue
            if record.visual_tokens is not None and record.unpruned_tokens is not None:  # imported records have none
                sums = self._tokens.setdefault(method, [0, 0, 0])
                for i, entry in enumerate((record.visual_tokens, record.unpruned_tokens, 1)):
                    sums[i] += entry
            if method in compared:
                self.kept.setdefault((method, condition, seed), _KeptReader()).append(item, record.kept or [])

    def _score(self, record: AnswerRecord, verdicts: Mapping[Pair, float]) -> tuple[int, float]:
        """Return the state and the score of an answer, and check its fields."""
        if record.error is not None:
            return FAILED, np.nan
        if record.text is None:
            raise ValueError("text must be a string where there is no error, got None")
        if record.kept is None:
            raise ValueError("kept must be a list of int where there is no error, got None")
        if record.kept and (min(record.kept) < -1 or max(record.kept) > LARGEST_INDEX):
            raise ValueError(f"kept must be token indices from 0 (or -1 for CLS), got {excerpt(record.kept)}")
        score = verdicts.get((record.item, record.text)) if record.score is None else record.score
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"score must be a number from 0 to 1 or null, got {excerpt(score)}")
        return (UNJUDGED, np.nan) if score is None else (SCORED, score)

    def mean_tokens(self, which: int, methods: int) -> NDArray[np.float64]:
        """Return the mean over each method's answers of the tokens that were read (0), or would be unpruned (1)."""
        sums = [self._tokens.get(method) for method in range(methods)]
        return np.array([np.nan if one is None else one[which] / one[2] for one in sums])

    def filled(self, shape: tuple[int, ...], rank: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int8]]:
        """Return scores and states in arrays of this shape; `rank` is the index of each item there."""
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
    """Read the configuration and check everything that is used here."""
    config, where = read_config(folder), repr(str(folder / "config.json"))
    for name, kind in (("task", str), ("model", str), ("items", int), ("judged", bool)):
        require(where, config, name, kind)
    for name, part in (("methods", dict), ("corruptions", str), ("seeds", int)):
        values = require(where, config, name, list)
        if not values or not all(isinstance(value, part) and not isinstance(value, bool) for value in values):
            raise ValueError(f"{where}: {name} must be a list of {part.__name__}, got {excerpt(values)}")
    scale = config.get("scale")
    if not 1 <= config["items"] <= LARGEST_COUNT:
        raise ValueError(f"{where}: items must be 1 to {LARGEST_COUNT}, got {excerpt(config['items'])}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 1e-6 <= scale <= 1e6:
        raise ValueError(f"{where}: scale must be a number above 0, got {excerpt(scale)}")
    return config


def _methods(described: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    """Return the methods with labels that tell apart variants of the same method."""
    plain = []
    for stored in described:
        name, keep = stored.get("name"), stored.get("keep")
        if not isinstance(name, str) or not name:
            raise ValueError(f"method {excerpt(stored)} of config.json has no name")
        if name == "none":
            keep = None
        elif isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= LARGEST_COUNT:
            where = f"method {excerpt(name)} of config.json"
            raise ValueError(f"{where}: keep must be a count or a fraction, got {excerpt(keep)}")
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
        raise ValueError(f"corruptions of config.json must be clean or NAME:LEVEL, got {excerpt(text)}")
    return Condition(name, value)


def _sorted(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Sort conditions: clean images first, then each corruption from mild to severe."""
    families = list(dict.fromkeys(condition.name for condition in conditions))

    def severity(condition: Condition) -> tuple[bool, int, float]:
        level = condition.level or 0.0
        worse = -level if condition.name in DESCENDING else level
        return condition.level is not None, families.index(condition.name), worse

    return tuple(sorted(conditions, key=severity))
