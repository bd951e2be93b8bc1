"""Exchange of answers and grades with other evaluators.

| format | file |
|---|---|
| `mmvet`, predictions | `{"v1_0": "text", ...}` |
| `mmvet`, grades | `{"v1_0": {"model": ["gpt-4-0613", ...], "content": ["0.5", ...], "score": [0.5, ...]}, ...}` |
| `llava` | JSON lines with `question_id`, `prompt`, `text`, `answer_id`, `model_id`, `metadata` |

Grades are files of MM-Vet's official evaluator (`MODEL_JUDGE-grade-3runs.json`): each list has an entry per judge run.
"""

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clustrs import __version__, validation
from clustrs.evaluation import store
from clustrs.evaluation.store import AnswerRecord, Mark, VerdictRecord, encode_record, require
from clustrs.evaluation.tasks import Item, Task, fingerprint
from clustrs.validation import excerpt, read_text, write_whole

FORMATS = ("mmvet", "llava")
LONGEST_NAME = 120
UNKNOWN_MODEL = ("max_new_tokens", "scope", "crops", "positions", "attention", "prompt_template", "image_padding")
UNKNOWN = ("data", "limit", "batch_size", *UNKNOWN_MODEL)  # options that only the maker of predictions knows
Marks = Annotated[list[Mark], msgspec.Meta(min_length=1, description="a list of numbers from 0 to 1")]


@dataclass(frozen=True)
class Grades:
    """Scores of MM-Vet's official evaluator, one per judge run; `without_number` counts replies without a number."""

    judge: str
    scores: Mapping[str, tuple[float, ...]]
    without_number: int


@dataclass(frozen=True)
class Totals:
    """Numbers that the official evaluator prints, in percent; `integrations` are for all kinds together."""

    total: float
    std: float
    runs: tuple[float, ...]
    capabilities: Mapping[str, float]
    integrations: Mapping[str, float]

    def __str__(self) -> str:
        end = f"total {self.total}, std {self.std}, runs {list(self.runs)}"
        tables = (self.capabilities, self.integrations)
        return "\n".join(", ".join([*(f"{name} {value}" for name, value in table.items()), end]) for table in tables)


def export_run(folder: Path, format: str, target: Path) -> list[Path]:
    """Write the answers of a run for another evaluator, a file per method, corruption and seed, without failed ones."""
    validation.choice("format", format, FORMATS)
    folder, target = Path(folder), Path(target)
    cells: dict[tuple[str, str, int], dict[str, AnswerRecord]] = {}
    for answer in store.some_answers(folder):
        cells.setdefault((store.identity(answer.method), answer.corruption, answer.seed), {})[answer.item] = answer
    model = store.read_config(folder).get("model")
    names = _file_names([next(iter(cell.values())) for cell in cells.values()])
    files, left_out = [], 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, cell in zip(names, cells.values(), strict=True):
            answered = [answer for answer in cell.values() if answer.text is not None]
            left_out += len(cell) - len(answered)
            if format == "mmvet":
                files.append(target / f"{name}.json")
                content = json.dumps({answer.item: answer.text for answer in answered}, indent=2) + "\n"
            else:
                files.append(target / f"{name}.jsonl")
                content = "".join(_llava_line(answer, model) for answer in answered)
            write_whole(files[-1], content)
    except OSError as error:
        raise ValueError(f"{str(target)!r} cannot be written: {error.strerror}") from None
    if left_out:
        print(f"{left_out} failed answers are left out", file=sys.stderr)
    return files


def _llava_line(answer: AnswerRecord, model: object) -> str:
    """Write an answer; LLaVA's evaluator recognizes questions with an image by "<image>" in the prompt."""
    metadata = {"method": answer.method, "corruption": answer.corruption, "seed": answer.seed}
    number = re.fullmatch(r"v1_(0|[1-9][0-9]{0,9})", answer.item)  # LLaVA numbers the questions of MM-Vet
    record = {
        "question_id": int(number[1]) if number else answer.item,
        "prompt": f"<image>\n{answer.question}",
        "text": answer.text,
        "answer_id": hashlib.sha256(json.dumps([answer.item, metadata]).encode()).hexdigest()[:22],
        "model_id": model,
        "metadata": metadata,
    }
    return json.dumps(record) + "\n"


