"""Runs of `clustrs eval` under one folder: their scores, where two methods disagree, and the tokens they kept."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from clustrs.app.trial import LoadedModel
from clustrs.evaluation.config import CLEAN, Config, parse_corruption
from clustrs.evaluation.report.document import LARGEST_IMAGE
from clustrs.evaluation.report.leaderboard import Entry
from clustrs.evaluation.report.scores import OURS
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import SCORED, Run, load_run
from clustrs.evaluation.store import AnswerRecord, identity, read_answers
from clustrs.evaluation.tasks import get_task
from clustrs.models import ask as asking
from clustrs.models.draw import overlay_kept
from clustrs.models.load import apply_image_padding
from clustrs.models.select import ImageSelection
from clustrs.pruners.inputs import Selection
from clustrs.pruners.registry import display_label

DEEPEST, MOST_RUNS = 4, 500  # levels of folders in which runs are looked for, and how many are listed
RUN_FILES = ("config.json", "answers.jsonl", "verdicts.jsonl", "images.json")
LOCAL_TASKS = ("scenes", "photos", "clips")  # they need no data: images are drawn, or come with `clustrs-models`


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
    """A question (as a record has it) that two methods answered with different scores."""

    asked: AnswerRecord
    first: Answered
    second: Answered


@dataclass(frozen=True)
class OpenRun:
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
        return [*(families.get(CLEAN, ()) if corruption != CLEAN else ()), *families[corruption]]

    def methods(self, budget: str) -> list[int]:
        """Return the indices of the methods to show for a budget: the unpruned model first."""
        run = self.run
        if budget not in run.budgets:
            raise ValueError(f"keep {budget!r}: this run has {', '.join(run.budgets)}")
        pruning = [index for label in run.labels if (index := run.find(label, budget)) is not None]
        return ([] if run.unpruned is None else [run.unpruned]) + pruning

    def rival(self, budget: str, method: int) -> int | None:
        """Return the default method to compare with: ClustRS, or for ClustRS the next one; None if there is none."""
        others = [index for index in self.methods(budget) if index != method]
        ours = [index for index in others if self.run.methods[index].name == OURS]
        pruning = [index for index in others if self.run.methods[index].keep is not None]
        return next(iter([*ours, *pruning, *others]), None)


class RunLibrary:
    """Runs in a folder and below it; nothing outside is read, whatever a name or a link says."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.root = self.folder.resolve()
        self._opened: tuple[Any, OpenRun] | None = None

    def names(self) -> list[str]:
        """Return the runs by their path below the folder, newest first; "." is the folder itself."""
        changed = {}
        for here, folders, files in os.walk(self.root):
            name = Path(here).relative_to(self.root)
            folders[:] = [] if len(name.parts) >= DEEPEST else [one for one in folders if not one.startswith(".")]
            if {"config.json", "answers.jsonl"} <= set(files) and self._inside(Path(here)):
                with suppress(OSError):
                    changed[name.as_posix()] = os.path.getmtime(Path(here) / "answers.jsonl")
        return sorted(changed, key=lambda name: (-changed[name], name))[:MOST_RUNS]

    def open(self, name: str) -> OpenRun:
        """Read a run; raise ValueError if it cannot be read or lies outside of the folder."""
        folder = self.root / (name if isinstance(name, str) and "\0" not in name else "..")
        if not self._inside(folder) or not os.path.isfile(folder / "config.json"):
            raise ValueError(f"run {name!r}: there is no such run under {str(self.folder)!r}")
        states = [path.stat() for path in (folder / file for file in RUN_FILES) if path.exists()]
        stamp = name, [(state.st_mtime_ns, state.st_size) for state in states]
        if self._opened is None or self._opened[0] != stamp:  # one run at a time: they can be large
            self._opened = stamp, OpenRun(folder, Summary(load_run(folder)))
        return self._opened[1]

    def _inside(self, folder: Path) -> bool:
        paths = [folder, *(folder / file for file in RUN_FILES)]
        return all(Path(os.path.realpath(path)).is_relative_to(self.root) for path in paths)


