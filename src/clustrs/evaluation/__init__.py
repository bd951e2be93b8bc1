"""Evaluation: tasks, resumable runs, judges, metrics and reports.

from clustrs.evaluation import Config, expand_methods, load_run, run

run(Config(task="scenes", model="mini-llava", methods=expand_methods(["none", "clustrs"], [16])), "runs/mine")
load_run("runs/mine").scores  # methods, corruptions, seeds, questions
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods
    from clustrs.evaluation.judge import Judge, judge_run
    from clustrs.evaluation.results import load_run
    from clustrs.evaluation.runner import RunSummary, get_engine, run
    from clustrs.evaluation.tasks import Item, Task, get_task, list_tasks, register_task

_MODULES = {
    "config": ("Config", "expand_corruptions", "expand_methods"),
    "judge": ("Judge", "judge_run"),
    "results": ("load_run",),
    "runner": ("RunSummary", "get_engine", "run"),
    "tasks": ("Item", "Task", "get_task", "list_tasks", "register_task"),
}
__all__ = ["Config", "Item", "Judge", "RunSummary", "Task", "expand_corruptions", "expand_methods", "get_engine"]
__all__ += ["get_task", "judge_run", "list_tasks", "load_run", "register_task", "run"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some need torch and transformers."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
