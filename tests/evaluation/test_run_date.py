"""The day a run was started: stored once, shown by its report, and no reason to refuse a resume."""

import json
from pathlib import Path

import pytest

from clustrs.evaluation.config import Config
from clustrs.evaluation.store import RunFolder, today


def test_a_run_keeps_the_day_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(task="scenes", model="mini-llava", methods=({"name": "none", "keep": 1.0},))
    for seconds in ("1767225600", "1767400000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
        with RunFolder(tmp_path).opened(config, {"items": 1}, ["q"], dict):
            pass
        assert json.loads((tmp_path / "config.json").read_text())["started"] == "2026-01-01"
    assert today() == "2026-01-03"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(ValueError, match="SOURCE_DATE_EPOCH='soon': give the seconds since 1970, an integer"):
        today()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    with (
        pytest.raises(ValueError, match="items: was 1, now 2"),
        RunFolder(tmp_path).opened(config, {"items": 2}, ["q"], dict),
    ):
        pass


def test_now_is_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    year, month, day = today().split("-")
    assert (len(year), len(month), len(day)) == (4, 2, 2)
