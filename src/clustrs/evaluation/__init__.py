"""Tasks, runs, judges, and what is made of their answers.

from clustrs.evaluation import Config, expand_methods, run

run(Config(task="scenes", model="mini-llava", methods=expand_methods(["none", "clustrs"], [16])), "runs/mine")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods
    from clustrs.evaluation.engines import get_engine
    from clustrs.evaluation.runner import RunSummary, run
    from clustrs.evaluation.tasks import get_task, list_tasks, register_task

__all__ = [
    "Config",
    "RunSummary",
    "expand_corruptions",
    "expand_methods",
    "get_engine",
    "get_task",
    "list_tasks",
    "register_task",
    "run",
]

_MODULES = {
    "Config": "config",
    "RunSummary": "runner",
    "expand_corruptions": "config",
    "expand_methods": "config",
    "get_engine": "engines",
    "get_task": "tasks",
    "list_tasks": "tasks",
    "register_task": "tasks",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    """Import what is used, when it is used: some of it needs torch and transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
