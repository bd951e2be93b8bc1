"""Results of a run as arrays: the score of every answer, and which are failed, not judged or missing."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.store import AnswerRecord, VerdictRecord, identity, read_config, read_records, require
from clustrs.pruners import variant_labels
from clustrs.validation import excerpt

MISSING, SCORED, FAILED, UNJUDGED = range(4)  # states of an answer
LARGEST_GRID = 20_000_000
LARGEST_COUNT = 1_000_000_000  # largest number of items or kept tokens that a configuration may ask for
LMMS_RESULTS = "_results.json"  # how the names of lmms-eval's result files end
DESCENDING = ("jpeg",)  # corruptions whose lower levels are more severe
Name = Annotated[str, msgspec.Meta(min_length=1, description="a name")]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=LARGEST_COUNT, description="a fraction")]
Budget = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT, description="a count")] | Fraction
CONFIG: dict[str, Any] = {  # entries of config.json that results need
    "task": str,
    "model": str,
    "judged": bool,
    "items": Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT, description=f"1 to {LARGEST_COUNT}")],
    "scale": Annotated[float, msgspec.Meta(ge=1e-6, le=1e6, description="a number above 0")],
    "methods": Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, description="a list of dict")],
    "corruptions": Annotated[list[str], msgspec.Meta(min_length=1, description="a list of str")],
    "seeds": Annotated[list[int], msgspec.Meta(min_length=1, description="a list of int")],
}

Pair = tuple[str, str]  # id of a question and the text that is judged
KeptTokens = Mapping[int, NDArray[np.int32]]  # tokens kept by a method, by the item's index; -1 is the CLS token
_Index = tuple[int, ...]  # indices of a method, a condition and a seed


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
class Run:
    """Results of a run, see `load_run`. Arrays are [methods, conditions, seeds, items] unless stated otherwise."""

    config: Mapping[str, Any]  # content of config.json
    judge: str | None  # model that scored the answers
    methods: tuple[Method, ...]
    conditions: tuple[Condition, ...]  # from mild to severe; clean images come first
    seeds: tuple[int, ...]
    items: tuple[str, ...]  # ids of the questions, sorted, so that the order of the records does not matter
    kinds: tuple[tuple[str, ...], ...]  # of each question
    scores: NDArray[np.float64]  # NaN unless the state is SCORED
    states: NDArray[np.int8]  # MISSING, SCORED, FAILED or UNJUDGED
    kept: Mapping[_Index, KeptTokens]  # of pruning methods, if the run has clean and corrupted images to compare
    errors: Mapping[str, int]  # how often each error occurred
    judge_errors: Mapping[str, int]
    visual_tokens: NDArray[np.float64]  # mean number that the language model read of an image [methods], or NaN
    unpruned_tokens: NDArray[np.float64]  # mean number that it would have read unpruned [methods]
    average_tokens: NDArray[np.float64]  # mean over layers of the language model, too [methods]

    @property
    def scale(self) -> float:
        return float(self.config["scale"])

    @property
    def settings(self) -> dict[str, Any]:
        """Return the configuration with what "auto" chose; older runs do not say how they attend."""
        return {"attention": "plain", **self.config, **self.chosen}

    @property
    def chosen(self) -> dict[str, Any]:
        chosen = self.config.get("chosen")
        return chosen if isinstance(chosen, dict) else {}

    @property
    def totals_only(self) -> bool:
        """Check whether there is one score for all questions instead of one each, as in some imported results."""
        return bool(self.config.get("totals_only"))

    @property
    def expected(self) -> int:
        return len(self.methods) * len(self.conditions) * len(self.seeds) * int(self.config["items"])

    @property
    def present(self) -> int:
        return int((self.states != MISSING).sum())

    def count(self, state: int) -> int:
        """Count the answers in a state; MISSING counts against the whole grid."""
        return self.expected - self.present if state == MISSING else int((self.states == state).sum())

    @cached_property
    def unpruned(self) -> int | None:
        return next((i for i, method in enumerate(self.methods) if method.keep is None), None)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(method.label for method in self.methods if method.keep is not None))

    @cached_property
    def budgets(self) -> tuple[str, ...]:
        """Return the budgets, counts before fractions; ("all",) if nothing was pruned."""
        pruning = sorted((isinstance(m.keep, float), m.keep, m.budget) for m in self.methods if m.keep is not None)
        return tuple(dict.fromkeys(budget for *_, budget in pruning)) or ("all",)

    def find(self, label: str, budget: str) -> int | None:
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
    config, where = read_config(folder), repr(str(folder / "config.json"))
    for name, kind in CONFIG.items():
        require(where, config, name, kind)
    if judge is not None and not config["judged"]:
        raise ValueError(f"judge must be None, the answers of this run need no judge, got {judge!r}")
    methods, seeds, by_text = _methods(config["methods"]), tuple(config["seeds"]), _conditions(config["corruptions"])
    conditions = tuple(by_text.values())
    if len({*conditions}) < len(config["corruptions"]) or len({*seeds}) < len(seeds):
        raise ValueError("corruptions and seeds of config.json must not repeat")
    axes: dict[str, dict[Any, int]] = {
        "method": {identity(method): i for i, method in enumerate(config["methods"])},
        "corruption": {text: i for i, text in enumerate(by_text)},
        "seed": {seed: i for i, seed in enumerate(seeds)},
    }
    shape = (len(methods), len(conditions), len(seeds))
    compares = {condition.level is None for condition in conditions} == {True, False}
    verdicts = read_verdicts(folder, judge) if config["judged"] else Verdicts(None, {}, Counter())
    items: dict[str, tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.int8]]] = {}  # kinds, scores, states
    kept: dict[_Index, dict[str, NDArray[np.int32]]] = {}
    errors: Counter[str] = Counter()
    tokens = np.zeros((4, len(methods)))  # read, unpruned, read as a mean over layers, answers
    for where, record in read_records(folder / "answers.jsonl", AnswerRecord):
        named = {"method": identity(record.method), "corruption": record.corruption, "seed": record.seed}
        for name, value in named.items():
            if value not in axes[name]:
                raise ValueError(f"{where}: {name} {excerpt(value)} is not in config.json")
        cell = tuple(axes[name][value] for name, value in named.items())
        if record.item not in items:
            if (len(items) + 1) * math.prod(shape) > LARGEST_GRID:
                raise ValueError(f"config.json: a grid of more than {LARGEST_GRID} answers cannot be reported")
            unique = tuple(dict.fromkeys(record.kinds))
            items[record.item] = (unique, np.full(shape, np.nan), np.full(shape, MISSING, dtype=np.int8))
        _, scores, states = items[record.item]
        if states[cell] != MISSING:
            name = excerpt(record.item)
            raise ValueError(f"{where}: {name} was answered with this method, corruption and seed before")
        if record.error is not None:
            states[cell] = FAILED
            errors[record.error] += 1
            continue
        if record.text is None or record.kept is None:
            raise ValueError(f"{where}: text and kept must be given where there is no error, got null")
        score = verdicts.scores.get((record.item, record.text)) if record.score is None else record.score
        states[cell], scores[cell] = (UNJUDGED, np.nan) if score is None else (SCORED, score)
        if record.visual_tokens is not None and record.unpruned_tokens is not None:  # imported records have none
            average = record.visual_tokens if record.average_tokens is None else record.average_tokens
            tokens[:, cell[0]] += (record.visual_tokens, record.unpruned_tokens, average, 1)
        if compares and methods[cell[0]].keep is not None:
            kept.setdefault(cell, {})[record.item] = np.array(record.kept, np.int32)
    if len(items) > config["items"]:
        raise ValueError(f"answers.jsonl has {len(items)} questions, config.json says {config['items']}")
    names = sorted(items)
    rank = {name: i for i, name in enumerate(names)}
    scores, states = np.full((*shape, len(names)), np.nan), np.full((*shape, len(names)), MISSING, np.int8)
    for name, i in rank.items():
        _, scores[..., i], states[..., i] = items[name]
    means = np.divide(tokens[:3], tokens[3], out=np.full((3, len(methods)), np.nan), where=tokens[3] > 0)
    return Run(
        config=config,
        judge=verdicts.judge,
        methods=methods,
        conditions=conditions,
        seeds=seeds,
        items=tuple(names),
        kinds=tuple(items[name][0] for name in names),
        scores=scores,
        states=states,
        kept={cell: {rank[name]: tokens for name, tokens in own.items()} for cell, own in kept.items()},
        errors=errors,
        judge_errors=verdicts.errors,
        visual_tokens=means[0],
        unpruned_tokens=means[1],
        average_tokens=means[2],
    )


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of one judge: mean scores over the rounds that worked, and how often each error occurred."""

    judge: str | None
    scores: dict[Pair, float]
    errors: Counter[str]