@cache
def stored_entries() -> list[Entry]:
    """Load the answers behind docs/leaderboard.md; a clone of the repository has them."""
    if find_spec("clustrs_paper") is None:
        return []
    stored = import_module("clustrs_paper.evidence.leaderboard")
    return spelled(stored.load()) if stored.STORED.is_dir() else []


def spelled(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries with names of methods as papers write them."""
    return [replace(one, method=display_label(one.method)) for one in entries]


def disagreements(opened: OpenRun, first: int, second: int, condition: int) -> list[Disagreement]:
    """Return the questions that two methods (indices) answered with different scores, best for the first on top."""
    run, pair, under = opened.run, (first, second), opened.run.conditions[condition]
    scores, states = run.scores[list(pair), condition], run.states[list(pair), condition]
    differ = (states == SCORED).all(0) & (np.nan_to_num(scores[0]) != np.nan_to_num(scores[1]))
    wanted = {(run.items[item], run.seeds[seed]): scores[:, seed, item] for seed, item in np.argwhere(differ)}
    stored = {identity(run.config["methods"][index]): side for side, index in enumerate(pair)}
    found: dict[tuple[str, int], dict[int, AnswerRecord]] = {}
    for record in read_answers(opened.folder):
        key, side = (record.item, record.seed), stored.get(identity(record.method))
        name, _, level = record.corruption.rpartition(":")
        same = (name or CLEAN) == under.name and (under.level is None or float(level) == under.level)
        if same and key in wanted and side is not None:
            found.setdefault(key, {})[side] = record
    listed, names = [], [(run.methods[index].name, opened.summary.label(index)) for index in pair]
    for key, records in found.items():
        if len(records) == 2:
            scored = zip(names, (records[0], records[1]), map(float, wanted[key]), strict=True)
            answered = [Answered(*name, one.text or "", score, tuple(one.kept or ())) for name, one, score in scored]
            listed.append(Disagreement(records[0], *answered))
    return sorted(listed, key=lambda d: (d.second.score - d.first.score, d.asked.item, d.asked.seed))


def kept_images(loaded: LoadedModel, opened: OpenRun, one: Disagreement) -> tuple[list[Image.Image | None], str]:
    """Return the image with the tokens that each of the two methods kept, and a note on what cannot be shown.

    Nothing is downloaded. Only the model of the run knows the places of tokens; another shows the image as it is.
    """
    config, asked = Config.from_json(opened.run.config), one.asked
    if config.data is None and config.task not in LOCAL_TASKS:
        raise ValueError(f"the data of task {config.task} came from the hub, and this page makes no requests")
    data, corruption = None if config.data is None else Path(config.data), parse_corruption(asked.corruption)
    task = get_task(config.task, data, config.limit, **config.task_options)
    if hasattr(task, "frames"):
        raise ValueError(f"task {config.task} asks about clips, and this page shows the kept tokens of images only")
    image = task.open(asked.image)
    image = corruption.apply(image, asked.image, asked.seed) if corruption else image
    if config.model != loaded.name:
        note = f"The run's model is {config.model}: start clustrs app --model {config.model} to see the kept tokens."
        return [image, image], note
    processor = apply_image_padding(loaded.processor, config.image_padding)
    prompt = asking.chat_prompt(processor, asked.question, config.prompt_template)
    with loaded.lock:
        encoded = asking.encode(loaded.model, processor, [image], [(0, prompt)], config.crops, ()).images[0]
    count = len(encoded.candidates)
    drawn: list[Image.Image | None] = []
    for said in (one.first, one.second):
        indices = torch.tensor(said.kept or range(count), dtype=torch.long)
        if int(indices.max()) >= count:
            raise ValueError(f"{said.label} kept token {int(indices.max())}, but the image has {count}")
        selection = Selection(encoded.tokens[indices.clamp(min=0).to(encoded.tokens.device)], indices)
        places = (encoded.scores, encoded.layout, encoded.grids, encoded.slots, len(indices))
        seen = asking.as_seen(processor, image)
        drawn.append(overlay_kept(seen, ImageSelection(selection, *places), size=LARGEST_IMAGE))
    return drawn, ""
