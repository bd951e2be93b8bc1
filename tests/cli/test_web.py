"""`clustrs app`: its options reach the page, and a missing Gradio is told in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustrs import app
from clustrs.embedded import DEFAULT
from clustrs.validation import LoadOptions

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(vars(app), "launch", lambda *given, **named: calls.append((*given, named)))
    return calls


def test_defaults_stay_on_this_machine(run: Run, launched: list[tuple[Any, ...]]) -> None:
    assert run("app")[0] == 0
    named = {"browser": True, "load": LoadOptions(), "pruning": None}
    assert launched == [(DEFAULT, Path("runs"), "127.0.0.1", 7860, named)]


def test_options_reach_the_page(run: Run, launched: list[tuple[Any, ...]]) -> None:
    words = ["--model", "m", "--runs", "mine", "--host", "0.0.0.0", "--port", "8000", "--no-browser", "--device", "cpu"]
    assert run("app", *words)[0] == 0
    named = {"browser": False, "load": LoadOptions(device="cpu"), "pruning": None}
    assert launched == [("m", Path("mine"), "0.0.0.0", 8000, named)]


def test_port_that_cannot_be_is_refused(run: Run, launched: list[tuple[Any, ...]]) -> None:
    code, _, error = run("app", "--port", "70000")
    assert code == 2
    assert "--port" in error
    assert launched == []


def test_missing_gradio_is_told_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "find_spec", lambda name: None)
    assert run("app") == (
        2,
        "",
        "clustrs: gradio is not installed: pip install './packages/clustrs-models' '.[app]' (in a clone of ClustRS)\n",
    )
