"""Run the grid: every question with every method under every corruption, resumable at any point.

The work comes in units: some questions under one corruption. Their images pass the vision tower once, and every method
prunes the result. An engine answers the units; a `Worker` holds the loaded model.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import clustrs
from clustrs import validation
from clustrs.corruptions.images import check_size
from clustrs.evaluation.config import Config, parse_corruption
from clustrs.evaluation.store import AnswerRecord, Key, RunFolder, identity, key_of, new_record, read_object
from clustrs.evaluation.tasks import Item, Task, file_checksum, fingerprint, get_task, has_surrogates
from clustrs.models import ask as asking
from clustrs.models import load
from clustrs.models.adapters.base import adapter_class
from clustrs.models.ask import Picture, chat_prompt, frames_of
from clustrs.models.attach import resolve_auto
from clustrs.models.load import apply_image_padding
from clustrs.plugins import load_needed
from clustrs.pruners import Pruner, from_dict
from clustrs.validation import EngineName, excerpt

MAX_FAILURES = 50  # failures of one method in a row after which a run stops: more than single images must be wrong
LONGEST_ERROR = 300
MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")  # all that transformers may read
LARGE = 1 << 30  # bytes whose hashing takes seconds and is announced
Failures = dict[str, str]  # errors by question id


@dataclass(frozen=True)
class RunSummary:
    """Number of answers in a run's folder, of failed ones, and of those that were there before the call."""

    answers: int
    failed: int
    reused: int


def run(
    config: Config,
    folder: str | Path,
    engine: "Engine | EngineName" = "local",
    *,
    retry: bool = True,
    max_failures: int = MAX_FAILURES,
    progress: bool = True,
    tell: Callable[[str], None] | None = None,
) -> RunSummary:
    """Answer every question with every method under every corruption, and store the answers.

    The run can be stopped at any time; the same call resumes it.

    Args:
        config: The configuration.
        folder: Folder of the run. Questions that have an answer there are not asked again.
        engine: "local", "ray", or an engine, see `get_engine`.
        retry: Ask questions again that failed before.
        max_failures: Failures of one method in a row after which the run stops.
        progress: Show a progress bar.
        tell: Called with lines that say how many answers there will be, and how long they will take.

    Returns:
        The number of answers in the folder, of failed ones and of reused ones.

    Raises:
        ValueError: The run cannot start, cannot be resumed with this configuration, or had to stop.

    Examples:
        >>> from clustrs import Config, expand_methods, load_run
        >>> config = Config(
        ...     task="scenes", model="mini-llava", methods=expand_methods(["none", "clustrs"], [16]), limit=4
        ... )
        >>> run(config, folder, progress=False)
        RunSummary(answers=8, failed=0, reused=0)
        >>> load_run(folder).scores.shape  # methods, corruptions, seeds, questions
        (2, 1, 1, 4)
    """
    import transformers
    from tqdm import tqdm

    validation.integer("max_failures", max_failures, 1)
    worker = get_engine(engine) if isinstance(engine, str) else engine
    task = open_task(config)
    metadata: dict[str, Any] = {
        "items": len(task.items),
        "fingerprint": fingerprint(task),
        "judged": task.judged,
        "scale": task.scale,
        "max_new_tokens": config.max_new_tokens or task.max_new_tokens,
        "clustrs": clustrs.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model_files": model_checksums(load.local_files(config.model), progress),
        **choose_auto(config),
    }
    settled = replace(config, **metadata.get("chosen", {}))
    streaks: Counter[str] = Counter()  # failures of each method in a row; answers that failed before do not count
    with RunFolder(Path(folder), task).opened(config, metadata, retry) as store:
        reused = len(store.done)
        left = units(config, task, store.done)
        forecast = Forecast(config, len(task.items), reused, tell or (lambda _: None))
        bar_options: dict[str, Any] = {"total": reused + forecast.left, "initial": reused, "dynamic_ncols": True}
        desc = f"loading {config.model}" if left else None
        with tqdm(**bar_options, unit="answer", desc=desc, disable=not progress) as bar:
            for records in worker.run(settled, left):
                fresh = [record for record in records if key_of(record) not in store.done]
                store.append(fresh)
                bar.set_description("answering", refresh=False)
                bar.update(len(fresh))
                forecast.add(len(fresh))
                for record in fresh:
                    method = identity(record.method)
                    again = key_of(record) in store.retried
                    streaks[method] = 0 if record.error is None else streaks[method] + (not again)
                    if streaks[method] >= max_failures:
                        failed = f"{max_failures} answers of {record.method['name']} in a row failed"
                        advice = "the same command resumes and asks them again (--max-failures sets how many)"
                        raise ValueError(f"stopped: {failed}, the last one with: {record.error}; {advice}")
        return RunSummary(len(store.done), len(store.failed), reused)


