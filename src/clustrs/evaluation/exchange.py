"""Exchange of answers and grades with other evaluators.

| format | file |
|---|---|
| `mmvet`, predictions | `{"v1_0": "text", ...}` |
| `mmvet`, grades | `{"v1_0": {"model": ["gpt-4-0613", ...], "content": ["0.5", ...], "score": [0.5, ...]}, ...}` |
| `llava` | JSON lines with `question_id`, `prompt`, `text`, `answer_id`, `model_id`, `metadata` |

Grades are files of MM-Vet's official evaluator (`MODEL_JUDGE-grade-3runs.json`): each list has an entry per judge run.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustrs import __version__, validation
from clustrs.evaluation.store import (
    AnswerRecord,
    VerdictRecord,
    encode_record,
    identity,
    new_record,
    parse,
    read_answers,
    read_bytes,
    read_config,
    read_object,
    require,
    write_whole,
)
from clustrs.evaluation.tasks import Item, Task, fingerprint
from clustrs.validation import excerpt

FORMATS = ("mmvet", "llava")
LONGEST_NAME = 120
DECIMALS = 1
"""Decimals to which the official evaluator rounds, in percent."""


@dataclass(frozen=True)
class Grades:
    """Scores of MM-Vet's official evaluator, one per judge run for each question.

    `without_number` counts the scores of 0 that it gave because the judge's reply was not a number.
    """

    judge: str
    scores: Mapping[str, tuple[float, ...]]
    without_number: int

    @property
    def runs(self) -> int:
        return len(next(iter(self.scores.values())))


@dataclass(frozen=True)
class Totals:
    """Numbers that the official evaluator prints, in percent, rounded as it rounds; `std` is over the judge runs.

    `integrations` is its cap-int-score table: each question counts once, under all its capabilities together.
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


def export_run(folder: Path, format: str, target: Path) -> list[Path]:
    """Write the answers of a run for another evaluator, a file for each method, corruption and seed.

    Failed answers are left out; a line on stderr counts them. Files of the same name are replaced.
    """
    _check_format(format)
    folder, target = Path(folder), Path(target)
    if not (folder / "answers.jsonl").is_file():
        raise ValueError(f"{str(folder)!r} is not a run: there is no answers.jsonl in it")
    cells: dict[tuple[str, str, int], dict[str, AnswerRecord]] = {}
    for answer in read_answers(folder):
        cells.setdefault((identity(answer.method), answer.corruption, answer.seed), {})[answer.item] = answer
    if not cells:
        raise ValueError(f"run {str(folder)!r} has no answers yet")
    names = _file_names({key: next(iter(cell.values())) for key, cell in cells.items()})
    model = read_config(folder).get("model")
    files, left_out = [], 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        for key, cell in cells.items():
            answered = [answer for answer in cell.values() if answer.text is not None]
            left_out += len(cell) - len(answered)
            files.append(target / f"{names[key]}.{'json' if format == 'mmvet' else 'jsonl'}")
            write_whole(files[-1], _as_mmvet(answered) if format == "mmvet" else _as_llava(answered, model))
    except OSError as error:
        raise ValueError(f"{str(target)!r} cannot be written: {error.strerror}") from None
    if left_out:
        print(f"{left_out} failed answers are left out", file=sys.stderr)
    return files


def _as_mmvet(answers: Iterable[AnswerRecord]) -> str:
    return json.dumps({answer.item: answer.text for answer in answers}, indent=2) + "\n"


def _as_llava(answers: Iterable[AnswerRecord], model: object) -> str:
    """Write JSON lines; LLaVA's evaluator recognizes questions with an image by "<image>" in the prompt."""
    records = []
    for answer in answers:
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
        records.append(json.dumps(record) + "\n")
    return "".join(records)


def _file_names(cells: Mapping[tuple[str, str, int], AnswerRecord]) -> dict[tuple[str, str, int], str]:
    """Name a file for each cell: method and keep (more parameters where they differ), corruption, seed."""
    methods = {key[0]: answer.method for key, answer in cells.items()}
    same_name: dict[str, list[Mapping[str, Any]]] = {}
    for method in methods.values():
        same_name.setdefault(_short_name(method), []).append(method)
    names: dict[tuple[str, str, int], str] = {}
    taken: set[str] = set()
    for key, answer in cells.items():
        group = same_name[_short_name(answer.method)]
        parameters = sorted({parameter for method in group for parameter in method})
        differing = [name for name in parameters if len({repr(method.get(name)) for method in group}) > 1]
        words = [_short_name(answer.method), *(f"{name}-{answer.method.get(name)}" for name in differing)]
        full = "_".join([*words, answer.corruption, f"seed-{answer.seed}"])
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", full)[-LONGEST_NAME:].lstrip(".-")
        name, count = base, 1
        while name.lower() in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name.lower())
        names[key] = name
    return names