def stored_verdicts(path: Path) -> Iterator[VerdictRecord]:
    return (verdict for _, verdict in (read_records(path, VerdictRecord) if path.exists() else ()))


def read_verdicts(folder: Path, judge: str | None = None) -> Verdicts:
    """Read the verdicts of a judge; within a round the last score counts, a failure only where there is none."""
    path = Path(folder) / "verdicts.jsonl"
    latest: dict[str, dict[tuple[int, str, str], float | str]] = {}
    for verdict in stored_verdicts(path):
        marks, key = latest.setdefault(verdict.judge, {}), (verdict.round, verdict.item, verdict.text)
        if verdict.score is not None:
            marks[key] = verdict.score
        else:
            marks.setdefault(key, verdict.error or "no score")
    judges = ", ".join(sorted(latest))
    if judge is None and len(latest) > 1:
        raise ValueError(f"{str(path)!r} has verdicts of several judges: choose one of {judges}")
    if judge is not None and latest and judge not in latest:
        raise ValueError(f"judge must be one of {judges} for {str(path)!r}, got {judge!r}")
    chosen = judge if judge is not None else next(iter(latest), None)
    scores: dict[Pair, list[float]] = {}
    errors: Counter[str] = Counter()
    for (_, item, text), outcome in latest.get(chosen or "", {}).items():
        if isinstance(outcome, str):
            errors[outcome] += 1
        else:
            scores.setdefault((item, text), []).append(outcome)
    return Verdicts(chosen, {pair: math.fsum(marks) / len(marks) for pair, marks in scores.items()}, errors)


