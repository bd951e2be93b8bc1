"""Runs of `clustrs eval` under one folder: their scores, where two methods disagree, and the tokens they kept."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from clustrs.app.trial import LoadedModel
from clustrs.evaluation.config import CLEAN, Config, parse_corruption
from clustrs.evaluation.report.summary import UNPRUNED, Summary
from clustrs.evaluation.results import SCORED, Run, load_run
from clustrs.evaluation.store import AnswerRecord, identity, read_answers
from clustrs.evaluation.tasks import Task, get_task
from clustrs.models import shared_encoding
from clustrs.models.adapters.base import VisualTokens
from clustrs.models.ask import as_seen, chat_prompt
from clustrs.models.draw import overlay_kept
from clustrs.models.load import apply_image_padding
from clustrs.models.select import ImageSelection
from clustrs.pruners.inputs import Selection

DEEPEST = 4
"""Levels of folders below the given one in which runs are looked for."""
MOST_RUNS = 500
RUN_FILES = ("config.json", "answers.jsonl", "verdicts.jsonl", "images.json")


@dataclass(frozen=True)
class Answered:
    """The answer of one method and its score. `label` also tells variants apart; `kept` is empty without pruning."""

    method: str
    label: str
    text: str
    score: float
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    """A question that two methods answered with different scores, under the same corruption and seed."""

    item: str
    image: str
    question: str
    expected: str
    corruption: str
    seed: int
    first: Answered
    second: Answered


@dataclass(frozen=True)
class OpenRun:
    """A run that was read, with its means."""

    name: str
    folder: Path
    summary: Summary

    @property
    def run(self) -> Run:
        return self.summary.run

    def corruptions(self) -> list[str]:
        """Return the corruptions that have curves; "clean" alone where images were not corrupted."""
        return [name for name in self.run.families if name != CLEAN] or [CLEAN]

    def conditions(self, corruption: str) -> list[int]:
        """Return the indices of the conditions to show for a corruption: clean first, then mild to severe."""
        families = self.run.families
        if corruption not in families:
            raise ValueError(f"corruption {corruption!r}: this run has {', '.join(families)}")
        clean = families.get(CLEAN, ()) if corruption != CLEAN else ()
        return [*clean, *families[corruption]]

    def methods(self, budget: str) -> list[int]:
        """Return the indices of the methods to show for a budget: the unpruned model first."""
        run = self.run
        if budget not in run.budgets:
            raise ValueError(f"keep {budget!r}: this run has {', '.join(run.budgets)}")
        pruning = [index for label in run.labels if (index := run.find(label, budget)) is not None]
        return ([] if run.unpruned is None else [run.unpruned]) + pruning

    def label(self, method: int) -> str:
        """Return the name of a method without its budget."""
        own = self.run.methods[method]
        return UNPRUNED if own.keep is None else own.label


class RunLibrary:
    """Runs in a folder and below it; nothing outside is read, whatever a name or a link says."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.root = self.folder.resolve()
        self._opened: dict[tuple[str, str | None], tuple[Any, OpenRun]] = {}

    def names(self) -> list[str]:
        """Return the runs by their path below the folder, newest first; "." is the folder itself."""
        return sorted(self._found(), key=lambda name: (-self._changed(name), name))[:MOST_RUNS]

    def open(self, name: str, judge: str | None = None) -> OpenRun:
        """Read a run; raise ValueError if it cannot be read or lies outside of the folder."""
        folder = self._path(name)
        stamp = tuple(_stamp(folder / file) for file in RUN_FILES)
        known = self._opened.get((name, judge))
        if known is None or known[0] != stamp:
            known = stamp, OpenRun(name, folder, Summary(load_run(folder, judge)))
            self._opened = {(name, judge): known}  # one run at a time: they can be large
        return known[1]

    def _found(self) -> Iterator[str]:
        for here, folders, files in os.walk(self.root):
            depth = len(Path(here).relative_to(self.root).parts)
            folders[:] = [] if depth >= DEEPEST else sorted(name for name in folders if not name.startswith("."))
            name = Path(here).relative_to(self.root).as_posix()
            if "config.json" in files and "answers.jsonl" in files and self._inside(Path(here)):
                yield name

    def _changed(self, name: str) -> float:
        try:
            return (self.root / name / "answers.jsonl").stat().st_mtime
        except OSError:
            return 0.0

    def _path(self, name: str) -> Path:
        refusal = f"run {name!r}: there is no such run under {str(self.folder)!r}"
        if not isinstance(name, str) or "\0" in name:
            raise ValueError(refusal)
        folder = self.root / name
        if not self._inside(folder) or not os.path.isfile(folder / "config.json"):
            raise ValueError(refusal)
        return folder

    def _inside(self, folder: Path) -> bool:
        """Return whether a folder and all files of a run in it lie below the root, links followed."""
        paths = [folder, *(folder / file for file in RUN_FILES)]
        return all(Path(os.path.realpath(path)).is_relative_to(self.root) for path in paths)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def disagreements(opened: OpenRun, first: int, second: int, condition: int) -> list[Disagreement]:
    """Return the questions that two methods (indices) answered with different scores, best for the first on top."""
    run = opened.run
    pairs = _differing(run, first, second, condition)
    answers = _read(opened, {first, second}, condition, {(item, seed) for item, seed, _, _ in pairs})
    listed = []
    for item, seed, a, b in pairs:
        one, other = answers.get((first, item, seed)), answers.get((second, item, seed))
        if one is not None and other is not None:
            listed.append(
                Disagreement(
                    item,
                    one.image,
                    one.question,
                    one.answer,
                    one.corruption,
                    seed,
                    _answered(run, first, one, a),
                    _answered(run, second, other, b),
                )
            )
    return sorted(listed, key=lambda d: (d.second.score - d.first.score, d.item, d.seed))


