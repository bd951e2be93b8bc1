"""The tasks by name."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustrs import validation
from clustrs.evaluation.task import Task
from clustrs.evaluation.tasks import custom, mmvet, scenes, scienceqa

__all__ = ["fingerprint", "get_task", "list_tasks"]

_tasks: dict[str, Callable[..., Task]] = {
    "custom": custom.load,
    "mmvet": mmvet.load,
    "scenes": scenes.load,
    "scienceqa": scienceqa.load,
}


def list_tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(_tasks)


def get_task(name: str, data: str | os.PathLike[str] | None = None, limit: int | None = None, **options: Any) -> Task:
    """A task by name. `data` is the folder (or file) with its questions; `limit` keeps the first so many of them."""
    if name not in _tasks:
        near = validation.nearest(name, _tasks)
        raise ValueError(f"unknown task {name!r}{near}: give one of {', '.join(list_tasks())}")
    if data is not None and not isinstance(data, str | os.PathLike):
        raise ValueError(f"data={data!r}: give the path of a folder")
    if limit is not None:
        validation.integer("limit", limit, 1)
    build = _tasks[name]
    known = [option for option in inspect.signature(build).parameters if option not in ("data", "limit")]
    for option in options:
        if option not in known:
            accepted = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"task {name} has no option {option!r}{validation.nearest(option, known)}: {accepted}")
    return build(None if data is None else path_of(data), limit, **options)


def path_of(data: str | os.PathLike[str]) -> Path:
    """A path that the system can look at; whether there is something is for the task to say."""
    try:
        path = Path(data).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that is not known
        raise ValueError(f"data={str(data)!r}: {getattr(error, 'strerror', error)}: give a folder") from None
    return path


def fingerprint(task: Task) -> str:
    """SHA-256 of the questions, their images' names and the answers: the same on every machine."""
    rows = [[item.id, item.image, item.question, item.answer] for item in task.items]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