def _file_names(cells: Sequence[AnswerRecord]) -> list[str]:
    """Name a file for each cell: method and keep (more parameters where they differ), corruption, seed."""
    alike: dict[str, list[Mapping[str, Any]]] = {}  # methods of the same name and budget
    for answer in cells:
        alike.setdefault(_short_name(answer.method), []).append(answer.method)
    names: list[str] = []
    for answer in cells:
        short = _short_name(answer.method)
        parameters = sorted({parameter for method in alike[short] for parameter in method})
        differing = [name for name in parameters if len({repr(method.get(name)) for method in alike[short]}) > 1]
        words = [short, *(f"{name}-{answer.method.get(name)}" for name in differing)]
        full = "_".join([*words, answer.corruption, f"seed-{answer.seed}"])
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", full)[-LONGEST_NAME:].lstrip(".-")
        numbered = (f"{base}_{count}" if count > 1 else base for count in itertools.count(1))
        names.append(next(name for name in numbered if name.lower() not in map(str.lower, names)))
    return names


def _short_name(method: Mapping[str, Any]) -> str:
    name, keep = method.get("name", "unnamed"), method.get("keep")
    return f"{name}-{keep}" if keep is not None and name != "none" else f"{name}"


def import_predictions(path: Path, format: str) -> dict[str, str]:
    """Read predictions that were made elsewhere: the text for each question's id."""
    validation.choice("format", format, FORMATS)
    text, name = read_text(Path(path)), repr(str(path))
    predictions: dict[str, str] = {}

    def add(where: str, item: str, answer: Any) -> None:
        if not item or not isinstance(answer, str):
            raise ValueError(f"{where}: expected an id and a string, got {excerpt(item)} and {excerpt(answer)}")
        if item in predictions:
            raise ValueError(f"{where}: {excerpt(item)} is there twice")
        predictions[item] = answer

    if format == "mmvet":
        for item, answer in store.parse(text, name).items():
            add(name, item, answer)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{name} line {number}"
                record = store.parse(line, where)
                item = require(where, record, "question_id", str | int)
                add(where, f"v1_{item}" if isinstance(item, int) else item, require(where, record, "text", str))
    if not predictions:
        raise ValueError(f"{name} holds no predictions")
    return predictions


