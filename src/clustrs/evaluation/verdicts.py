"""A judge marks the answers of a run; what it says is kept in `verdicts.jsonl`."""

import fcntl
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from clustrs.evaluation.formats import Answer, answers_of
from clustrs.evaluation.jsonl import drop_torn_line, lines, need
from clustrs.evaluation.judge import Judge, JudgeError, JudgeRefused

Pair = tuple[str, str]
"""A question's id and the words that are judged."""


@dataclass(frozen=True)
class Summary:
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
class Verdict:
    """A row of `verdicts.jsonl`. `score` is None when the judge gave no mark."""

    item: str
    text: str
    judge: str
    round: int
    score: float | None
    error: str | None


@dataclass(frozen=True)
class Job:
    """A mark that is still missing."""

    item: str
    text: str
    question: str
    answer: str
    round: int


def judge_run(folder: Path, judge: Judge, rounds: int = 1, concurrency: int = 4, progress: bool = True) -> Summary:
    """Have every distinct answer of a run judged, `rounds` times, `concurrency` at once; marks already there are kept.

    It can be ended at any time and called again. Answers that get no mark are counted as failed, and tried again by
    the next call. A judge that would refuse all of them (a bad key, an unknown model) ends it with a `JudgeRefused`.
    """
    for name, value in (("rounds", rounds), ("concurrency", concurrency)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give an integer, at least 1")
    asked: dict[Pair, Answer] = {}
    for answer in answers_of(folder):
        if answer.text is not None:
            asked.setdefault((answer.item, answer.text), answer)
    every = [
        Job(item, text, answer.question, answer.answer, number)
        for number in range(rounds)
        for (item, text), answer in asked.items()
    ]
    path = Path(folder) / "verdicts.jsonl"
    try:
        with opened(path) as file:
            done = {
                (verdict.item, verdict.text, verdict.round)
                for verdict in verdicts_in(path)
                if verdict.judge == judge.model and verdict.score is not None
            }
            jobs = [job for job in every if (job.item, job.text, job.round) not in done]
            failed = work_through(jobs, judge, concurrency, file, len(every), progress)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error.strerror}") from None
    return Summary(len(jobs) - failed, len(every) - len(jobs), failed)


def work_through(jobs: list[Job], judge: Judge, concurrency: int, file: BinaryIO, total: int, progress: bool) -> int:
    """Do the jobs and write a line for each at once; returns how many of them failed."""
    from tqdm import tqdm

    failed = 0
    bar = tqdm(total=total, initial=total - len(jobs), unit="mark", disable=not progress, dynamic_ncols=True)
    with bar, closing(outcomes(judge, jobs, concurrency)) as results:
        for job, outcome in results:
            error = str(outcome) if isinstance(outcome, JudgeError) else None
            score = None if isinstance(outcome, JudgeError) else outcome
            verdict = Verdict(job.item, job.text, judge.model, job.round, score, error)
            file.write(json.dumps(vars(verdict)).encode() + b"\n")
            file.flush()
            bar.update()
            if error is not None:
                failed += 1
                bar.set_postfix(failed=failed)
                if progress and failed == 1:
                    bar.write(f"no mark for {job.item}: {error}", file=sys.stderr)
    return failed


def outcomes(judge: Judge, jobs: list[Job], concurrency: int) -> Generator[tuple[Job, float | JudgeError], None, None]:
    """The jobs with their marks or errors, as they come in. The threads are daemons: nobody waits for a slow server."""
    todo: SimpleQueue[Job] = SimpleQueue()
    results: SimpleQueue[tuple[Job, float | Exception]] = SimpleQueue()
    stop = threading.Event()
    for job in jobs:
        todo.put(job)

    def work() -> None:
        while not stop.is_set():
            try:
                job = todo.get_nowait()
            except Empty:
                return
            try:
                results.put((job, judge.score(job.question, job.answer, job.text, stop)))
            except Exception as error:  # whatever it is, it must reach the thread that waits for this job
                results.put((job, error))

    for _ in range(min(concurrency, len(jobs))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in jobs:
            job, outcome = results.get()
            if isinstance(outcome, JudgeRefused) or not isinstance(outcome, float | JudgeError):
                raise outcome
            yield job, outcome
    finally:
        stop.set()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file, ready for the next line: no other process writes, and what a killed one left of a line goes away."""
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{str(path)!r}: another process is writing to it") from None
        drop_torn_line(file)
        yield file


def verdicts_in(path: Path) -> Iterator[Verdict]:
    """The rows of `verdicts.jsonl`, but for a torn last one; none when there is no such file."""
    if not path.exists():
        return
    for where, row in lines(path):
        score = need(where, row, "score", int, float, type(None))
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"{where}: score is {score!r}, a number from 0 to 1 or null is expected")
        yield Verdict(
            item=need(where, row, "item", str),
            text=need(where, row, "text", str),
            judge=need(where, row, "judge", str),
            round=need(where, row, "round", int),
            score=None if score is None else float(score),
            error=need(where, row, "error", str, type(None)),
        )


def read_verdicts(folder: Path, judge: str | None = None) -> Verdicts:
    """What a judge said about the answers of a run; `judge` may be left out when there was only one."""
    path = Path(folder) / "verdicts.jsonl"
    rows = list(verdicts_in(path))
    judges = sorted({row.judge for row in rows})
    if judge is None and len(judges) > 1:
        raise ValueError(f"{str(path)!r} has verdicts of several judges: choose one of {', '.join(judges)}")
    if judge is not None and judges and judge not in judges:
        raise ValueError(f"judge={judge!r}: {str(path)!r} has verdicts of {', '.join(judges)}")
    chosen = judge if judge is not None else next(iter(judges), None)
    latest: dict[tuple[Pair, int], Verdict] = {}
    for row in rows:
        if row.judge == chosen and (row.score is not None or ((row.item, row.text), row.round) not in latest):
            latest[(row.item, row.text), row.round] = row
    marks: dict[Pair, list[float]] = {}
    failed: Counter[Pair] = Counter()
    errors: Counter[str] = Counter()
    for (pair, _), row in latest.items():
        if row.score is None:
            failed[pair] += 1
            errors[row.error or "no mark"] += 1
        else:
            marks.setdefault(pair, []).append(row.score)
    means = {pair: math.fsum(scores) / len(scores) for pair, scores in marks.items()}
    return Verdicts(chosen, means, dict(failed), errors)
