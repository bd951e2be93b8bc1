"""Judging of a run: every distinct answer is scored by a judge, and the verdicts are stored in `verdicts.jsonl`."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from clustrs.evaluation.judge import Judge, JudgeError, JudgeRefused, JudgeUnavailable, event_loop
from clustrs.evaluation.store import (
    AnswerRecord,
    VerdictRecord,
    drop_torn_line,
    encode_record,
    location,
    read_config,
    read_records,
)

Pair = tuple[str, str]
"""Id of a question and the text that is judged."""
UNCONFIRMED_CALLS = 10
"""Number of calls that need no confirmation."""
UNAVAILABLE_IN_A_ROW = 3
"""Answers in a row for which the server did nothing, after which judging stops."""
FAILED_IN_A_ROW = 20
"""Answers in a row without a score, for whatever reason, after which judging stops."""


@dataclass(frozen=True)
class JudgeSummary:
    """Number of scores that were given now, were there already, and failed."""

    judged: int
    reused: int
    failed: int


@dataclass(frozen=True)
class Verdicts:
    """Verdicts of one judge. `scores` are means over the rounds that worked; a pair that failed in all is not there.

    `failed` counts the rounds without a score, `errors` how often each error occurred.
    """

    judge: str | None
    scores: dict[Pair, float]
    failed: dict[Pair, int]
    errors: Counter[str]


@dataclass(frozen=True)
class Job:
    """Score that is still missing."""

    item: str
    text: str
    question: str
    answer: str
    round: int


def judge_run(
    folder: Path,
    judge: Judge,
    rounds: int = 1,
    concurrency: int = 4,
    progress: bool = True,
    confirm: Callable[[int], bool] | None = None,
) -> JudgeSummary:
    """Judge every distinct answer of a run; scores that are there already are kept.

    It can be stopped at any time and called again. An answer that gets no score counts as failed, never as 0, and is
    tried again by the next call.

    Args:
        folder: The folder of the run.
        judge: The judge.
        rounds: How often each answer is judged; results average over the rounds.
        concurrency: Requests at a time.
        progress: Show a progress bar.
        confirm: Called with the number of calls if they are more than ten; False stops before the first one.

    Returns:
        How many scores were given, reused and failed.

    Raises:
        ValueError: The run cannot be read or needs no judge, or the calls were not confirmed.
        JudgeRefused: The judge refuses every answer (bad key, unknown model) or cannot be reached.
    """
    for name, value in (("rounds", rounds), ("concurrency", concurrency)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    folder = Path(folder)
    answers = answers_to_judge(folder)
    path = folder / "verdicts.jsonl"
    try:
        with locked(path) as file:
            marked = {
                (verdict.item, verdict.text, verdict.round)
                for verdict in stored_verdicts(path)
                if verdict.judge == judge.model and verdict.score is not None
            }
            jobs = [
                Job(item, text, question, answer, number)
                for number in range(rounds)
                for (item, text), (question, answer) in answers.items()
                if (item, text, number) not in marked
            ]
            total = rounds * len(answers)
            if len(jobs) > UNCONFIRMED_CALLS and confirm is not None and not confirm(len(jobs)):
                raise ValueError(f"{len(jobs)} calls to {judge.model} were not confirmed: nothing was asked")
            failed = work_through(jobs, judge, concurrency, file, total, progress)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}") from None
    return JudgeSummary(len(jobs) - failed, total - len(jobs), failed)


def answers_to_judge(folder: Path) -> dict[Pair, Pair]:
    """Return question and expected answer of every distinct answer of a run."""
    path = folder / "answers.jsonl"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is not a run: there is no answers.jsonl in it")
    config = read_config(folder)
    if config.get("judged") is False:
        task = config.get("task")
        raise ValueError(f"run {str(folder)!r}: the task {task!r} scores its answers itself, they need no judge")
    answers: dict[Pair, Pair] = {}
    empty = True
    for _, record in read_records(path, AnswerRecord):
        empty = False
        if record.text is not None and record.score is None:
            answers.setdefault((record.item, record.text), (record.question, record.answer))
    if empty:
        raise ValueError(f"run {str(folder)!r} has no answers yet")
    return answers


def work_through(jobs: list[Job], judge: Judge, concurrency: int, file: BinaryIO, total: int, progress: bool) -> int:
    """Do the jobs and write a line for each at once; returns how many failed."""
    from tqdm import tqdm

    failed = streak = unavailable = 0
    bar = tqdm(total=total, initial=total - len(jobs), unit="score", disable=not progress, dynamic_ncols=True)
    with bar, closing(_outcomes(judge, jobs, concurrency)) as results:
        for job, outcome in results:
            error, score = (str(outcome), None) if isinstance(outcome, JudgeError) else (None, outcome)
            named: dict[str, Any] = {"item": job.item, "text": job.text, "judge": judge.model, "round": job.round}
            file.write(encode_record(VerdictRecord(**named, score=score, error=error)))
            file.flush()
            bar.update()
            streak = 0 if error is None else streak + 1
            unavailable = unavailable + 1 if isinstance(outcome, JudgeUnavailable) else 0
            if error is not None:
                failed += 1
                bar.set_postfix(failed=failed)
                if progress and failed == 1:
                    bar.write(f"no score for {job.item}: {error}", file=sys.stderr)
            if unavailable >= UNAVAILABLE_IN_A_ROW or streak >= FAILED_IN_A_ROW:
                raise JudgeRefused(f"stopped after {streak} answers in a row without a score; the last: {outcome}")
    return failed


def _outcomes(judge: Judge, jobs: list[Job], concurrency: int) -> Generator[tuple[Job, float | JudgeError], None, None]:
    """Yield the jobs with their scores or errors, as they come in; requests under way end with the generator."""
    todo = iter(jobs)
    results: SimpleQueue[tuple[Job, float | Exception]] = SimpleQueue()

    async def work() -> None:
        for job in todo:
            try:
                results.put((job, await judge.ask(job.question, job.answer, job.text)))
            except Exception as error:  # whatever it is, it must reach the thread that waits for this job
                results.put((job, error))

    workers = [asyncio.run_coroutine_threadsafe(work(), event_loop()) for _ in range(min(concurrency, len(jobs)))]
    try:
        for _ in jobs:
            job, outcome = results.get()
            if isinstance(outcome, JudgeRefused) or not isinstance(outcome, float | JudgeError):
                raise outcome
            yield job, outcome
    finally:
        for worker in workers:
            worker.cancel()


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open the file to append lines, with a lock; a torn last line is cut off."""
    try:
        with FileLock(path.with_suffix(".lock"), timeout=0), path.open("a+b") as file:
            drop_torn_line(file)
            yield file
    except Timeout:
        raise ValueError(f"{str(path)!r}: another process is writing to it") from None


