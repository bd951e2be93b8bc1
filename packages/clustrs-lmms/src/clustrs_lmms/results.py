"""Results of lmms-eval as runs of our own, so that `clustrs report` shows them as it shows those of `clustrs eval`.

Calls that differ in method, budget, corruption and seed alone make one run.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from clustrs.evaluation.results import LMMS_RESULTS, lmms_result_files
from clustrs.evaluation.store import AnswerRecord, encode_record, identity, lines, read_object, require
from clustrs.validation import excerpt, write_whole

RUNS = "clustrs"  # the folder for the runs, beside the results
CELL = ("method", "corrupt", "seed")  # settings of a model that may differ between the results of one run
ASIDE = (*CELL, "batch_size", "device", "device_map", "tasks")  # settings that do not distinguish runs
TOTAL = "all questions"  # the one item of a run of which only totals are known
CLOSE = 1e-6


@dataclass(frozen=True)
class ResultCell:
    """One task in one result file: a model with one method under one corruption."""

    path: Path
    task: str
    record: Mapping[str, Any]  # settings that the model recorded
    scores: Mapping[str, float]  # by metric, as lmms-eval added them up
    questions: int


def import_results(folder: Path, metric: str | None = None, tell: Callable[[str], None] = print) -> list[Path]:
    """Write a run for each model and task of a folder, and return their folders; `tell` gets what is skipped."""
    groups: dict[str, dict[str, ResultCell]] = {}
    for cell in read_cells(Path(folder), tell):
        settings = {name: value for name, value in cell.record.items() if name not in ASIDE}
        group, key = groups.setdefault(identity([cell.task, settings]), {}), identity([cell.record[n] for n in CELL])
        if key in group:
            tell(f"{group[key].path.name}: {cell.path.name} has {cell.task} with the same settings and is newer")
        group[key] = cell
    if not groups:
        raise ValueError(f"{str(folder)!r}: none of its results is of --model clustrs, there is nothing to report")
    runs: list[Path] = []
    for group in groups.values():
        cells = list(group.values())
        name = re.sub(r"[^\w.-]+", "_", f"{cells[0].record['pretrained']}-{cells[0].task}".strip("/")) or "run"
        names = (Path(folder) / RUNS / (name if number == 1 else f"{name}-{number}") for number in count(1))
        runs.append(next(path for path in names if path not in runs))
        write_run(runs[-1], cells, metric, tell)
    return runs


def read_cells(folder: Path, tell: Callable[[str], None]) -> Iterator[ResultCell]:
    """Yield the tasks of all results of pruned models, older ones first; those of other models are left aside."""
    for path in lmms_result_files(folder):
        where, content = repr(str(path)), read_object(path)
        config = require(where, content, "config", dict)
        written = config.get("batch_sizes")  # where a model of ours writes its settings
        listed = written if isinstance(written, list) else []
        own = [one for one in listed if isinstance(one, dict) and "clustrs" in one]
        if not own:
            tell(f"{path}: the model is {excerpt(config.get('model'))}, left aside")
            continue
        for name, kind in (("pretrained", str), ("method", dict), ("corrupt", str), ("seed", int), ("clustrs", str)):
            require(where, own[0], name, kind)
        for task, scores in require(where, content, "results", dict).items():
            metrics: dict[str, float] = {}  # lmms-eval writes NAME,FILTER, and a standard error for each
            for key, value in scores.items() if isinstance(scores, dict) else ():
                name, comma, _ = key.partition(",")
                if comma and isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name:
                    metrics.setdefault(name, float(value))
            if metrics and task in content.get("configs", {}):
                number = content.get("n-samples", {}).get(task, {}).get("effective", 1)
                yield ResultCell(path, task, own[0], metrics, int(number))


def write_run(folder: Path, cells: Sequence[ResultCell], metric: str | None, tell: Callable[[str], None]) -> None:
    """Write config.json and answers.jsonl, with a record per question where samples were logged."""
    first = cells[0]
    shared = [name for name in first.scores if all(name in cell.scores for cell in cells)]
    metric = shared[0] if metric is None and shared else metric
    if metric not in shared:
        raise ValueError(f"--metric {metric}: {first.task} has {', '.join(shared) or 'none that all results have'}")
    totals, scale = [cell.scores[metric] for cell in cells], 100.0
    if min(totals) < 0:
        raise ValueError(f"scores must not be negative, got {min(totals):g} (choose another --metric)")
    while max(totals) > scale:  # totals that are all at most 1 are fractions, and shown in per cent
        scale *= 10
    divisor = 1.0 if max(totals) <= 1 else scale
    samples = [read_samples(cell, metric) for cell in cells]
    lacking = [cell.path.name for cell, some in zip(cells, samples, strict=True) if some is None]
    if lacking:
        reason = f"{lacking[0]} has no score of {metric} per question (--log_samples logs them)"
        tell(f"{first.task}: {reason}, so only totals are shown, without intervals")
    records = []
    for cell, some in zip(cells, samples, strict=True):
        if lacking or some is None:
            total, asked = cell.scores[metric] / divisor, f"{cell.questions} questions"
            some = [{"item": TOTAL, "question": asked, "answer": "", "text": "", "score": total}]
        method, corruption, seed = (cell.record[name] for name in CELL)
        tokens = cell.record.get("tasks", {}).get(cell.task, {})
        fixed = {"method": method, "corruption": corruption, "seed": seed}
        for name in ("visual_tokens", "unpruned_tokens"):
            fixed[name] = None if tokens.get(name) is None else round(tokens[name])
        records += [AnswerRecord(**one, **fixed, image="", kinds=[], kept=[], error=None) for one in some]
    config = {
        "task": first.task,
        "model": first.record["pretrained"],
        "methods": unique(cell.record["method"] for cell in cells),
        "corruptions": unique(cell.record["corrupt"] for cell in cells),
        "seeds": sorted(unique(cell.record["seed"] for cell in cells)),
        "items": len({record.item for record in records}),
        "questions": max(cell.questions for cell in cells),
        "totals_only": bool(lacking),
        "judged": False,
        "scale": scale,
        "metric": metric,
        **{name: value for name, value in first.record.items() if name not in (*ASIDE, "pretrained")},
        "results": sorted(cell.path.name for cell in cells),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "answers.jsonl", map(encode_record, records))
        write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}") from None


def read_samples(cell: ResultCell, metric: str) -> list[dict[str, Any]] | None:
    """Return the questions of a cell as fields of records; None without scores from 0 to 1 that make up the metric."""
    path = cell.path.with_name(f"{cell.path.name.removesuffix(LMMS_RESULTS)}_samples_{cell.task}.jsonl")
    samples: dict[str, dict[str, Any]] = {}
    for where, line in lines(path) if path.is_file() else ():
        score = line.get(metric)
        score = score.get("score") if isinstance(score, dict) else score  # some tasks write an object with one
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            return None
        item = f"{require(where, line, 'doc_id', int):06}"
        if item in samples:
            return None
        texts = {"question": line.get("input"), "answer": line.get("target"), "text": line.get("filtered_resps")}
        shown = {name: text if isinstance(text, str) else json.dumps(text) for name, text in texts.items()}
        samples[item] = {"item": item, **shown, "score": float(score)}
    if not samples:
        return None
    mean, total = sum(one["score"] for one in samples.values()) / len(samples), cell.scores[metric]
    is_mean = any(abs(mean * factor - total) <= CLOSE * factor for factor in (1, 100))
    return list(samples.values()) if is_mean else None


def unique(values: Iterable[Any]) -> list[Any]:
    return list({identity(value): value for value in values}.values())
