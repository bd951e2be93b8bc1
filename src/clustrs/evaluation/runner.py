"""Run the grid: every question with every method under every corruption, resumable at any point."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import clustrs
from clustrs import validation
from clustrs.evaluation.config import Config, grid
from clustrs.evaluation.engines import Engine, get_engine, open_task, units
from clustrs.evaluation.store import AnswerRecord, RunFolder, identity, key_of
from clustrs.evaluation.tasks import Task, file_checksum, fingerprint, image_checksum, image_checksums
from clustrs.models.load import local_files
from clustrs.validation import EngineName

MAX_FAILURES = 50
"""Failures of one method in a row after which a run stops: more than single images must be wrong."""


@dataclass(frozen=True)
class RunSummary:
    """Number of answers in a run's folder, of failed ones, and of those that were there before the call."""

    answers: int
    failed: int
    reused: int


def run_metadata(config: Config, task: Task, progress: bool = True) -> dict[str, Any]:
    """Return what is stored with the configuration and must not change when the run is resumed."""
    import torch
    import transformers

    return {
        "items": len(task.items),
        "fingerprint": fingerprint(task),
        "judged": task.judged,
        "scale": task.scale,
        "max_new_tokens": config.max_new_tokens or task.max_new_tokens,
        "clustrs": clustrs.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model_files": model_checksums(local_files(config.model), progress),
    }


class Forecast:
    """Forecast of a run: the number of answers, and the time once a first batch was timed."""

    def __init__(self, config: Config, questions: int, reused: int, tell: Callable[[str], None]) -> None:
        self.tell, self.batches = tell, len(config.methods)
        self.seen, self.fresh, self.start = 0, 0, 0.0
        self.left = self.batches * len(grid(config)) * questions - reused
        counts = {"method": self.batches, "corruption": len(config.corruptions), "seed": len(config.seeds)}
        parts = [f"{n} {what}{'s' * (n > 1)}" for what, n in {**counts, "question": questions}.items()]
        before = f"; {reused:,} are there already" if reused else ""
        after = ", estimating the time from the first batch" if self.left else ""
        tell(f"{self.left + reused:,} answers: {' x '.join(parts)}{before}{after}")

    def add(self, count: int) -> None:
        """Count answers; those of the first call paid for loading the model and are not timed."""
        self.seen += 1
        if self.seen == 1:
            self.start = perf_counter()
            self.left -= count
            return
        self.fresh += count
        if self.seen == self.batches + 1 and self.left > self.fresh > 0:
            left = self.left - self.fresh
            seconds = (perf_counter() - self.start) / self.fresh * left
            self.tell(f"about {duration(seconds)} for the other {left:,} answers")


def duration(seconds: float) -> str:
    """Format a time, as precise as a forecast is."""
    for unit, size in (("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}s" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}s"
    return f"{max(1, round(seconds))} seconds"


def _count_failures(streaks: Counter[str], record: AnswerRecord, retried: bool, limit: int) -> None:
    """Stop the run after too many failures of a method in a row; answers that failed before do not count."""
    method = identity(record.method)
    streaks[method] = 0 if record.error is None else streaks[method] + (not retried)
    if streaks[method] >= limit:
        raise ValueError(
            f"stopped: {limit} answers of {record.method['name']} in a row failed, the last one with: "
            f"{record.error}; the same command resumes and asks them again (--max-failures sets how many)"
        )


def run(
    config: Config,
    folder: str | Path,
    engine: Engine | EngineName = "local",
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
        engine: "local", "ray", or an engine, see `clustrs.evaluation.get_engine`.
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
    from tqdm import tqdm

    validation.integer("max_failures", max_failures, 1)
    chosen = get_engine(engine) if isinstance(engine, str) else engine
    task = open_task(config)
    total = len(config.methods) * len(grid(config)) * len(task.items)
    streaks: Counter[str] = Counter()
    metadata, ids = run_metadata(config, task, progress), [item.id for item in task.items]
    with RunFolder(Path(folder)).opened(config, metadata, ids, lambda: image_checksums(task), retry) as store:
        reused = len(store.done)
        left = units(config, task, store.done)
        forecast = Forecast(config, len(task.items), reused, tell or (lambda _: None))
        bar_options: dict[str, Any] = {"total": total, "initial": reused, "unit": "answer", "dynamic_ncols": True}
        with tqdm(**bar_options, desc=f"loading {config.model}" if left else None, disable=not progress) as bar:
            for records in chosen.run(config, left):
                fresh = [record for record in records if key_of(record) not in store.done]
                for record in fresh:
                    if record.error is None and store.images.get(record.image) is None:
                        store.note_image(record.image, image_checksum(task, record.image))
                store.append(fresh)
                bar.set_description("answering", refresh=False)
                bar.update(len(fresh))
                forecast.add(len(fresh))
                for record in fresh:
                    _count_failures(streaks, record, key_of(record) in store.retried, max_failures)
        return RunSummary(len(store.done), len(store.failed), reused)


MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")
"""Suffixes of weights, configurations, tokenizers and chat templates."""
LARGE = 1 << 30
"""Bytes whose hashing takes seconds and is announced."""


def model_checksums(folder: Path, progress: bool = True) -> dict[str, str]:
    """Return the SHA-256 of every file in a model's folder that transformers may read, weights in full.

    `.bin` files beside safetensors are left out: transformers does not read them.
    """
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