def _short_name(method: Mapping[str, Any]) -> str:
    keep = method.get("keep")
    name = method.get("name", "unnamed")
    return f"{name}-{keep}" if keep is not None and name != "none" else f"{name}"


def import_predictions(path: Path, format: str) -> dict[str, str]:
    """Read predictions that were made elsewhere: the text for each question's id."""
    _check_format(format)
    raw = read_bytes(Path(path))
    predictions: dict[str, str] = {}
    for where, item, text in _mmvet_pairs(raw, path) if format == "mmvet" else _llava_pairs(raw, path):
        if not item or not isinstance(text, str):
            raise ValueError(f"{where}: expected an id and a string, got {excerpt(item)} and {excerpt(text)}")
        if item in predictions:
            raise ValueError(f"{where}: {excerpt(item)} is there twice")
        predictions[item] = text
    if not predictions:
        raise ValueError(f"{str(path)!r} holds no predictions")
    return predictions


def _mmvet_pairs(raw: bytes, path: Path) -> Iterator[tuple[str, str, object]]:
    """Yield pairs rather than a dict, so that an id which is there twice can be seen."""
    form = '(write {"v1_0": "text", ...}, or choose another format)'
    try:
        pairs = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        raise ValueError(f"{str(path)!r} must be JSON {form}") from None
    if not isinstance(pairs, tuple):
        raise ValueError(f"{str(path)!r} must be a JSON object {form}")
    for item, text in pairs:
        yield repr(str(path)), item, text


