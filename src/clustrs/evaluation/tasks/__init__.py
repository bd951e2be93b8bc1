"""Tasks: their contract, the registry, and the checksums of what they ask about."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Protocol, TypeVar

from PIL import Image

from clustrs import validation
from clustrs.corruptions.images import open_regular
from clustrs.embedded import EMBEDDED, INSTALL
from clustrs.plugins import describe, leave_out, load_entry, plugin_entries

INFO = "task_info"
"""Attribute of a task's loading function that holds its `TaskInfo`."""
L = TypeVar("L", bound=Callable[..., Any])


@dataclass(frozen=True)
class Item:
    """One question. `image` names the image (several questions may share one); `question` is what the model is
    asked, word for word, without a placeholder for the image; `kinds` are the groups in which it is counted."""

    id: str
    image: str
    question: str
    answer: str
    kinds: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Data, prompt, parse rule and score.

    A task whose images are files may also have `file(image) -> Path | None`: then the checksums of a run are those of
    the files, and images need not be decoded for them.
    """

    name: str
    items: Sequence[Item]
    max_new_tokens: int
    """The longest answer that makes sense."""
    judged: bool
    """Whether scores come from a judge, in a step of its own."""
    scale: float
    """What a mean score is multiplied with in reports: 100 for accuracy in per cent, 1 or 100 for a judge's score."""

    def open(self, image: str) -> Image.Image:
        """The image in RGB; a ValueError says what is wrong with it."""
        ...

    def score(self, item: Item, text: str) -> float | None:
        """From 0 to 1; None when a judge has to say."""
        ...


def normalize_answer(text: str) -> str:
    """Drop what does not count in a short answer: case, space around it, a full stop."""
    return text.strip().lower().removesuffix(".").rstrip()


@dataclass(frozen=True)
class TaskInfo:
    """Description of a task for `clustrs tasks`: what it asks, how answers are scored, what files it needs."""

    measures: str = ""
    scoring: str = ""
    data: str = ""


def task_info(*, measures: str, scoring: str, data: str) -> Callable[[L], L]:
    """Decorate the function that loads a task with its description."""

    def describe(load: L) -> L:
        setattr(load, INFO, TaskInfo(measures, scoring, data))
        return load

    return describe


def info_of(load: Callable[..., Any]) -> TaskInfo:
    """Return the description of a task; without one, the first line of its function's docstring."""
    found = getattr(load, INFO, None)
    return found if isinstance(found, TaskInfo) else TaskInfo((load.__doc__ or "").strip().partition("\n")[0])


GROUP = "clustrs.tasks"
"""Of the entry points by which a package offers tasks: `name = "package.module:load"`."""
MEMBERS = ("name", "items", "max_new_tokens", "judged", "scale", "open", "score")
"""What every task has, see `Task`."""
BUILT_IN = ("custom", "mmvet", "scienceqa")
SAMPLE_TASKS = tuple(sorted({model.task for model in EMBEDDED}))
"""Tasks of the package clustrs-models; no other package can take their names."""

Loader = Callable[..., Task]
"""From the data's path (or None), a limit (or None) and the task's own options to the task."""

_registered: dict[str, Loader] = {}


