"""Tasks of other packages: registered in Python, or offered by an entry point."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustrs import get_task, list_tasks, register_task
from clustrs.evaluation.tasks import BUILT_IN, OWNERS
from clustrs_models import scenes

MODULE = """
from clustrs_models.scenes import load as scenes

def load(data, limit, easy=False):
    task = scenes(None, limit)
    task.name = f"scenes, easy: {easy}"
    return task
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustrs.evaluation.tasks._registered", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a package with these entry points where Python finds it."""

    def install(module: str = MODULE, **points: str) -> None:
        (tmp_path / "somebodys_tasks.py").write_text(module)
        information = tmp_path / "somebodys_tasks-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-tasks\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (information / "entry_points.txt").write_text(f"[clustrs.tasks]\n{lines}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "somebodys_tasks", raising=False)

    return install


def test_an_entry_point_is_a_task(install: Callable[..., None], run: Any, tmp_path: Path) -> None:
    install(quiz="somebodys_tasks:load")
    assert list_tasks() == sorted([*BUILT_IN, *OWNERS, "quiz"])
    assert "somebodys_tasks" not in sys.modules
    task = get_task("quiz", limit=3, easy=True)
    assert (task.name, len(task.items)) == ("scenes, easy: True", 3)
    with pytest.raises(ValueError, match=r"task quiz has no option 'esy'.*did you mean 'easy'"):
        get_task("quiz", esy=True)
    words = ("--methods", "none", "--limit", 2, "--quiet", "-o", tmp_path / "run")
    assert run("eval", "--task", "quiz", *words)[0] == 0


@pytest.mark.parametrize(
    ("module", "value", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "somebodys_tasks:load", "failed \\(RuntimeError: two lines"),
        (MODULE, "somebodys_tasks:nothing", "failed \\(AttributeError"),
        (MODULE, "no_such_module:load", "failed \\(ModuleNotFoundError"),
        ("load = 3", "somebodys_tasks:load", "expected a function that loads a task, got 3"),
    ],
)
def test_a_broken_entry_point_is_named(install: Callable[..., None], module: str, value: str, message: str) -> None:
    install(module, quiz=value)
    assert get_task("scenes", limit=1).items  # the others are not touched by it
    with pytest.raises(ValueError, match=f"entry point quiz = .* of somebodys-tasks.*{message}") as caught:
        get_task("quiz")
    assert "\n" not in str(caught.value)


def test_what_a_task_lacks_is_named(install: Callable[..., None], run: Any, tmp_path: Path) -> None:
    body = (
        "class Quiz:\n    name, items, max_new_tokens, judged = 'quiz', [], 4, False\n    def open(self, image): ...\n"
    )
    install(f"{body}def load(data, limit):\n    return Quiz()\n", quiz="somebodys_tasks:load")
    with pytest.raises(ValueError, match=r"task 'quiz' lacks scale, score \(a task must have name, items, .*\)$"):
        get_task("quiz")
    status, _, printed = run("eval", "--task", "quiz", "--methods", "none", "--quiet", "-o", tmp_path / "run")
    assert status == 2
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("clustrs: task 'quiz' lacks scale, score")


def test_an_entry_point_cannot_take_a_name(install: Callable[..., None]) -> None:
    install(scenes="somebodys_tasks:load")
    warned = "a plugin is left out: .* of somebodys-tasks .*: the name 'scenes' is taken"
    with pytest.warns(RuntimeWarning, match=warned):
        assert list_tasks().count("scenes") == 1
    with pytest.warns(RuntimeWarning, match=warned):
        assert get_task("scenes", limit=1).name == "scenes"


def test_registering() -> None:
    def load(data: Path | None, limit: int | None) -> scenes.Scenes:
        return scenes.load(limit=1)

    register_task("quiz")(load)
    register_task("quiz")(load)  # a notebook cell that is run twice
    assert "quiz" in list_tasks()
    assert len(get_task("quiz").items) == 1

    def other(data: Path | None, limit: int | None) -> scenes.Scenes:
        return scenes.load(limit=2)

    other.__module__ = "somebody_else"
    for name in ("quiz", "scenes"):
        with pytest.raises(ValueError, match=f"a task named '{name}' is registered already"):
            register_task(name)(other)
    with pytest.raises(ValueError, match="name of a task must be a string that is not empty, got ''"):
        register_task("")
