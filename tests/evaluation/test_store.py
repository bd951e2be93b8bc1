"""The files of a run: lines that a killed process left half done, and the day the run was started."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clustrs.evaluation.config import Config
from clustrs.evaluation.store import RunFolder, drop_torn_line, lines, raw_lines, today
from clustrs.evaluation.tasks import get_task

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("torn", [b"", b"{", b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": 1}\n' * 20_000], ids=len)
def test_a_torn_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(whole + torn)
    assert [line for _, line in raw_lines(path)] == whole.splitlines(keepends=True)
    drop_torn_line(path)
    with path.open("ab") as file:
        file.write(b"{}\n")
    assert path.read_bytes() == whole + b"{}\n"


def test_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl' line 2: expected an object, got \[2\]"):
        list(lines(path))


def test_a_run_keeps_the_day_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(task="scenes", model="mini-llava", methods=({"name": "none", "keep": 1.0},))
    for seconds in ("1767225600", "1767400000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        with RunFolder(tmp_path, get_task("scenes", limit=1)).opened(config, {"items": 1}):
            pass
        assert json.loads((tmp_path / "config.json").read_text())["started"] == "2026-01-01"
    assert today() == "2026-01-03"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    with (
        pytest.raises(ValueError, match="items: was 1, now 2"),
        RunFolder(tmp_path, get_task("scenes", limit=1)).opened(config, {"items": 2}),
    ):
        pass


@pytest.mark.parametrize("given", ["soon", "", "-5", "1e9", " 5", "\u0665", "253402300800", "9" * 20, "9" * 5000])
def test_a_bad_date_is_one_line(given: str, monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", given)
    with pytest.raises(ValueError, match=r"SOURCE_DATE_EPOCH must be whole seconds since 1970, 0 to 25.*, got '"):
        today()
    status, _, printed = run("eval", "--task", "scenes", "--methods", "none", "-o", tmp_path / "run")
    assert (status, printed.count("\n")) == (2, 1)
    assert "SOURCE_DATE_EPOCH must be" in printed


def test_the_last_second_is_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "253402300799")
    assert today() == "9999-12-31"


def test_now_is_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    year, month, day = today().split("-")
    assert (len(year), len(month), len(day)) == (4, 2, 2)