def stored_verdicts(path: Path) -> Iterator[VerdictRecord]:
    """Yield the records of `verdicts.jsonl`, if there is such a file."""
    if not path.exists():
        return
    for number, verdict in read_records(path, VerdictRecord):
        if verdict.score is not None and not 0 <= verdict.score <= 1:
            where = location(path, number)
            raise ValueError(f"{where}: score must be a number from 0 to 1 or null, got {verdict.score!r}")
        yield verdict


def read_verdicts(folder: Path, judge: str | None = None) -> Verdicts:
    """Read the verdicts of a judge, which must be named if there are several.

    Within a round the last score counts; a failure counts only where there is no score.
    """
    path = Path(folder) / "verdicts.jsonl"
    judges: set[str] = set()
    items: dict[str, str] = {}
    latest: dict[str, dict[int, dict[Pair, float | str]]] = {}
    for verdict in stored_verdicts(path):
        judges.add(verdict.judge)
        if judge is None or verdict.judge == judge:
            marks = latest.setdefault(verdict.judge, {}).setdefault(verdict.round, {})
            pair = (items.setdefault(verdict.item, verdict.item), verdict.text)
            if verdict.score is not None:
                marks[pair] = verdict.score
            else:
                marks.setdefault(pair, verdict.error or "no score")
        if judge is None and len(judges) > 1:
            latest.clear()  # a judge has to be chosen: only the names are still needed
    if judge is None and len(judges) > 1:
        raise ValueError(f"{str(path)!r} has verdicts of several judges: choose one of {', '.join(sorted(judges))}")
    if judge is not None and judges and judge not in judges:
        raise ValueError(f"judge must be one of {', '.join(sorted(judges))} for {str(path)!r}, got {judge!r}")
    chosen = judge if judge is not None else next(iter(judges), None)
    scores: dict[Pair, list[float]] = {}
    failed: Counter[Pair] = Counter()
    errors: Counter[str] = Counter()
    for outcomes in latest.get(chosen or "", {}).values():
        for pair, outcome in outcomes.items():
            if isinstance(outcome, str):
                failed[pair] += 1
                errors[outcome] += 1
            else:
                scores.setdefault(pair, []).append(outcome)
    means = {pair: math.fsum(marks) / len(marks) for pair, marks in scores.items()}
    return Verdicts(chosen, means, dict(failed), errors)
