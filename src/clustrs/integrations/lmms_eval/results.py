"""Results of lmms-eval as runs of our own, so that `clustrs report` shows them as it shows those of `clustrs eval`.

lmms-eval writes a DATE_results.json for each call, and with --log_samples a DATE_samples_TASK.jsonl beside it. All
calls that differ in method, budget, corruption and seed alone make one run.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from clustrs.evaluation.store import AnswerRecord, encode_record, identity, lines, read_object, require, write_whole
from clustrs.validation import excerpt

ENDING = "_results.json"
DEPTHS = ("", "*/", "*/*/")
"""Levels that are searched for result files: a folder and two levels below."""
RUNS = "clustrs"
"""The folder for the runs, beside the results."""
CELL = ("method", "corrupt", "seed")
"""Settings of a model that may differ between the results of one run."""
ASIDE = (*CELL, "batch_size", "device", "device_map", "tasks")
"""Settings that do not distinguish runs."""
TOTAL = "all questions"
"""The one item of a run of which only totals are known."""
CLOSE = 1e-6


@dataclass(frozen=True)
class ResultCell:
    """One task in one result file: a model with one method under one corruption."""

    path: Path
    task: str
    record: Mapping[str, Any]
    """Settings that the model recorded."""
    scores: Mapping[str, float]
    """By metric, as lmms-eval added them up."""
    questions: int

    @property
    def key(self) -> str:
        """Identity of a cell within its run."""
        return identity([self.record[name] for name in CELL])

    @property
    def run(self) -> str:
        """Identity of the run."""
        return identity([self.task, {name: value for name, value in self.record.items() if name not in ASIDE}])


@dataclass(frozen=True)
class Sample:
    """One question of a cell."""

    item: str
    question: str
    answer: str
    text: str
    score: float


def holds_results(folder: Path) -> bool:
    """Return True if a folder has results of lmms-eval, in it or below."""
    return not os.path.exists(folder / "config.json") and bool(result_files(folder))


def result_files(folder: Path) -> list[Path]:
    """The result files of a folder, older ones first. lmms-eval puts them into a folder per model."""
    found = [path for depth in DEPTHS for path in folder.glob(f"{depth}*{ENDING}")]
    return sorted(found, key=lambda path: (path.name, str(path)))


def import_results(folder: Path, metric: str | None = None, tell: Callable[[str], None] = print) -> list[Path]:
    """Write a run for each model and task of a folder, and return their folders.

    `metric` is the one that is shown, by default a task's first. `tell` gets a line for each file that is skipped.
    """
    groups: dict[str, dict[str, ResultCell]] = {}
    for cell in read_cells(Path(folder), tell):
        group = groups.setdefault(cell.run, {})
        if cell.key in group:
            tell(f"{group[cell.key].path.name}: {cell.path.name} has {cell.task} with the same settings and is newer")
        group[cell.key] = cell
    if not groups:
        raise ValueError(f"{str(folder)!r}: none of its results is of --model clustrs, there is nothing to report")
    runs: list[Path] = []
    for group in groups.values():
        cells = list(group.values())
        target = new_name(Path(folder) / RUNS, f"{cells[0].record['pretrained']}-{cells[0].task}", runs)
        write_run(target, cells, metric, tell)
        runs.append(target)
    return runs


def new_name(folder: Path, name: str, taken: Sequence[Path]) -> Path:
    """A folder for a run, named after its model and task."""
    plain = re.sub(r"[^\w.-]+", "_", name.strip("/")) or "run"
    names = (folder / (plain if number == 1 else f"{plain}-{number}") for number in count(1))
    return next(path for path in names if path not in taken)


def read_cells(folder: Path, tell: Callable[[str], None]) -> Iterator[ResultCell]:
    """The tasks of all results of pruned models, older ones first; those of other models are left aside."""
    for path in result_files(folder):
        where, content = repr(str(path)), read_object(path)
        config = require(where, content, "config", dict)
        record = next((one for one in own_fields(config) if "clustrs" in one), None)
        if record is None:
            tell(f"{path}: the model is {excerpt(config.get('model'))}, left aside")
            continue
        check_record(where, record)
        for task, scores in require(where, content, "results", dict).items():
            found = metrics_of(scores)
            if found and task in content.get("configs", {}):
                number = content.get("n-samples", {}).get(task, {}).get("effective", 1)
                yield ResultCell(path, task, record, found, int(number))


def own_fields(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings that a model wrote into the configuration of a result file."""
    written = config.get("batch_sizes")
    return (one for one in written if isinstance(one, dict)) if isinstance(written, list) else iter(())


def check_record(where: str, record: Mapping[str, Any]) -> None:
    """Refuse a record that lacks what a run must know."""
    for name, kind in (("pretrained", str), ("method", dict), ("corrupt", str), ("seed", int), ("clustrs", str)):
        require(where, record, name, kind)


def metrics_of(scores: Any) -> dict[str, float]:
    """The metrics of a task, by name; lmms-eval writes NAME,FILTER, and a standard error for each."""
    found: dict[str, float] = {}
    for key, value in scores.items() if isinstance(scores, dict) else ():
        name, comma, _ = key.partition(",")
        if comma and isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name:
            found.setdefault(name, float(value))
    return found