class Forecast:
    """Forecast of a run: the number of answers, and the time once a first batch was timed."""

    def __init__(self, config: Config, questions: int, reused: int, tell: Callable[[str], None]) -> None:
        counts = {"method": len(config.methods), "corruption": len(config.corruptions), "seed": len(config.seeds)}
        counts["question"] = questions
        self.tell, self.batches, self.left = tell, len(config.methods), math.prod(counts.values()) - reused
        self.calls, self.timed, self.start = 0, 0, 0.0
        parts = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items()]
        before = f"; {reused:,} are there already" if reused else ""
        after = ", estimating the time from the first batch" if self.left else ""
        tell(f"{self.left + reused:,} answers: {' x '.join(parts)}{before}{after}")

    def add(self, count: int) -> None:
        """Count answers; those of the first call paid for loading the model and are not timed."""
        self.calls += 1
        self.left -= count
        if self.calls == 1:
            self.start = perf_counter()
            return
        self.timed += count
        if self.calls == self.batches + 1 and self.left and self.timed:
            seconds = (perf_counter() - self.start) / self.timed * self.left
            self.tell(f"about {duration(seconds)} for the other {self.left:,} answers")


def duration(seconds: float) -> str:
    for unit, size in (("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}s" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}s"
    return f"{max(1, round(seconds))} seconds"


def choose_auto(config: Config) -> dict[str, Any]:
    """Return what "auto" chooses for the model, as `chosen`; nothing where the configuration leaves no choice."""
    given = {"positions": config.positions, "attention": config.attention}
    if "auto" not in given.values():
        return {}
    family = adapter_class(str(read_object(load.local_files(config.model) / "config.json").get("model_type")))
    device = load.resolve_device(config.device).type
    settled = zip(given, resolve_auto(family, config.attn, device, config.positions, config.attention), strict=True)
    return {"chosen": {name: value for name, value in settled if given[name] == "auto"}}


def model_checksums(folder: Path, progress: bool = True) -> dict[str, str]:
    """Return the SHA-256 of the files of a model, weights in full."""
    try:
        files = sorted(path for path in folder.rglob("*") if path.suffix in MODEL_FILES and path.is_file())
        if any(path.suffix == ".safetensors" for path in files):
            files = [path for path in files if path.suffix != ".bin"]
        size = sum(path.stat().st_size for path in files)
        if progress and size > LARGE:
            print(f"checking {len(files)} files of the model ({size / 1e9:.1f} GB)", file=sys.stderr)
        return {path.relative_to(folder).as_posix(): file_checksum(path) for path in files}
    except OSError as error:
        raise ValueError(f"model {str(folder)!r} cannot be read: {error.strerror or error}") from None


def open_task(config: Config) -> Task:
    """Open the task of a configuration and check its questions: valid text, unique ids."""
    task = get_task(config.task, config.data, config.limit, **config.task_options)
    seen = set()
    for item in task.items:
        texts = {"id": item.id, "image": item.image, "question": item.question, "answer": item.answer}
        for name, value in (*texts.items(), *(("kind", kind) for kind in item.kinds)):
            if not isinstance(value, str) or has_surrogates(value):
                raise ValueError(f"task {config.task}: the {name} {excerpt(value)} of a question is not text")
        if item.id in seen:
            raise ValueError(f"task {config.task}: two questions have the id {excerpt(item.id)}")
        seen.add(item.id)
    if not seen:
        raise ValueError(f"task {config.task}: there are no questions in it")
    return task


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
    starts = range(0, len(task.items), config.batch_size)
    for corruption, seed, start in product(config.corruptions, config.seeds, starts):
        missing = [
            (item, method)
            for item in range(start, min(start + config.batch_size, len(task.items)))
            for method, described in enumerate(methods)
            if (task.items[item].id, described, corruption, seed) not in done
        ]
        if missing:
            items, requested = (tuple(sorted({pair[i] for pair in missing})) for i in (0, 1))
            left.append(Unit(corruption, seed, items, requested))
    return left


class Worker:
    """Task and model that answer units; the model is loaded when the first image is encoded."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task = open_task(config)
        self.methods = [from_dict(stored) for stored in config.methods]
        self.records = {need for method in self.methods for need in method.requirements()}
        self.max_new_tokens = config.max_new_tokens or self.task.max_new_tokens

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        model, processor = load.load_model(self.config.model, self.config.load_options())
        return model, apply_image_padding(processor, self.config.image_padding)

    def run(self, unit: Unit) -> Iterator[list[AnswerRecord]]:
        """Yield the records of each method of a unit; an error of one question is a failure of that question."""
        items = [self.task.items[index] for index in unit.items]
        failures: Failures = {}
        images: dict[str, Picture] = {}
        texts: dict[str, str] = {}
        for name in dict.fromkeys(item.image for item in items):
            try:
                images[name] = self.show(name, unit.corruption, unit.seed)
            except Exception as error:  # a task may be somebody else's; a corruption may need too much memory
                failures.update({item.id: one_line(error) for item in items if item.image == name})
        for item in items:
            if item.id not in failures:
                processor, count = self.loaded[1], len(frames_of(images[item.image]))
                try:
                    texts[item.id] = chat_prompt(processor, item.question, self.config.prompt_template, count)
                except Exception as error:  # chat templates raise what they like
                    failures[item.id] = one_line(error)
        batch = self._encode([item for item in items if item.id in texts], images, texts, failures)
        asked = [item for item in items if item.id not in failures]
        for method in (self.methods[index] for index in unit.methods):
            replies = self._replies(batch, method, len(asked)) if batch is not None else []
            answers = dict(zip((item.id for item in asked), replies, strict=True))
            yield [self._record(unit, method, item, answers.get(item.id) or failures[item.id]) for item in items]

    def show(self, name: str, corruption: str = "clean", seed: int = 0) -> Picture:
        """Open an image, or the frames of a clip, as a corruption leaves them: each frame has its own noise."""
        clip = getattr(self.task, "frames", None)
        images = list(clip(name)) if clip else [self.task.open(name)]
        names = [f"{name} frame {number}" for number in range(len(images))] if clip else [name]
        for image in images:
            check_size(f"image {name!r}", image.size)
        effect = parse_corruption(corruption)
        if effect:
            images = [effect.apply(image, own, seed) for image, own in zip(images, names, strict=True)]
        return images if clip else images[0]

    def _encode(
        self, asked: Sequence[Item], images: Mapping[str, Picture], texts: Mapping[str, str], failures: Failures
    ) -> asking.Batch | None:
        """Encode all images at once; if that fails, find the questions that fail alone."""

        def encode(items: Sequence[Item]) -> asking.Batch:
            names = list(dict.fromkeys(item.image for item in items))
            numbered = [(names.index(item.image), texts[item.id]) for item in items]
            shown = [images[name] for name in names]
            return asking.encode(*self.loaded, shown, numbered, self.config.crops, self.records)

        if not asked:
            return None
        try:
            return encode(asked)
        except Exception as error:  # processors and towers raise many kinds
            for item in asked:
                try:
                    encode([item])
                except Exception as alone:
                    failures[item.id] = one_line(alone)
            left = [item for item in asked if item.id not in failures]
            if len(left) == len(asked):
                refuse_batch(error)
                raise
            return encode(left) if left else None

    def _replies(self, batch: asking.Batch, method: Pruner, count: int) -> list[asking.Reply | str]:
        try:
            options = {name: getattr(self.config, name) for name in ("scope", "crops", "positions", "attention")}
            return list(asking.reply(*self.loaded, batch, method, self.max_new_tokens, **options))
        except Exception as error:
            if count == 1:
                return [one_line(error)]
            refuse_batch(error)
            alone = [asking.part(batch, index) for index in range(count)]
            return [reply for part in alone for reply in self._replies(part, method, 1)]

    def _record(self, unit: Unit, method: Pruner, item: Item, reply: asking.Reply | str) -> AnswerRecord:
        if isinstance(reply, str):
            return failed_record(unit, method, item, reply)
        text = printable(reply.text)
        try:
            score = self.task.score(item, text)
        except Exception as error:  # a task may be somebody else's
            return failed_record(unit, method, item, f"the task's score failed: {one_line(error)}")
        frames = reply.frames or (reply.image,)
        kept: list[int] = []
        for number, frame in enumerate(frames):  # counted over all frames; -1 is a CLS token
            before = sum(len(one.scores) for one in frames[:number])
            kept += [index + before if index >= 0 else -1 for index in frame.selection.indices.tolist()]
        tokens: dict[str, Any] = {"kept": [] if method.name == "none" else kept}
        tokens["visual_tokens"] = sum(frame.kept for frame in frames)
        tokens["unpruned_tokens"] = sum(frame.placeholders for frame in frames)
        averages = [frame.average for frame in frames if frame.average is not None]
        tokens["average_tokens"] = sum(averages) if averages else None
        return new_record(item, method.to_dict(), unit.corruption, unit.seed, text=text, score=score, **tokens)


def failed_record(unit: Unit, method: Pruner, item: Item, error: str) -> AnswerRecord:
    return new_record(item, method.to_dict(), unit.corruption, unit.seed, error=printable(error))


def refuse_batch(error: Exception) -> None:
    """Stop the run if a batch needs more memory than there is: it can be resumed with a smaller one."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        advice = "pass a smaller --batch-size, the run resumes with it"
        raise ValueError(f"out of memory: {advice} ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__


def printable(text: str) -> str:
    """Escape halves of characters, which UTF-8 files cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode()


class Engine:
    """Engine that answers the units of a run one after another in this process; base class of others."""

    def run(self, config: Config, units: Sequence[Unit]) -> Iterator[list[AnswerRecord]]:
        """Yield lists of records of the units, in any order, as they come; nothing is loaded if there are no units."""
        if units:
            worker = Worker(config)
            for unit in units:
                yield from worker.run(unit)


def get_engine(name: EngineName, **options: Any) -> Engine:
    """Return the engine "local", or "ray" with the options of `clustrs_ray.RayEngine`."""
    validation.choice("engine", name, ("local", "ray"))
    return Engine(**options) if name == "local" else load_needed("clustrs.engines", "clustrs-ray", "ray")(**options)
