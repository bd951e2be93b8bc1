"""Whole runs are judged once, whatever fails or ends on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from judge_server import (
    Reply,
    Server,
    answer_record,
    judge_at,
    marks_by_item,
    row_of,
    says,
    sends,
    verdict_record,
    verdict_records,
    write_answers,
)

from clustrs.evaluation.judge import Judge, JudgeRefused, JudgeSummary, judge_run
from clustrs.evaluation.results import read_verdicts


def test_each_distinct_answer_is_judged_once_a_round(serve: Callable[..., Server], tmp_path: Path) -> None:
    rows = [
        answer_record("v1_1", "red"),
        answer_record("v1_1", "red", corruption="gaussian:0.5"),
        answer_record("v1_1", "blue", seed=1),
        answer_record("v1_2", "red"),
        answer_record("v1_3", ""),
        answer_record("v1_4", None),
        answer_record("v1_5", "é | \ud800\n0.9"),
    ]
    write_answers(tmp_path, rows)
    server = serve()
    server.rule = marks_by_item
    assert judge_run(tmp_path, judge_at(server), rounds=2, progress=False) == JudgeSummary(
        judged=10, reused=0, failed=0
    )
    assert server.table_rows() == {
        "What is v1_1? | a AND b | ⟦red⟧ |": 2,
        "What is v1_1? | a AND b | ⟦blue⟧ |": 2,
        "What is v1_2? | a AND b | ⟦red⟧ |": 2,
        "What is v1_3? | a AND b | ⟦⟧ |": 2,
        "What is v1_5? | a AND b | ⟦é ¦ \ufffd 0.9⟧ |": 2,
    }
    expected = {("v1_1", "red"): 0.1, ("v1_1", "blue"): 0.1, ("v1_2", "red"): 0.2, ("v1_3", ""): 0.3}
    verdicts = read_verdicts(tmp_path)
    assert verdicts.judge == "marker"
    assert verdicts.scores == {**expected, ("v1_5", "é | \ud800\n0.9"): 0.5}
    assert verdicts.errors == {}
    assert verdict_records(tmp_path)[0].keys() == {"item", "text", "judge", "round", "score", "error"}
    assert sorted((row["item"], row["text"], row["round"]) for row in verdict_records(tmp_path)) == sorted(
        (*pair, number) for pair in verdicts.scores for number in (0, 1)
    )

    assert judge_run(tmp_path, judge_at(server), rounds=3, progress=False) == JudgeSummary(
        judged=5, reused=10, failed=0
    )
    assert judge_run(tmp_path, judge_at(server), rounds=1, progress=False) == JudgeSummary(judged=0, reused=5, failed=0)
    assert len(server.asked) == 15
    other = Judge("other", server.url)
    assert judge_run(tmp_path, other, progress=False) == JudgeSummary(judged=5, reused=0, failed=0)


def test_failures_are_counted_and_tried_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(10)])
    server = serve()
    server.rule = lambda body: sends("odd", 400) if "v1_3" in row_of(body) else marks_by_item(body)
    assert judge_run(tmp_path, judge_at(server), rounds=2, progress=False) == JudgeSummary(
        judged=18, reused=0, failed=2
    )
    verdicts = read_verdicts(tmp_path, "marker")
    assert verdicts.errors.total() == 2
    assert verdicts.scores == {(f"v1_{i}", "t"): i / 10 for i in range(10) if i != 3}
    failed = [row for row in verdict_records(tmp_path) if row["score"] is None]
    assert [row["error"] for row in failed] == ["the server says 400: odd"] * 2
    server.rule = marks_by_item
    assert judge_run(tmp_path, judge_at(server), rounds=2, progress=False) == JudgeSummary(
        judged=2, reused=18, failed=0
    )
    assert read_verdicts(tmp_path).errors == {}
    assert read_verdicts(tmp_path).scores["v1_3", "t"] == 0.3


def test_concurrency_limit(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(12)])
    server = serve()
    three, lock = threading.Barrier(3), threading.Lock()
    now, most = 0, 0

    def together(handler: BaseHTTPRequestHandler) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        three.wait(10)  # goes on when three are there
        time.sleep(0.1)  # time for a fourth, if one comes
        with lock:
            now -= 1
        says("0.5")(handler)

    server.rule = lambda body: together
    assert judge_run(tmp_path, judge_at(server, timeout=20), concurrency=3, progress=False).judged == 12
    assert most == 3


def test_a_judge_that_refuses_all_ends_the_run(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(50)])
    server = serve(says("0.5"))
    server.rule = lambda body: sends('{"error": {"message": "bad key"}}', 401)
    with pytest.raises(JudgeRefused, match=r"^the server says 401: bad key$"):
        judge_run(tmp_path, judge_at(server), concurrency=1, progress=False)
    assert [row["score"] for row in verdict_records(tmp_path)] == [0.5]
    assert len(server.asked) < 50


def test_an_unreachable_server_ends_the_run(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(50)])
    server = serve()
    server.shutdown()
    server.server_close()
    message = r"^stopped after 3 answers in a row without a score; the last: no reply from .*refused \(tries: 4\)$"
    with pytest.raises(JudgeRefused, match=message):
        judge_run(tmp_path, judge_at(server), progress=False)
    assert [record["score"] for record in verdict_records(tmp_path)] == [None] * 3


@pytest.mark.parametrize(("reply", "limit"), [(sends("", 500), 3), (sends("", 403), 3), (says("fine"), 20)])
def test_many_failures_in_a_row_end_the_run(
    serve: Callable[..., Server], tmp_path: Path, reply: Reply, limit: int
) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(100)])
    server = serve(*([reply] * (limit - 1) + [says("0.5")]) * 2)
    server.rule = lambda body: reply
    with pytest.raises(JudgeRefused, match=f"stopped after {limit} answers in a row"):
        judge_run(tmp_path, judge_at(server, retries=0), concurrency=1, progress=False)
    assert [record["score"] for record in verdict_records(tmp_path)] == [*[None] * (limit - 1), 0.5] * 2 + [
        None
    ] * limit
    assert len(server.asked) <= 3 * limit + 1


def test_many_calls_are_confirmed(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(10)])
    server = serve()
    asked: list[int] = []

    def confirm(calls: int) -> bool:
        asked.append(calls)
        return len(asked) > 1

    with pytest.raises(ValueError, match=r"^20 calls to marker were not confirmed: nothing was asked$"):
        judge_run(tmp_path, judge_at(server), rounds=2, progress=False, confirm=confirm)
    assert not server.asked
    assert judge_run(tmp_path, judge_at(server), progress=False, confirm=confirm).judged == 10
    assert asked == [20], "ten calls need no confirmation"
    assert judge_run(tmp_path, judge_at(server), rounds=3, progress=False, confirm=confirm).judged == 20
    assert asked == [20, 20]
    assert judge_run(tmp_path, judge_at(server), rounds=4, progress=False).judged == 10


def test_a_run_that_needs_no_judge_is_refused(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record("v1_0", "t", score=1.0)], judged=False, task="scienceqa")
    server = serve()
    with pytest.raises(ValueError, match="the task 'scienceqa' scores its answers itself, they need no judge"):
        judge_run(tmp_path, judge_at(server), progress=False)
    assert not server.asked
    assert not (tmp_path / "verdicts.jsonl").exists()


def test_progress_goes_to_stderr(
    serve: Callable[..., Server], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(3)])
    judge_run(tmp_path, judge_at(serve(sends("odd", 400)), retries=0), concurrency=1)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "no score for v1_0: the server says 400: odd" in printed.err
    assert "3/3" in printed.err
    assert "failed=1" in printed.err
    judge_run(tmp_path, judge_at(serve(sends("odd", 400)), retries=0), rounds=2, progress=False)
    assert capfd.readouterr().err == ""


PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
from pathlib import Path
from clustrs.evaluation.judge import Judge, judge_run
try:
    judge_run(Path(sys.argv[1]), Judge("marker", sys.argv[2], timeout=30), rounds=2, concurrency=3, progress=False)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.slow
def test_killed_and_run_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Killed after some verdicts, with requests under way; then with half a line at the end of the file."""
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(10)])
    server = serve()
    server.rule = lambda body: slowly(marks_by_item(body))
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), server.url], env=os.environ)
    wait_for(lambda: (tmp_path / "verdicts.jsonl").exists() and len(verdict_records_so_far(tmp_path)) >= 4, process)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    before = verdict_records_so_far(tmp_path)
    assert 4 <= len(before) < 20
    with (tmp_path / "verdicts.jsonl").open("a") as file:
        file.write(verdict_record("v1_9", 0.9)[:40])
    server.rule = marks_by_item

    left = 20 - len(before)
    summary = judge_run(tmp_path, judge_at(server), rounds=2, progress=False)
    assert summary == JudgeSummary(judged=left, reused=len(before), failed=0)
    assert verdict_records(tmp_path)[: len(before)] == before
    done = Counter((row["item"], row["text"], row["round"]) for row in verdict_records(tmp_path))
    assert done == {(f"v1_{i}", "t", number): 1 for i in range(10) for number in (0, 1)}
    assert read_verdicts(tmp_path).scores == {(f"v1_{i}", "t"): i / 10 for i in range(10)}


