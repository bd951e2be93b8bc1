"""Runs the grid. A unit is some questions under one corruption: their images go through the vision tower once, and
every method prunes what came out. Which questions share a unit follows from the configuration alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import clustrs
from clustrs.evaluation.config import Config, describe_method, grid, make_method, parse_corruption
from clustrs.evaluation.store import Key, Record, key_of
from clustrs.evaluation.task import Item, Task
from clustrs.evaluation.tasks import fingerprint, get_task
from clustrs.models import shared_encoding as sharing
from clustrs.models.load import load_model
from clustrs.models.prompts import chat_prompt
from clustrs.models.protocol import apply_image_padding
from clustrs.pruners import Pruner

Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """Questions `start` to `stop` of the task under one corruption, and the numbers of the methods to answer with."""

    corruption: str
    seed: int
    start: int
    stop: int
    methods: tuple[int, ...]


class Worker:
    """A loaded model and a task: turns units into rows of the record."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task = open_task(config)
        self.methods = [make_method(stored) for stored in config.methods]
        self.model, processor = load_model(config.model)
        self.processor = apply_image_padding(processor, config.image_padding)
        self.new_tokens = config.max_new_tokens or self.task.max_new_tokens

    def run(self, unit: Unit) -> Iterator[list[Row]]:
        """The rows of each method of a unit, as they come."""
        items = self.task.items[unit.start : unit.stop]
        images, broken = self._images(unit, items)
        asked = [item for item in items if item.image not in broken]
        batch = self._encode(asked, images, broken)
        asked = [item for item in items if item.image not in broken]
        for number in unit.methods:
            replies = self._replies(batch, self.methods[number], len(asked)) if batch else []
            answers = dict(zip((item.id for item in asked), replies, strict=True))
            yield [self._row(unit, number, item, answers.get(item.id, broken.get(item.image))) for item in items]

    def _images(self, unit: Unit, items: Sequence[Item]) -> tuple[dict[str, Any], dict[str, str]]:
        """The spoilt images by name, and what is wrong with those that can't be had."""
        corruption = parse_corruption(unit.corruption)
        images, broken = {}, {}
        for name in dict.fromkeys(item.image for item in items):
            try:
                image = self.task.open(name)
                images[name] = corruption.apply(image, name, unit.seed) if corruption else image
            except ValueError as error:
                broken[name] = one_line(error)
        return images, broken

    def _encode(self, asked: Sequence[Item], images: dict[str, Any], broken: dict[str, str]) -> sharing.Batch | None:
        """All images in one go; if that fails, those that fail by themselves are put with the broken ones."""
        if not asked:
            return None
        try:
            return self._batch(asked, images)
        except Exception as error:  # processors and towers raise many kinds
            fatal(error)
            for name in dict.fromkeys(item.image for item in asked):
                try:
                    self._batch([item for item in asked if item.image == name], images)
                except Exception as alone:
                    fatal(alone)
                    broken[name] = one_line(alone)
            left = [item for item in asked if item.image not in broken]
            if len(left) == len(asked):
                raise
            return self._batch(left, images) if left else None

    def _batch(self, items: Sequence[Item], images: dict[str, Any]) -> sharing.Batch:
        names = list(dict.fromkeys(item.image for item in items))
        template = self.config.prompt_template
        prompts = [(names.index(item.image), chat_prompt(self.processor, item.question, template)) for item in items]
        shown = [images[name] for name in names]
        return sharing.encode(self.model, self.processor, shown, prompts, self.config.crops)

    def _replies(self, batch: sharing.Batch, method: Pruner, count: int) -> list[sharing.Reply | str]:
        """A reply to each prompt, or what went wrong with it."""
        try:
            return list(self._reply(batch, method))
        except Exception as error:
            fatal(error)
            if count == 1:
                return [one_line(error)]
            return [one for row in range(count) for one in self._replies(sharing.part(batch, row), method, 1)]

    def _reply(self, batch: sharing.Batch, method: Pruner) -> list[sharing.Reply]:
        config = self.config
        options = {"scope": config.scope, "crops": config.crops, "positions": config.positions}
        return sharing.reply(self.model, self.processor, batch, method, self.new_tokens, **options)

    def _row(self, unit: Unit, number: int, item: Item, reply: sharing.Reply | str | None) -> Row:
        row: Row = {
            "item": item.id,
            "image": item.image,
            "kinds": list(item.kinds),
            "question": item.question,
            "answer": item.answer,
            "method": describe_method(self.methods[number]),
            "corruption": unit.corruption,
            "seed": unit.seed,
        }
        if not isinstance(reply, sharing.Reply):
            nothing = {"text": None, "score": None, "kept": None, "visual_tokens": None, "unpruned_tokens": None}
            return {**row, **nothing, "error": reply or "no answer"}
        everything = self.methods[number].name == "none"
        return {
            **row,
            "text": reply.text,
            "score": self.task.score(item, reply.text),
            "kept": [] if everything else reply.image.selection.indices.tolist(),
            "visual_tokens": reply.image.kept,
            "unpruned_tokens": reply.image.placeholders,
            "error": None,
        }


def fatal(error: Exception) -> None:
    """Lets through what is not the fault of one image or question."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        raise ValueError(f"out of memory: give a smaller --batch-size ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def open_task(config: Config) -> Task:
    data = None if config.data is None else Path(config.data)
    return get_task(config.task, data, config.limit, **config.task_options)


def facts(config: Config, task: Task) -> dict[str, Any]:
    """What is stored with the configuration: the report needs it, and a change of it is another run."""
    return {
        "items": len(task.items),
        "fingerprint": fingerprint(task),
        "judged": task.judged,
        "scale": task.scale,
        "max_new_tokens": config.max_new_tokens or task.max_new_tokens,
        "clustrs": clustrs.__version__,
    }


def units(config: Config, task: Task, done: set[Key]) -> list[Unit]:
    """What is left to do. Where the units begin and end does not depend on what is done."""
    methods = [describe_method(make_method(stored)) for stored in config.methods]
    left = []
    for corruption, seed in grid(config):
        for start in range(0, len(task.items), config.batch_size):
            items = task.items[start : start + config.batch_size]
            missing = tuple(
                number
                for number, method in enumerate(methods)
                if any(
                    key_of({"item": item.id, "method": method, "corruption": corruption, "seed": seed}) not in done
                    for item in items
                )
            )
            if missing:
                left.append(Unit(corruption, seed, start, start + len(items), missing))
    return left


Engine = Callable[[Config, Sequence[Unit]], Iterable[list[Row]]]
"""Runs units and gives their rows, in any order."""


def local(config: Config, left: Sequence[Unit]) -> Iterator[list[Row]]:
    """One after another, in this process."""
    if left:
        worker = Worker(config)
        for unit in left:
            yield from worker.run(unit)


def run(config: Config, folder: Path, engine: Engine = local, progress: bool = True) -> None:
    """Answer every question of the grid that has no answer in `folder` yet."""
    from tqdm import tqdm

    task = open_task(config)
    total = len(config.methods) * len(grid(config)) * len(task.items)
    with Record(folder).opened(config, facts(config, task)) as record:
        done = record.done()
        left = units(config, task, done)
        with tqdm(total=total, initial=len(done), unit="answer", disable=not progress, dynamic_ncols=True) as bar:
            for rows in engine(config, left):
                fresh = [row for row in rows if key_of(row) not in done]
                record.append(fresh)
                done.update(map(key_of, fresh))
                bar.update(len(fresh))
