"""Engines, which do the work of a run, and the worker that answers questions with a loaded model.

The work comes in units: some questions under one corruption. Their images pass the vision tower once, and every method
prunes the result.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from PIL import Image

from clustrs import validation
from clustrs.corruptions.images import check_size
from clustrs.evaluation.config import Config, grid, parse_corruption
from clustrs.evaluation.store import AnswerRecord, Key, identity, new_record
from clustrs.evaluation.tasks import Item, Task, get_task
from clustrs.evaluation.tasks.sources import has_half_characters
from clustrs.models import load, shared_encoding
from clustrs.models.ask import chat_prompt
from clustrs.models.load import apply_image_padding
from clustrs.pruners import Pruner, from_dict
from clustrs.validation import EngineName, excerpt

LONGEST_ERROR = 300
Failures = dict[str, str]
"""Errors by question id."""


@dataclass(frozen=True)
class Unit:
    """Questions under one corruption and the methods to answer them with, by their indices."""

    corruption: str
    seed: int
    items: tuple[int, ...]
    methods: tuple[int, ...]


def units(config: Config, task: Task, done: set[Key]) -> list[Unit]:
    """Return the units that are left; their boundaries do not depend on what is done."""
    methods = [identity(from_dict(stored).to_dict()) for stored in config.methods]
    left = []
    for corruption, seed in grid(config):
        for start in range(0, len(task.items), config.batch_size):
            chunk = range(start, min(start + config.batch_size, len(task.items)))
            missing = [
                (item, method)
                for item in chunk
                for method, described in enumerate(methods)
                if (task.items[item].id, described, corruption, seed) not in done
            ]
            if missing:
                items, requested = ({pair[i] for pair in missing} for i in (0, 1))
                left.append(Unit(corruption, seed, tuple(sorted(items)), tuple(sorted(requested))))
    return left


class Worker:
    """Task and model that answer units; the model is loaded when the first image is encoded."""

    def __init__(self, config: Config, task: Task | None = None) -> None:
        self.config = config
        self.task = open_task(config) if task is None else task
        self.methods = [from_dict(stored) for stored in config.methods]
        self.max_new_tokens = config.max_new_tokens or self.task.max_new_tokens

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Return the model and its processor."""
        model, processor = load.load_model(self.config.model, self.config.load_options())
        return model, apply_image_padding(processor, self.config.image_padding)

    def run(self, unit: Unit) -> Iterator[list[AnswerRecord]]:
        """Yield the records of each method of a unit; an error of one question is a failure of that question."""
        items = [self.task.items[index] for index in unit.items]
        failures: Failures = {}
        images = self._images(unit, items, failures)
        texts = self._prompts(items, failures)
        batch = self._encode(items, images, texts, failures)
        asked = [item for item in items if item.id not in failures]
        for index in unit.methods:
            method = self.methods[index]
            replies = self._replies(batch, method, len(asked)) if batch is not None else []
            answers = dict(zip((item.id for item in asked), replies, strict=True))
            yield [
                self._record(unit, method, item, answers[item.id])
                if item.id in answers
                else failed_record(unit, method, item, failures[item.id])
                for item in items
            ]

    def _images(self, unit: Unit, items: Sequence[Item], failures: Failures) -> dict[str, Image.Image]:
        """Open and corrupt the images; returns them by name."""
        corruption = parse_corruption(unit.corruption)
        images = {}
        for name in dict.fromkeys(item.image for item in items):
            try:
                image = self.task.open(name)
                check_size(f"image {name!r}", image.size)
                images[name] = corruption.apply(image, name, unit.seed) if corruption else image
            except Exception as error:  # a task may be somebody else's; a corruption may need too much memory
                failures.update({item.id: one_line(error) for item in items if item.image == name})
        return images

    def _prompts(self, items: Sequence[Item], failures: Failures) -> dict[str, str]:
        """Format the prompts of the questions without a failure; returns them by id."""
        if all(item.id in failures for item in items):
            return {}
        processor = self.loaded[1]
        texts = {}
        for item in items:
            try:
                if item.id not in failures:
                    texts[item.id] = chat_prompt(processor, item.question, self.config.prompt_template)
            except Exception as error:  # chat templates raise what they like
                failures[item.id] = one_line(error)
        return texts

    def _encode(
        self, items: Sequence[Item], images: Mapping[str, Image.Image], texts: Mapping[str, str], failures: Failures
    ) -> shared_encoding.Batch | None:
        """Encode all images at once; if that fails, find the questions that fail alone."""
        asked = [item for item in items if item.id not in failures]
        if not asked:
            return None
        try:
            return self._batch(asked, images, texts)
        except Exception as error:  # processors and towers raise many kinds
            for item in asked:
                try:
                    self._batch([item], images, texts)
                except Exception as alone:
                    failures[item.id] = one_line(alone)
            left = [item for item in asked if item.id not in failures]
            if len(left) == len(asked):
                refuse_batch(error)
                raise
            return self._batch(left, images, texts) if left else None

    def _batch(
        self, items: Sequence[Item], images: Mapping[str, Image.Image], texts: Mapping[str, str]
    ) -> shared_encoding.Batch:
        model, processor = self.loaded
        names = list(dict.fromkeys(item.image for item in items))
        numbered = [(names.index(item.image), texts[item.id]) for item in items]
        shown = [images[name] for name in names]
        return shared_encoding.encode(model, processor, shown, numbered, self.config.crops)

    def _replies(self, batch: shared_encoding.Batch, method: Pruner, count: int) -> list[shared_encoding.Reply | str]:
        """Return a reply, or an error, for each prompt."""
        try:
            options = {name: getattr(self.config, name) for name in ("scope", "crops", "positions", "attention")}
            return list(shared_encoding.reply(*self.loaded, batch, method, self.max_new_tokens, **options))
        except Exception as error:
            if count == 1:
                return [one_line(error)]
            refuse_batch(error)
            alone = [shared_encoding.part(batch, index) for index in range(count)]
            return [reply for part in alone for reply in self._replies(part, method, 1)]

    def _record(self, unit: Unit, method: Pruner, item: Item, reply: shared_encoding.Reply | str) -> AnswerRecord:
        if isinstance(reply, str):
            return failed_record(unit, method, item, reply)
        text = printable(reply.text)
        try:
            score = self.task.score(item, text)
        except Exception as error:  # a task may be somebody else's
            return failed_record(unit, method, item, f"the task's score failed: {one_line(error)}")
        kept = [] if method.name == "none" else reply.image.selection.indices.tolist()
        tokens = {"kept": kept, "visual_tokens": reply.image.kept, "unpruned_tokens": reply.image.placeholders}
        return new_record(item, method.to_dict(), unit.corruption, unit.seed, text=text, score=score, **tokens)