@pytest.mark.slow
def test_interrupt_ends_it_at_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Though three requests hang: nothing is printed, and what was judged is there."""
    write_answers(tmp_path, [answer_record(f"v1_{i}", "t") for i in range(10)])
    server, over = serve(says("0.1"), says("0.2")), threading.Event()

    def hangs(handler: BaseHTTPRequestHandler) -> None:
        over.wait(60)

    server.rule = lambda body: hangs
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), server.url], stderr=subprocess.PIPE, env=os.environ
    )
    wait_for(lambda: len(server.asked) >= 5 and len(verdict_records_so_far(tmp_path)) == 2, process)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=20)
    over.set()
    assert (process.returncode, printed) == (130, b"")
    assert sorted(row["score"] for row in verdict_records(tmp_path)) == [0.1, 0.2]


def slowly(reply: Reply) -> Reply:
    def later(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.1)
        reply(handler)

    return later


def verdict_records_so_far(folder: Path) -> list[dict[str, Any]]:
    whole = (folder / "verdicts.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        if condition():
            return
        assert process.poll() is None, "it ended too early"
        time.sleep(0.01)
    raise AssertionError("it took too long")


def test_torn_last_lines_are_ignored(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record("v1_0", "t"), answer_record("v1_1", "t")])
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write(json.dumps(answer_record("v1_2", "t"))[:-1])
    (tmp_path / "verdicts.jsonl").write_text(verdict_record("v1_0", 0.9) + verdict_record("v1_1", 0.9)[:-5])
    assert read_verdicts(tmp_path).scores == {("v1_0", "t"): 0.9}
    server = serve()
    server.rule = marks_by_item
    assert judge_run(tmp_path, judge_at(server), progress=False) == JudgeSummary(judged=1, reused=1, failed=0)
    assert read_verdicts(tmp_path).scores == {("v1_0", "t"): 0.9, ("v1_1", "t"): 0.1}
    assert len(verdict_records(tmp_path)) == 2


def test_one_process_at_a_time(serve: Callable[..., Server], tmp_path: Path) -> None:
    write_answers(tmp_path, [answer_record("v1_0", "t")])
    with FileLock(tmp_path / "verdicts.lock"), pytest.raises(ValueError, match="another process"):
        judge_run(tmp_path, judge_at(serve()), progress=False)
    assert judge_run(tmp_path, judge_at(serve()), progress=False).judged == 1


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, "not a run: there is no answers.jsonl"),
        ("", "no answers yet"),
        ("{\n" + json.dumps(answer_record("v1_0", "t")) + "\n", "answers.jsonl' line 1: "),
        (json.dumps(answer_record("v1_0", "t")) + "\n[1]\n", "answers.jsonl' line 2: "),
        (json.dumps(answer_record("v1_0", "t", seed="0")) + "\n", "line 1: seed must be int, got '0'"),
        (json.dumps(answer_record("v1_0", "t", seed=True)) + "\n", "seed must be int, got True"),
        (json.dumps(answer_record("v1_0", "t") | {"text": 0.5}) + "\n", "text must be str or null, got 0.5"),
        (json.dumps({**answer_record("v1_0", "t"), "question": None}) + "\n", "question must be str, got None"),
        (
            json.dumps({"item": "v1_0", "method": {}, "corruption": "clean", "seed": 0}) + "\n",
            "image must be str",
        ),
        ("\udcff\n", "line 1"),
    ],
)
def test_unreadable_run(serve: Callable[..., Server], tmp_path: Path, answers: str | None, said: str) -> None:
    if answers is not None:
        write_answers(tmp_path, [])
        (tmp_path / "answers.jsonl").write_text(answers, errors="surrogateescape")
    server = serve()
    with pytest.raises(ValueError, match=said):
        judge_run(tmp_path, judge_at(server), progress=False)
    with pytest.raises(ValueError, match="not a run"):
        judge_run(tmp_path / "nowhere", judge_at(server), progress=False)
    assert not server.asked


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense\n", "verdicts.jsonl' line 1: not JSON"),
        (verdict_record("v1_0", 1.5), "line 1: score must be a number from 0 to 1 or null, got 1.5"),
        (verdict_record("v1_0", float("nan")), "NaN is not a number"),
        (verdict_record("v1_0", True), "score must be .* got True"),
        (verdict_record("v1_0", 1).replace('"round": 0', '"round": "0"'), "round must be int, got '0'"),
    ],
)
def test_unreadable_verdicts(serve: Callable[..., Server], tmp_path: Path, line: str, said: str) -> None:
    write_answers(tmp_path, [answer_record("v1_0", "t")])
    (tmp_path / "verdicts.jsonl").write_text(line)
    with pytest.raises(ValueError, match=said):
        read_verdicts(tmp_path)
    with pytest.raises(ValueError, match=said):
        judge_run(tmp_path, judge_at(serve()), progress=False)
    assert (tmp_path / "verdicts.jsonl").read_text() == line


@pytest.mark.parametrize("options", [{"rounds": 0}, {"concurrency": 0}, {"rounds": True}, {"concurrency": 1.5}])
def test_bad_numbers(tmp_path: Path, options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
        judge_run(tmp_path, Judge("m", "http://127.0.0.1/v1"), progress=False, **options)


def test_verdicts_of_a_judge(tmp_path: Path) -> None:
    assert read_verdicts(tmp_path).scores == {}
    assert read_verdicts(tmp_path).judge is None
    rows = [
        verdict_record("v1_0", None),
        verdict_record("v1_0", 0.2, round=1),
        verdict_record("v1_0", 0.6, round=0),  # replaces the failure
        verdict_record("v1_0", None, round=1),  # a failure replaces nothing
        verdict_record("v1_0", 1.0, round=2),
        verdict_record("v1_1", 0.3),
        verdict_record("v1_1", None, round=1),
        verdict_record("v1_1", None, round=1),
        verdict_record("v1_2", None),
        verdict_record("v1_0", 0.0, text="other words"),
    ]
    (tmp_path / "verdicts.jsonl").write_text("".join(rows))
    verdicts = read_verdicts(tmp_path)
    assert verdicts.scores == {
        ("v1_0", "t"): pytest.approx(0.6),
        ("v1_1", "t"): 0.3,
        ("v1_0", "other words"): 0.0,
    }
    assert verdicts.errors.total() == 2

    (tmp_path / "verdicts.jsonl").write_text("".join(rows) + verdict_record("v1_0", 0.9, judge="another"))
    with pytest.raises(ValueError, match="choose one of another, marker"):
        read_verdicts(tmp_path)
    assert read_verdicts(tmp_path, "another").scores == {("v1_0", "t"): 0.9}
    assert read_verdicts(tmp_path, "marker").scores == verdicts.scores
    with pytest.raises(ValueError, match=r"judge must be one of another, marker .* got 'third'"):
        read_verdicts(tmp_path, "third")