def import_run(
    task: Task, predictions: Mapping[str, str], name: str, folder: Path, grades: Grades | None = None
) -> int:
    """Write a run from predictions made elsewhere; returns how many are set aside, for questions without an image."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name must be a string that is not empty, got {name!r}")
    known = {item.id for item in task.items}
    without_image: frozenset[str] = getattr(task, "without_image", frozenset())
    unknown = [item for item in predictions if item not in known and item not in without_image]
    if unknown:
        some = ", ".join([*map(excerpt, unknown[:3]), *["..."] * (len(unknown) > 3)])
        raise ValueError(f"{len(unknown)} of the predictions are for questions that {task.name} doesn't have: {some}")
    if not known & predictions.keys():
        raise ValueError(f"none of the predictions is for a question of {task.name} that has an image")
    if grades is not None and not task.judged:
        raise ValueError(f"grades are for tasks with a judge, {task.name} scores the answers itself: omit them")
    for graded in grades.scores if grades else ():
        if graded not in known or graded not in predictions:
            lacking = "which has no prediction" if graded in known else "which the task does not"
            raise ValueError(f"the grades have {excerpt(graded)}, {lacking}")
    folder, method = Path(folder), {"name": name, "keep": 1.0}
    records = []
    for item in task.items:
        text = predictions.get(item.id)
        result: dict[str, Any] = {"error": "no prediction"}
        if text is not None:  # how many tokens the model read is not known
            result = {"text": text, "score": task.score(item, text), "kept": []}
        records.append(store.new_record(item, method, "clean", 0, **result))
    aside = len(predictions.keys() - known)
    config: dict[str, Any] = {"task": task.name, "model": name, "methods": [method], "corruptions": ["clean"]}
    config |= {"seeds": [0], **dict.fromkeys(UNKNOWN), "judged": task.judged, "scale": task.scale}
    config |= {"items": len(task.items), "fingerprint": fingerprint(task), "clustrs": __version__, "set_aside": aside}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{str(folder)!r} is there already: choose a new folder for the run")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "answers.jsonl", map(encode_record, records))
        if grades is not None:
            verdicts = [
                VerdictRecord(item, predictions[item], grades.judge, number, score, None)
                for number, run in enumerate(zip(*grades.scores.values(), strict=True))
                for item, score in zip(grades.scores, run, strict=True)
            ]
            write_whole(folder / "verdicts.jsonl", map(encode_record, verdicts))
        write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    return aside


def holds_grades(path: Path) -> bool:
    """Tell a file of grades from a file of predictions, whose values are strings."""
    try:
        values = store.read_object(Path(path)).values()
    except ValueError:
        return False
    return bool(values) and all(isinstance(value, dict) and "score" in value for value in values)


def read_grades(path: Path) -> Grades:
    """Read a file of grades; every question needs a score from each judge run."""
    content, name = store.read_object(Path(path)), repr(str(path))
    if not content:
        raise ValueError(f"{name} holds no grades")
    judges: set[str] = set()
    scores: dict[str, tuple[float, ...]] = {}
    without_number = 0
    for item in content:
        where, entry = f"{name}, {excerpt(item)}", require(name, content, item, dict)
        models, replies = (require(where, entry, key, list) for key in ("model", "content"))
        marks = require(where, entry, "score", Marks)
        if not len(models) == len(replies) == len(marks):
            raise ValueError(f"{where}: model, content and score must have one entry for each judge run")
        for mark, reply in zip(marks, replies, strict=True):
            # the official evaluator accepts a number from 0 to 1 before the first space
            first = reply.split(" ")[0].strip() if isinstance(reply, str) else ""
            accepted = re.fullmatch(r"[+]?(\d+\.?\d*|\.\d+)", first) and 0 <= float(first) <= 1
            without_number += mark == 0 and not accepted
        scores[item] = tuple(marks)
        judges |= set(map(str, models))
    most = max(map(len, scores.values()))
    for item, own in scores.items():
        if len(own) < most:
            raise ValueError(f"{name}: {excerpt(item)} must have {most} judge runs as others, got {len(own)}")
    return Grades(" + ".join(sorted(judges)), scores, without_number)


def totals(grades: Grades, items: Sequence[Item]) -> Totals:
    """Average as the official evaluator does: each judge run over the questions, then over the runs."""
    graded = [item for item in items if item.id in grades.scores]
    single: dict[str, list[Item]] = {}
    together: dict[frozenset[str], list[Item]] = {}
    for item in graded:
        together.setdefault(frozenset(item.kinds), []).append(item)
        for kind in item.kinds:
            single.setdefault(kind, []).append(item)

    def run_means(group: Sequence[Item]) -> NDArray[np.float64]:
        return sum((np.array(grades.scores[item.id]) for item in group), np.zeros(1)) / len(group) * 100

    def rounded(value: Any) -> float:
        return float(np.round(value, 1))

    def means(table: Mapping[str, Sequence[Item]]) -> dict[str, float]:
        ordered = sorted(table.items(), key=lambda entry: -len(entry[1]))
        return {name: rounded(run_means(own).mean()) for name, own in ordered}

    runs, combined = run_means(graded), {"_".join(group[0].kinds): group for group in together.values()}
    numbers = rounded(runs.mean()), rounded(runs.std()), tuple(map(rounded, runs))
    return Totals(*numbers, means(single), means(combined))