def _llava_pairs(raw: bytes, path: Path) -> Iterator[tuple[str, str, object]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            where = f"{str(path)!r} line {number}"
            record = parse(line, where)
            item = require(where, record, "question_id", str, int)
            yield where, f"v1_{item}" if isinstance(item, int) else item, require(where, record, "text", str)


def import_run(
    task: Task, predictions: Mapping[str, str], name: str, folder: Path, grades: Grades | None = None
) -> int:
    """Write a run from predictions that were made elsewhere, under the name of a method, into a new or empty folder.

    A question without a prediction counts as failed. With `grades`, the run is judged. Returns how many predictions
    were set aside because their questions have no image.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name must be a string that is not empty, got {name!r}")
    aside = _check_predictions(task, predictions)
    if grades is not None:
        if not task.judged:
            raise ValueError(f"grades are for tasks with a judge, {task.name} scores the answers itself: omit them")
        _check_grades(grades, task.items, predictions)
    folder = Path(folder)
    records = [_imported_record(task, item, predictions.get(item.id), name) for item in task.items]
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{str(folder)!r} is there already: choose a new folder for the run")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "answers.jsonl", b"".join(map(encode_record, records)))
        if grades is not None:
            verdicts = [
                VerdictRecord(
                    item=item, text=predictions[item], judge=grades.judge, round=number, score=own[number], error=None
                )
                for number in range(grades.runs)
                for item, own in grades.scores.items()
            ]
            write_whole(folder / "verdicts.jsonl", b"".join(map(encode_record, verdicts)))
        config = {**_imported_config(task, name), "set_aside": aside}
        write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    return aside


def _check_predictions(task: Task, predictions: Mapping[str, str]) -> int:
    """Count the predictions for questions that the official file has without an image; refuse other unknown ones."""
    known = {item.id for item in task.items}
    without_image: frozenset[str] = getattr(task, "without_image", frozenset())
    unknown = [item for item in predictions if item not in known and item not in without_image]
    if unknown:
        some = ", ".join(map(excerpt, unknown[:3])) + (", ..." if len(unknown) > 3 else "")
        raise ValueError(f"{len(unknown)} of the predictions are for questions that {task.name} doesn't have: {some}")
    if not known & predictions.keys():
        raise ValueError(f"none of the predictions is for a question of {task.name} that has an image")
    return len(predictions.keys() - known)


def _imported_record(task: Task, item: Item, text: str | None, name: str) -> AnswerRecord:
    """Make the record of a prediction; how many tokens the model read is not known."""
    if text is None:
        return new_record(item, {"name": name, "keep": 1.0}, "clean", 0, error="no prediction")
    score = task.score(item, text)
    return new_record(item, {"name": name, "keep": 1.0}, "clean", 0, text=text, score=score, kept=[])


def _imported_config(task: Task, name: str) -> dict[str, Any]:
    """Make a configuration like that of a run made here; what only the predictions' maker knows is null."""
    unknown = ("data", "limit", "batch_size", "max_new_tokens", "scope", "crops", "positions", "attention")
    return {
        "task": task.name,
        "model": name,
        "methods": [{"name": name, "keep": 1.0}],
        "corruptions": ["clean"],
        "seeds": [0],
        **dict.fromkeys((*unknown, "prompt_template", "image_padding")),
        "judged": task.judged,
        "scale": task.scale,
        "items": len(task.items),
        "fingerprint": fingerprint(task),
        "clustrs": __version__,
    }


def _check_format(format: str) -> None:
    validation.choice("format", format, FORMATS)


def holds_grades(path: Path) -> bool:
    """Tell a file of grades from a file of predictions, whose values are strings."""
    try:
        content = json.loads(read_bytes(Path(path)).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    values = list(content.values()) if isinstance(content, dict) else []
    return bool(values) and all(isinstance(value, dict) and "score" in value for value in values)


def read_grades(path: Path) -> Grades:
    """Read a file of grades; every question needs a score from each judge run."""
    content = read_object(Path(path))
    if not content:
        raise ValueError(f"{str(path)!r} holds no grades")
    judges: set[str] = set()
    scores: dict[str, tuple[float, ...]] = {}
    without_number = 0
    for item, entry in content.items():
        where = f"{str(path)!r}, {excerpt(item)}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: expected model, content and score, got {excerpt(entry)}")
        models, replies, marks = (require(where, entry, key, list) for key in ("model", "content", "score"))
        if not marks or not len(models) == len(replies) == len(marks):
            raise ValueError(f"{where}: model, content and score must have one entry for each judge run")
        for mark in marks:
            if not validation.is_number(mark) or not 0 <= mark <= 1:
                raise ValueError(f"{where}: score must have numbers from 0 to 1, got {excerpt(mark)}")
        scores[item] = tuple(map(float, marks))
        judges |= {str(model) for model in models}
        without_number += sum(mark == 0 and not _is_number(reply) for mark, reply in zip(marks, replies, strict=True))
    most = max(map(len, scores.values()))
    for item, own in scores.items():
        if len(own) < most:
            raise ValueError(f"{str(path)!r}: {excerpt(item)} must have {most} judge runs as others, got {len(own)}")
    return Grades(" + ".join(sorted(judges)), scores, without_number)


def _is_number(reply: Any) -> bool:
    """Check whether the official evaluator accepts a judge's reply: a number from 0 to 1 before the first space."""
    first = reply.split(" ")[0].strip() if isinstance(reply, str) else ""
    return bool(re.fullmatch(r"[+]?(\d+\.?\d*|\.\d+)", first) and 0 <= float(first) <= 1)


def _check_grades(grades: Grades, items: Sequence[Item], texts: Mapping[str, str]) -> None:
    """Refuse grades of questions that the task does not have, or that have no prediction."""
    known = {item.id for item in items}
    for name in grades.scores:
        if name not in known:
            raise ValueError(f"the grades have {excerpt(name)}, which the task does not")
        if name not in texts:
            raise ValueError(f"the grades have {excerpt(name)}, which has no prediction")


def totals(grades: Grades, items: Sequence[Item]) -> Totals:
    """Average as the official evaluator does: each judge run over the questions, then over the runs.

    Capabilities, and the combinations of them, are ordered by how many questions they have.
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
        {
            name: _rounded(_run_means(grades, ids).mean())
            for name, ids in sorted(table.items(), key=lambda entry: -len(entry[1]))
        }
        for table in (single, combined)
    )
    rounded = tuple(_rounded(value) for value in runs)
    return Totals(_rounded(runs.mean()), _rounded(runs.std()), rounded, capabilities, integrations)


def _run_means(grades: Grades, ids: Sequence[str]) -> NDArray[np.float64]:
    """Average some questions in each judge run, in percent."""
    return sum((np.array(grades.scores[item]) for item in ids), np.zeros(grades.runs)) / len(ids) * 100


def _rounded(value: Any) -> float:
    return float(np.round(value, DECIMALS))