def rival(opened: OpenRun, budget: str, method: int) -> int | None:
    """Return the default method to compare with: ClustRS, or for ClustRS the next method; None if there is none."""
    others = [index for index in opened.methods(budget) if index != method]
    ours = [index for index in others if opened.run.methods[index].name == "clustrs"]
    pruning = [index for index in others if opened.run.methods[index].keep is not None]
    return next(iter([*ours, *pruning, *others]), None)


def _differing(run: Run, first: int, second: int, condition: int) -> list[tuple[str, int, float, float]]:
    """Item, seed and both scores, where both were scored and the scores differ."""
    a, b = run.scores[first, condition], run.scores[second, condition]
    both = (run.states[first, condition] == SCORED) & (run.states[second, condition] == SCORED)
    seeds, items = np.nonzero(both & (np.nan_to_num(a) != np.nan_to_num(b)))
    return [
        (run.items[item], run.seeds[seed], float(a[seed, item]), float(b[seed, item]))
        for seed, item in zip(seeds.tolist(), items.tolist(), strict=True)
    ]


def _read(
    opened: OpenRun, methods: set[int], condition: int, wanted: set[tuple[str, int]]
) -> dict[tuple[int, str, int], AnswerRecord]:
    """The records of some methods under one condition, by method, item and seed."""
    run = opened.run
    stored = {identity(run.config["methods"][index]): index for index in methods}
    found = {}
    for record in read_answers(opened.folder):
        index = stored.get(identity(record.method))
        if index is not None and (record.item, record.seed) in wanted:
            name, _, level = record.corruption.rpartition(":")
            own = run.conditions[condition]
            if (name or CLEAN) == own.name and (own.level is None or float(level) == own.level):
                found[index, record.item, record.seed] = record
    return found


def _answered(run: Run, method: int, record: AnswerRecord, score: float) -> Answered:
    own = run.methods[method]
    return Answered(
        own.name, UNPRUNED if own.keep is None else own.label, record.text or "", score, tuple(record.kept or ())
    )


LOCAL_TASKS = ("scenes", "photos")
"""Tasks that need no data: their images are drawn, or come with `clustrs-models`."""


def question_image(config: Config, one: Disagreement) -> Image.Image:
    """Return the image of a question as the model got it; nothing is downloaded."""
    image = _task(config).open(one.image)
    corruption = parse_corruption(one.corruption)
    return corruption.apply(image, one.image, one.seed) if corruption else image


def kept_images(loaded: LoadedModel, opened: OpenRun, one: Disagreement) -> tuple[list[Image.Image | None], str]:
    """Return the image with the tokens that each of the two methods kept, and a note on what cannot be shown.

    Records have the indices of kept tokens; only the model of the run knows their places, so another model shows the
    image as it is.
    """
    config = Config.from_json(opened.run.config)
    image = question_image(config, one)
    if config.model != loaded.name:
        note = f"The run's model is {config.model}: start clustrs app --model {config.model} to see the kept tokens."
        return [image, image], note
    processor = apply_image_padding(loaded.processor, config.image_padding)
    prompt = chat_prompt(processor, one.question, config.prompt_template)
    with loaded.lock:
        batch = shared_encoding.encode(loaded.model, processor, [image], [(0, prompt)], config.crops)
    shown = as_seen(processor, image)
    return [overlay_kept(shown, _selection(batch.images[0], said), size=480) for said in (one.first, one.second)], ""


def _task(config: Config) -> Task:
    if config.data is None and config.task not in LOCAL_TASKS:
        raise ValueError(f"the data of task {config.task} came from the hub, and this page makes no requests")
    data = None if config.data is None else Path(config.data)
    return get_task(config.task, data, config.limit, **config.task_options)


def _selection(encoded: VisualTokens, said: Answered) -> ImageSelection:
    """Return the selection of a record on the layout of its image; a record without indices kept everything."""
    n = len(encoded.candidates)
    indices = torch.tensor(said.kept or range(n), dtype=torch.long)
    if int(indices.max()) >= n:
        raise ValueError(f"{said.label} kept token {int(indices.max())}, but the image has {n}")
    tokens = encoded.tokens[indices.clamp(min=0).to(encoded.tokens.device)]
    selection = Selection(tokens, indices)
    return ImageSelection(selection, encoded.scores, encoded.layout, encoded.grids, encoded.slots, len(indices))