def register_task(name: str) -> Callable[[L], L]:
    """Decorator: make `load(data, limit, **options)` known under a name.

    Registering a name again from the same module replaces it, so that a notebook cell can be run twice.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name={name!r}: give the task a name")

    def register(load: L) -> L:
        before = _registered.get(name)
        if name in (*BUILT_IN, *SAMPLE_TASKS) or (before is not None and before.__module__ != load.__module__):
            raise ValueError(f"a task named {name!r} is registered already: give another name")
        _registered[name] = load
        return load

    return register


def list_tasks() -> list[str]:
    """The names of all tasks. Nothing of other packages is imported for this."""
    return sorted({*BUILT_IN, *_registered, *_offered()})


def check_task(name: str) -> None:
    """A ValueError says which tasks there are, if this is none of them."""
    known = list_tasks()
    if name not in known:
        if name in SAMPLE_TASKS:
            raise ValueError(f"task {name!r} is in the package clustrs-models, which is not installed: {INSTALL}")
        raise ValueError(f"unknown task {name!r}{validation.nearest(name, known)}: give one of {', '.join(known)}")


def get_task(name: str, data: str | os.PathLike[str] | None = None, limit: int | None = None, **options: Any) -> Task:
    """A task by name. `data` is the folder (or file) with its questions; `limit` keeps the first so many of them."""
    build = _loader(name)
    if data is not None and not isinstance(data, str | os.PathLike):
        raise ValueError(f"data={data!r}: give the path of a folder")
    if limit is not None:
        validation.integer("limit", limit, 1)
    known = [option for option in inspect.signature(build).parameters if option not in ("data", "limit")]
    for option in options:
        if option not in known:
            accepted = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"task {name} has no option {option!r}{validation.nearest(option, known)}: {accepted}")
    task = build(None if data is None else _path(data), limit, **options)
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    if missing:
        raise ValueError(f"task {name!r} lacks {', '.join(missing)} (a task must have {', '.join(MEMBERS)})")
    return task


def describe_task(name: str) -> TaskInfo:
    """Describe a task by name; a plugin that fails is described by its error."""
    try:
        return info_of(_loader(name))
    except ValueError as error:
        return TaskInfo(f"not available: {error}")


def _offered() -> dict[str, EntryPoint]:
    """The entry points of installed packages by name; one that takes the name of another task is left out, aloud."""
    offered: dict[str, EntryPoint] = {}
    for point in plugin_entries(GROUP):
        owned = point.name not in SAMPLE_TASKS or (point.dist is not None and point.dist.name == "clustrs-models")
        if not owned or point.name in BUILT_IN or point.name in _registered or point.name in offered:
            leave_out(f"{describe(point)}: the name {point.name!r} is taken")
        else:
            offered[point.name] = point
    return offered


def _loader(name: str) -> Loader:
    if name in BUILT_IN:
        return import_module(f"clustrs.evaluation.tasks.{name}").load
    if name in _registered:
        return _registered[name]
    check_task(name)
    point = _offered()[name]
    build = load_entry(point)
    if not callable(build):
        raise ValueError(f"{describe(point)}: expected a function that loads a task, got {build!r}")
    return build


def _path(data: str | os.PathLike[str]) -> Path:
    """A path that the system can look at; whether there is something is for the task to say."""
    try:
        path = Path(data).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that is not known
        raise ValueError(f"data={str(data)!r}: {getattr(error, 'strerror', error)}: give a folder") from None
    return path


_known: dict[tuple[str, int, int], str] = {}


def file_checksum(path: Path) -> str:
    """The checksum of a file. Within a process, a file of the same size and time of change is read once."""
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _known:
        with open_regular(path) as file:
            _known[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _known[key]


def fingerprint(task: Task) -> str:
    """SHA-256 of the questions, their images' names and the answers: the same on every machine."""
    asked = [[item.id, item.image, item.question, item.answer] for item in task.items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def image_checksum(task: Task, name: str) -> str | None:
    """The checksum of an image's file, or of its pixels where the task has no files; None if it cannot be read.

    A task whose images are files has a method `file` that returns the path of one (or None).
    """
    locate = getattr(task, "file", None)
    try:
        path = locate(name) if locate is not None else None
        if path is not None:
            return file_checksum(path)
        image = task.open(name)
        digest = hashlib.sha256(f"{image.mode} {image.width} x {image.height} ".encode())
        digest.update(image.tobytes())
        return digest.hexdigest()
    except Exception:  # whatever is wrong with it is told when the image is opened to be asked about
        return None


def image_checksums(task: Task) -> dict[str, str | None]:
    """The checksum of every image that the task's questions are about."""
    return {name: image_checksum(task, name) for name in dict.fromkeys(item.image for item in task.items)}
