"""The examples in the docstrings of the public modules are run."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["config", "judge", "metrics", "runner", "tasks"])
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustrs.evaluation.tasks._registered", {})
    module = import_module(f"clustrs.evaluation.{name}")
    result = doctest.testmod(module, extraglobs={"folder": tmp_path})
    assert result.attempted > 0
    assert result.failed == 0
