"""Exchange of answers and grades with the evaluators of MM-Vet and LLaVA."""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from clustrs import __version__, validation
from clustrs.evaluation.store import (
    VerdictRecord,
    identity,
    lines,
    need,
    parse,
    read_bytes,
    read_config,
    read_object,
    write_whole,
)
from clustrs.evaluation.tasks import Item, Task, fingerprint
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


FORMATS = ("mmvet", "llava")
LONGEST_NAME = 120


@dataclass(frozen=True)
class Answer:
    """What is needed here of a record of `answers.jsonl`. `text` is None when there was no answer."""

    item: str
    question: str
    answer: str
    method: Mapping[str, Any]
    corruption: str
    seed: int
    text: str | None


def answers_of(folder: Path) -> list[Answer]:
    """Read the answers of a run, in the order in which they were written."""
    folder = Path(folder)
    if not (folder / "answers.jsonl").is_file():
        raise ValueError(f"{str(folder)!r} is no run: there is no answers.jsonl in it")
    answers = []
    for where, record in lines(folder / "answers.jsonl"):
        answers.append(
            Answer(
                item=need(where, record, "item", str),
                question=need(where, record, "question", str),
                answer=need(where, record, "answer", str),
                method=need(where, record, "method", dict),
                corruption=need(where, record, "corruption", str),
                seed=need(where, record, "seed", int),
                text=need(where, record, "text", str, type(None)),
            )
        )
    if not answers:
        raise ValueError(f"run {str(folder)!r} has no answers yet")
    return answers


def export_run(folder: Path, format: str, target: Path) -> list[Path]:
    """Write one file for each method, corruption and seed of a run; files of the same name are replaced.

    Failed answers are left out; a line on stderr says how many.
    """
    check_format(format)
    folder, target = Path(folder), Path(target)
    cells: dict[tuple[str, str, int], dict[str, Answer]] = {}
    for answer in answers_of(folder):
        cells.setdefault((identity(answer.method), answer.corruption, answer.seed), {})[answer.item] = answer
    names = cell_names({key: next(iter(cell.values())) for key, cell in cells.items()})
    model = read_config(folder).get("model")
    files, left_out = [], 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        for key, cell in cells.items():
            answered = [answer for answer in cell.values() if answer.text is not None]
            left_out += len(cell) - len(answered)
            files.append(target / f"{names[key]}.{'json' if format == 'mmvet' else 'jsonl'}")
            write_whole(files[-1], as_mmvet(answered) if format == "mmvet" else as_llava(answered, model))
    except OSError as error:
        raise ValueError(f"{str(target)!r} cannot be written: {error.strerror}") from None
    if left_out:
        print(f"{left_out} failed answers are left out", file=sys.stderr)
    return files


def as_mmvet(answers: Iterable[Answer]) -> str:
    return json.dumps({answer.item: answer.text for answer in answers}, indent=2) + "\n"


def as_llava(answers: Iterable[Answer], model: object) -> str:
    """Write JSON lines; "<image>" in the prompt is how LLaVA's evaluator knows the questions that have an image."""
    records = []
    for answer in answers:
        metadata = {"method": answer.method, "corruption": answer.corruption, "seed": answer.seed}
        record = {
            "question_id": to_llava_id(answer.item),
            "prompt": f"<image>\n{answer.question}",
            "text": answer.text,
            "answer_id": hashlib.sha256(json.dumps([answer.item, metadata]).encode()).hexdigest()[:22],
            "model_id": model,
            "metadata": metadata,
        }
        records.append(json.dumps(record) + "\n")
    return "".join(records)


def to_llava_id(item: str) -> str | int:
    """Return LLaVA's id: it numbers the questions of MM-Vet, and puts "v1_" before the numbers for the evaluator."""
    number = re.fullmatch(r"v1_(0|[1-9][0-9]{0,9})", item)
    return int(number[1]) if number else item


def from_llava_id(given: str | int) -> str:
    return f"v1_{given}" if isinstance(given, int) else given


def cell_names(cells: Mapping[tuple[str, str, int], Answer]) -> dict[tuple[str, str, int], str]:
    """Name a file for each cell: method and keep (more parameters where needed to tell apart), corruption, seed."""
    methods = {key[0]: answer.method for key, answer in cells.items()}
    same_name: dict[str, list[Mapping[str, Any]]] = {}
    for method in methods.values():
        same_name.setdefault(short_name(method), []).append(method)
    names: dict[tuple[str, str, int], str] = {}
    taken: set[str] = set()
    for key, answer in cells.items():
        group = same_name[short_name(answer.method)]
        parameters = sorted({parameter for method in group for parameter in method})
        differing = [name for name in parameters if len({repr(method.get(name)) for method in group}) > 1]
        words = [short_name(answer.method), *(f"{name}-{answer.method.get(name)}" for name in differing)]
        full = "_".join([*words, answer.corruption, f"seed-{answer.seed}"])
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", full)[-LONGEST_NAME:].lstrip(".-")
        name, count = base, 1
        while name.lower() in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name.lower())
        names[key] = name
    return names