def failed_record(unit: Unit, method: Pruner, item: Item, error: str) -> AnswerRecord:
    """Make the record of a failed question."""
    return new_record(item, method.to_dict(), unit.corruption, unit.seed, error=printable(error))


def refuse_batch(error: Exception) -> None:
    """Stop the run if a batch needs more memory than there is: it can be resumed with a smaller one."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        advice = "pass a smaller --batch-size, the run resumes with it"
        raise ValueError(f"out of memory: {advice} ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """Return the message of an exception, short and in one line."""
    return " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__


def printable(text: str) -> str:
    """Escape halves of characters, which UTF-8 files cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def open_task(config: Config) -> Task:
    """Open the task of a configuration and check its questions: valid text, unique ids."""
    task = get_task(config.task, config.data, config.limit, **config.task_options)
    seen = set()
    for item in task.items:
        texts = {"id": item.id, "image": item.image, "question": item.question, "answer": item.answer}
        for name, value in (*texts.items(), *(("kind", kind) for kind in item.kinds)):
            if not isinstance(value, str) or has_half_characters(value):
                raise ValueError(f"task {config.task}: the {name} {excerpt(value)} of a question is not text")
        if item.id in seen:
            raise ValueError(f"task {config.task}: two questions have the id {excerpt(item.id)}")
        seen.add(item.id)
    if not seen:
        raise ValueError(f"task {config.task}: there are no questions in it")
    return task


class Engine(Protocol):
    """Contract of an engine: it answers the units of a run."""

    def run(self, config: Config, units: Sequence[Unit]) -> Iterable[list[AnswerRecord]]:
        """Yield lists of records of the units, in any order, as they come; nothing is loaded if there are no units."""
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Engine that answers the units one after another in this process."""

    def run(self, config: Config, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        """Yield the records of each method of each unit."""
        if units:
            worker = Worker(config)
            for unit in units:
                yield from worker.run(unit)


ENGINES: tuple[EngineName, ...] = ("local", "ray")


def get_engine(name: EngineName, **options: Any) -> Engine:
    """Return the engine "local", or "ray" with the options of `RayEngine`."""
    validation.choice("engine", name, ENGINES)
    if name == "ray":
        from clustrs.evaluation.ray_engine import RayEngine

        return RayEngine(**options)
    return LocalEngine(**options)
