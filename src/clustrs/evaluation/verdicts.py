"""A judge marks the answers of a run; its verdicts are stored in `verdicts.jsonl`."""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

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
"""A question's id and the text that is judged."""
UNCONFIRMED_CALLS = 10
"""How many calls are made without asking for confirmation."""
UNAVAILABLE_IN_A_ROW = 3
"""After so many answers in a row for which the server did nothing, judging stops."""
FAILED_IN_A_ROW = 20
"""After so many answers in a row without a mark, for whatever reason, judging stops."""


@dataclass(frozen=True)
class JudgeSummary:
    """How many marks were given now, were there already, and could not be had."""

    judged: int
    reused: int
    failed: int


@dataclass(frozen=True)
class Verdicts:
    """What one judge said. `scores` is the mean over the rounds that worked; `failed` is in how many rounds there was
    no mark, for the pairs where this happened. A pair that failed in every round is not in `scores`."""

    judge: str | None
    scores: dict[Pair, float]
    failed: dict[Pair, int]
    errors: Counter[str]
    """What went wrong in the rounds that failed, counted."""


@dataclass(frozen=True)
class Job:
    """A mark that is still missing."""

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
    """Have every distinct answer of a run judged, `rounds` times, `concurrency` at once; marks already there are kept.

    It can be ended at any time and called again. Answers that get no mark are counted as failed, and tried again by
    the next call. A judge that would refuse all of them (a bad key, an unknown model) or cannot be reached ends it with
    a `JudgeRefused`. When more than a few calls are needed, `confirm` is called with their number before the first one;
    if it returns False, nothing is asked. Without `confirm` no confirmation is needed.
    """
    for name, value in (("rounds", rounds), ("concurrency", concurrency)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give an integer, at least 1")
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
    """The question and the expected answer of every distinct answer of a run."""
    path = folder / "answers.jsonl"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is no run: there is no answers.jsonl in it")
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
    """Do the jobs and write a line for each at once; returns how many of them failed."""
    from tqdm import tqdm

    failed = 0
    streak = FailureStreak()
    bar = tqdm(total=total, initial=total - len(jobs), unit="mark", disable=not progress, dynamic_ncols=True)
    with bar, closing(outcomes(judge, jobs, concurrency)) as results:
        for job, outcome in results:
            error = str(outcome) if isinstance(outcome, JudgeError) else None
            score = None if isinstance(outcome, JudgeError) else outcome
            verdict = VerdictRecord(
                item=job.item, text=job.text, judge=judge.model, round=job.round, score=score, error=error
            )
            file.write(encode_record(verdict))
            file.flush()
            bar.update()
            if error is not None:
                failed += 1
                bar.set_postfix(failed=failed)
                if progress and failed == 1:
                    bar.write(f"no mark for {job.item}: {error}", file=sys.stderr)
            streak.count(outcome)
    return failed


class FailureStreak:
    """Counts failures in a row and ends the work when more of the same is all that can be expected."""

    def __init__(self) -> None:
        self.failed = self.unavailable = 0

    def count(self, outcome: float | JudgeError) -> None:
        """Take note of an outcome; a `JudgeRefused` when there were too many failures."""
        self.failed = self.failed + 1 if isinstance(outcome, JudgeError) else 0
        self.unavailable = self.unavailable + 1 if isinstance(outcome, JudgeUnavailable) else 0
        if self.unavailable >= UNAVAILABLE_IN_A_ROW or self.failed >= FAILED_IN_A_ROW:
            raise JudgeRefused(f"stopped after {self.failed} answers in a row without a mark; the last: {outcome}")


def outcomes(judge: Judge, jobs: list[Job], concurrency: int) -> Generator[tuple[Job, float | JudgeError], None, None]:
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
    """Open the file for the next line: no other process writes, and what a killed one left of a line is cut off."""
    try:
        with FileLock(path.with_suffix(".lock"), timeout=0), path.open("a+b") as file:
            drop_torn_line(file)
            yield file
    except Timeout:
        raise ValueError(f"{str(path)!r}: another process is writing to it") from None


def stored_verdicts(path: Path) -> Iterator[VerdictRecord]:
    """The records of `verdicts.jsonl`, but for a torn last one; none when there is no such file."""
    if not path.exists():
        return
    for number, verdict in read_records(path, VerdictRecord):
        if verdict.score is not None and not 0 <= verdict.score <= 1:
            where = location(path, number)
            raise ValueError(f"{where}: score is {verdict.score!r}, a number from 0 to 1 or null is expected")
        yield verdict


def read_verdicts(folder: Path, judge: str | None = None) -> Verdicts:
    """Read what a judge said about the answers of a run; `judge` may be left out when there was only one.

    Within a round the last mark counts; a failure counts only where there is no mark.
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
                marks.setdefault(pair, verdict.error or "no mark")
        if judge is None and len(judges) > 1:
            latest.clear()  # a judge has to be chosen: only the names are still needed
    if judge is None and len(judges) > 1:
        raise ValueError(f"{str(path)!r} has verdicts of several judges: choose one of {', '.join(sorted(judges))}")
    if judge is not None and judges and judge not in judges:
        raise ValueError(f"judge={judge!r}: {str(path)!r} has verdicts of {', '.join(sorted(judges))}")
    chosen = judge if judge is not None else next(iter(judges), None)
    return _merge_rounds(chosen, list(latest.get(chosen or "", {}).values()))


def _merge_rounds(judge: str | None, rounds: list[dict[Pair, float | str]]) -> Verdicts:
    """Means over the rounds that have a mark; the rounds are used up to save memory."""
    sums: dict[Pair, list[float]] = {}
    scores: dict[Pair, float] = {}
    failed: Counter[Pair] = Counter()
    errors: Counter[str] = Counter()
    single = len(rounds) == 1
    while rounds:
        for pair, outcome in rounds.pop().items():
            if isinstance(outcome, str):
                failed[pair] += 1
                errors[outcome] += 1
            elif single:
                scores[pair] = outcome
            else:
                sums.setdefault(pair, []).append(outcome)
    for pair, marks in sums.items():
        scores[pair] = math.fsum(marks) / len(marks)
    return Verdicts(judge, scores, dict(failed), errors)