def short_name(method: Mapping[str, Any]) -> str:
    keep = method.get("keep")
    name = method.get("name", "unnamed")
    return f"{name}-{keep}" if keep is not None and name != "none" else f"{name}"


def import_predictions(path: Path, format: str) -> dict[str, str]:
    """Read predictions that were made elsewhere: the text for each question's id."""
    check_format(format)
    raw = read_bytes(Path(path))
    pairs = mmvet_pairs(raw, path) if format == "mmvet" else llava_pairs(raw, path)
    predictions: dict[str, str] = {}
    for where, item, text in pairs:
        if not item or not isinstance(text, str):
            raise ValueError(f"{where}: {ascii(item)[:60]} has {ascii(text)[:60]}, an id and a string are expected")
        if item in predictions:
            raise ValueError(f"{where}: {ascii(item)[:60]} is there twice")
        predictions[item] = text
    if not predictions:
        raise ValueError(f"{str(path)!r} holds no predictions")
    return predictions


def mmvet_pairs(raw: bytes, path: Path) -> Iterator[tuple[str, str, object]]:
    """Yield pairs rather than a dict, so that an id which is there twice can be seen."""
    try:
        pairs = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        raise ValueError(f'{str(path)!r} is no JSON: give {{"v1_0": "text", ...}}, or choose another format') from None
    if not isinstance(pairs, tuple):
        raise ValueError(f'{str(path)!r} is no JSON object: give {{"v1_0": "text", ...}}')
    for item, text in pairs:
        yield repr(str(path)), item, text


def llava_pairs(raw: bytes, path: Path) -> Iterator[tuple[str, str, object]]:
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            where = f"{str(path)!r} line {number}"
            record = parse(line, where)
            yield where, from_llava_id(need(where, record, "question_id", str, int)), need(where, record, "text", str)


def import_run(
    task: Task, predictions: Mapping[str, str], name: str, folder: Path, grades: Grades | None = None
) -> int:
    """Write a run from predictions that were made elsewhere; `name` is the method's, `folder` must be new or empty.

    Returns how many predictions were set aside because their questions have no image. With `grades`, the run is judged.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name={name!r}: give the predictions a name")
    aside = check_predictions(task, predictions)
    if grades is not None:
        if not task.judged:
            raise ValueError(
                f"grades are for tasks with a judge, {task.name} scores the answers itself: leave them out"
            )
        check_grades(grades, task.items, predictions)
    folder = Path(folder)
    records = [imported_record(task, item, predictions.get(item.id), name) for item in task.items]
    config = {**imported_config(task, name), "set_aside": aside}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{str(folder)!r} is there already: give a new folder for the run")
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "answers.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        if grades is not None:
            write_grades(folder, grades, predictions)
        write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"{str(folder)!r} cannot be written: {error.strerror}") from None
    return aside


def check_predictions(task: Task, predictions: Mapping[str, str]) -> int:
    """Count the predictions for questions that the official file has without an image; refuse other unknown ones."""
    known = {item.id for item in task.items}
    without_image: frozenset[str] = getattr(task, "without_image", frozenset())
    unknown = [item for item in predictions if item not in known and item not in without_image]
    if unknown:
        some = ", ".join(ascii(item)[:60] for item in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise ValueError(f"{len(unknown)} of the predictions are for questions that {task.name} doesn't have: {some}")
    if not known & predictions.keys():
        raise ValueError(f"none of the predictions is for a question of {task.name} that has an image")
    return len(predictions.keys() - known)


def imported_method(name: str) -> dict[str, Any]:
    """Describe the method. Which fraction of the tokens the model saw isn't known: it is recorded as all of them."""
    return {"name": name, "keep": 1.0}


def imported_record(task: Task, item: Item, text: str | None, name: str) -> dict[str, Any]:
    """Return a record of answers.jsonl. How many tokens the model saw isn't known."""
    return {
        "item": item.id,
        "image": item.image,
        "kinds": list(item.kinds),
        "question": item.question,
        "answer": item.answer,
        "method": imported_method(name),
        "corruption": "clean",
        "seed": 0,
        "text": text,
        "score": None if text is None else task.score(item, text),
        "error": "no prediction" if text is None else None,
        "kept": None if text is None else [],
        "visual_tokens": None,
        "unpruned_tokens": None,
    }


def imported_config(task: Task, name: str) -> dict[str, Any]:
    """Return a configuration like that of a run made here; null is what only the predictions' maker knows."""
    return {
        "task": task.name,
        "data": None,
        "model": name,
        "methods": [imported_method(name)],
        "corruptions": ["clean"],
        "seeds": [0],
        "limit": None,
        "batch_size": None,
        "max_new_tokens": None,
        "scope": None,
        "crops": None,
        "positions": None,
        "prompt_template": None,
        "image_padding": None,
        "judged": task.judged,
        "scale": task.scale,
        "items": len(task.items),
        "fingerprint": fingerprint(task),
        "clustrs": __version__,
    }


def check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: give one of {', '.join(FORMATS)}")