def _methods(described: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    plain = []
    for stored in described:
        where = f"method {excerpt(stored)} of config.json"
        name = require(where, stored, "name", Name)
        keep = None if name == "none" else require(where, stored, "keep", Budget)
        plain.append(Method(name, name, keep, {k: v for k, v in stored.items() if k not in ("name", "keep")}))
    distinct = len({identity(stored) for stored in described}) == len(described)  # before labels, which take long
    labels = variant_labels([{**method.parameters, "name": method.name} for method in plain]) if distinct else []
    labelled = [replace(method, label=label) for method, label in zip(plain, labels, strict=distinct)]
    if len({(method.label, method.budget) for method in labelled}) < len(plain):
        raise ValueError("methods of config.json: two of them are the same")
    return tuple(labelled)


def _conditions(given: Sequence[str]) -> dict[str, Condition]:
    """Return conditions by how they are written: clean images first, then each corruption from mild to severe."""
    found: dict[str, Condition] = {}
    for text in given:
        name, _, level = text.rpartition(":")
        try:
            found[text] = Condition("clean") if text == "clean" else Condition(name, float(level))
        except ValueError:
            name = ""
        if text != "clean" and (not name or not math.isfinite(found[text].level or 0.0)):
            raise ValueError(f"corruptions of config.json must be clean or NAME:LEVEL, got {excerpt(text)}")
    families = list(dict.fromkeys(condition.name for condition in found.values()))

    def severity(entry: tuple[str, Condition]) -> tuple[bool, int, float]:
        name, level = entry[1].name, entry[1].level or 0.0
        return entry[1].level is not None, families.index(name), -level if name in DESCENDING else level

    return dict(sorted(found.items(), key=severity))


def lmms_result_files(folder: Path) -> list[Path]:
    """Return the result files of lmms-eval in a folder and two levels below, older ones first."""
    found = [path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}*{LMMS_RESULTS}")]
    return sorted(found, key=lambda path: (path.name, str(path)))