def write_run(folder: Path, cells: Sequence[ResultCell], metric: str | None, tell: Callable[[str], None]) -> None:
    """Write config.json and answers.jsonl, with a record per question where samples were logged."""
    name = chosen_metric(cells, metric)
    sampled = {cell.key: read_samples(cell, name) for cell in cells}
    lacking = [cell.path.name for cell in cells if sampled[cell.key] is None]
    if lacking:
        tell(
            f"{cells[0].task}: {lacking[0]} has no score of {name} per question (--log_samples logs them), so only "
            "totals are shown, without intervals"
        )
        sampled = {}
    divisor, scale = scale_of([cell.scores[name] for cell in cells])
    records = [
        record
        for cell in cells
        for record in records_of(cell, sampled.get(cell.key) or [total_of(cell, cell.scores[name] / divisor)])
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "answers.jsonl", b"".join(map(encode_record, records)).decode())
        write_whole(
            folder / "config.json", json.dumps(config_of(cells, name, records, scale, not sampled), indent=2) + "\n"
        )
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def chosen_metric(cells: Sequence[ResultCell], metric: str | None) -> str:
    """The metric that is shown: the one that was asked for, or the first of a task."""
    shared = [name for name in cells[0].scores if all(name in cell.scores for cell in cells)]
    if metric is None and shared:
        return shared[0]
    if metric not in shared:
        raise ValueError(f"--metric {metric}: {cells[0].task} has {', '.join(shared) or 'none that all results have'}")
    return metric


def read_samples(cell: ResultCell, metric: str) -> list[Sample] | None:
    """The questions of a cell, or None where the metric is not the mean of a score per question, or none is logged."""
    path = cell.path.with_name(f"{cell.path.name.removesuffix(ENDING)}_samples_{cell.task}.jsonl")
    if not path.is_file():
        return None
    samples = []
    for where, line in lines(path):
        score = score_of(line.get(metric))
        if score is None:
            return None
        question, answer, text = (as_text(line.get(name)) for name in ("input", "target", "filtered_resps"))
        samples.append(Sample(f"{require(where, line, 'doc_id', int):06}", question, answer, text, score))
    if not samples or len({sample.item for sample in samples}) < len(samples):
        return None
    mean, total = sum(sample.score for sample in samples) / len(samples), cell.scores[metric]
    means_it = any(abs(mean * factor - total) <= CLOSE * factor for factor in (1, 100))
    return samples if means_it else None


def score_of(value: Any) -> float | None:
    """The score of a question, from 0 to 1: a number, or what some tasks write, an object with one."""
    if isinstance(value, dict):
        value = value.get("score")
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    return None


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def scale_of(scores: Sequence[float]) -> tuple[float, float]:
    """Return the divisor that maps totals to 0 .. 1, and the scale in which they are shown.

    Totals that are all at most 1 are fractions, and shown in per cent; otherwise the scale is 100, 1000 ... as needed.
    """
    if min(scores) < 0:
        raise ValueError(f"scores must not be negative, got {min(scores):g} (choose another --metric)")
    if max(scores) <= 1:
        return 1.0, 100.0
    scale = 100.0
    while max(scores) > scale:
        scale *= 10
    return scale, scale


def total_of(cell: ResultCell, score: float) -> Sample:
    """The score of all questions, in the place of a question's."""
    return Sample(TOTAL, f"{cell.questions} questions", "", "", score)


def records_of(cell: ResultCell, samples: Sequence[Sample]) -> list[AnswerRecord]:
    """A record per question."""
    tokens = cell.record.get("tasks", {}).get(cell.task, {})
    visual, unpruned = (tokens.get(name) for name in ("visual_tokens", "unpruned_tokens"))
    return [
        AnswerRecord(
            item=sample.item,
            image="",
            kinds=[],
            question=sample.question,
            answer=sample.answer,
            method=cell.record["method"],
            corruption=cell.record["corrupt"],
            seed=cell.record["seed"],
            text=sample.text,
            score=sample.score,
            kept=[],
            visual_tokens=None if visual is None else round(visual),
            unpruned_tokens=None if unpruned is None else round(unpruned),
            error=None,
        )
        for sample in samples
    ]


def config_of(
    cells: Sequence[ResultCell], metric: str, records: Sequence[AnswerRecord], scale: float, totals_only: bool
) -> dict[str, Any]:
    """The configuration of a run, with what is known of it in the fields that those of `clustrs eval` have."""
    first = cells[0]
    known = {name: value for name, value in first.record.items() if name not in (*ASIDE, "pretrained")}
    return {
        "task": first.task,
        "model": first.record["pretrained"],
        "methods": unique(cell.record["method"] for cell in cells),
        "corruptions": unique(cell.record["corrupt"] for cell in cells),
        "seeds": sorted(unique(cell.record["seed"] for cell in cells)),
        "items": len({record.item for record in records}),
        "questions": max(cell.questions for cell in cells),
        "totals_only": totals_only,
        "judged": False,
        "scale": scale,
        "metric": metric,
        **known,
        "results": sorted(cell.path.name for cell in cells),
    }


def unique(values: Iterable[Any]) -> list[Any]:
    """Values without repetitions, in their order."""
    return list({identity(value): value for value in values}.values())
