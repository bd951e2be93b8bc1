"""Tasks: their contract, the registry, the checksums of what they ask about, and the safe reading of their files.

A task is an object with the members of `Task`, made by a function ``load(data, limit, **options)``. Another package
offers one by an entry point of the group `clustrs.tasks` whose value is that function; a script or notebook registers
it with `register_task`.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Protocol, TypeVar

from PIL import Image

from clustrs import validation
from clustrs.embedded import INSTALL
from clustrs.plugins import describe, install_hint, leave_out, load_entry, plugin_entries
from clustrs.validation import open_regular

GROUP = "clustrs.tasks"  # group of the entry points by which a package offers tasks: `name = "package.module:load"`
MEMBERS = ("name", "items", "max_new_tokens", "judged", "scale", "open", "score")  # of every task, see `Task`
BUILT_IN = ("custom",)
SAMPLE_TASKS = ("clips", "describe", "photos", "photos-sentences", "scenes", "scenes-sentences")
PAPER_TASKS = ("mmvet", "scienceqa")
OWNERS = dict.fromkeys(SAMPLE_TASKS, "clustrs-models") | dict.fromkeys(PAPER_TASKS, "clustrs-paper")
INFO = "task_info"  # attribute of a task's loading function that holds its `TaskInfo`
L = TypeVar("L", bound=Callable[..., Any])


@dataclass(frozen=True)
class Item:
    """One question about one image.

    Args:
        id: Name of the question, unique in its task.
        image: Name of the image; several questions may share one.
        question: What the model is asked, verbatim, without a placeholder for the image.
        answer: The expected answer.
        kinds: Groups of questions in which reports count it.
        extra: Anything else that the task needs to score it.
    """

    id: str
    image: str
    question: str
    answer: str
    kinds: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Contract of a task: questions, their images, and a score for each answer.

    Subclass it, or write any class with these members. A task whose images are files may also have a method
    ``file(image) -> Path | None``: a run's checksums are then those of the files, and need not decode the images.
    A task about clips also has a method ``frames(image) -> Sequence[Image.Image]``: all frames go into the prompt and
    share one budget. Its `open` is then for people: the frames side by side.

    Attributes:
        name: Name of the task, as runs store it.
        items: The questions.
        max_new_tokens: Length of the longest useful answer, in tokens.
        judged: True if a judge scores the answers, in a step of its own; `score` then returns None.
        scale: Factor by which reports multiply mean scores: 100 for accuracy in percent.

    Examples:
        >>> class Colors(Task):
        ...     name, max_new_tokens, judged, scale = "colors", 4, False, 100.0
        ...     items = (Item("q1", "red.png", "Which color is it?", "red"),)
        ...
        ...     def open(self, image):
        ...         return Image.new("RGB", (336, 336), image.removesuffix(".png"))
        ...
        ...     def score(self, item, text):
        ...         return float(normalize_answer(text) == item.answer)
        >>> @register_task("colors")
        ... def load(data, limit):
        ...     return Colors()
        >>> task = get_task("colors")
        >>> task.score(task.items[0], "Red.")
        1.0
    """

    name: str
    items: Sequence[Item]
    max_new_tokens: int
    judged: bool
    scale: float

    def open(self, image: str) -> Image.Image:
        """Open an image.

        Args:
            image: Name of the image, from `Item.image`.

        Returns:
            The image in RGB.

        Raises:
            ValueError: The image cannot be read. Its questions count as failed, the run goes on.
        """
        ...

    def score(self, item: Item, text: str) -> float | None:
        """Score an answer.

        Args:
            item: The question.
            text: What the model answered.

        Returns:
            A score from 0 to 1, or None if a judge scores the answers.
        """
        ...


Loader = Callable[..., Task]  # from the data's path (or None), a limit (or None) and the task's own options
_registered: dict[str, Loader] = {}
_checksums: dict[tuple[str, int, int], str] = {}


@dataclass(frozen=True)
class TaskInfo:
    """Description of a task for `clustrs tasks`: what it asks, how answers are scored, what files it needs."""

    measures: str = ""
    scoring: str = ""
    data: str = ""


def task_info(*, measures: str, scoring: str, data: str) -> Callable[[L], L]:
    def decorate(load: L) -> L:
        setattr(load, INFO, TaskInfo(measures, scoring, data))
        return load

    return decorate


def normalize_answer(text: str) -> str:
    """Normalize a short answer: drop case, surrounding space and a full stop.

    >>> normalize_answer(" Red. ")
    'red'
    """
    return text.strip().lower().removesuffix(".").rstrip()


def register_task(name: str) -> Callable[[L], L]:
    """Register a function ``load(data, limit, **options)`` as a task; used as a decorator.

    Args:
        name: Name of the task; one that the same module registered before is replaced, for notebook cells.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ValueError: The name is empty or taken.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"name of a task must be a string that is not empty, got {name!r}")

    def register(load: L) -> L:
        before = _registered.get(name)
        if name in (*BUILT_IN, *OWNERS) or (before is not None and before.__module__ != load.__module__):
            raise ValueError(f"a task named {name!r} is registered already: choose another name")
        _registered[name] = load
        return load

    return register


def list_tasks() -> list[str]:
    """Return the names of all tasks, sorted; imports nothing of other packages."""
    return sorted({*BUILT_IN, *_registered, *_offered()})


def check_task(name: str) -> None:
    known = list_tasks()
    if name in OWNERS and name not in known:
        hint = install_hint("cli", package="clustrs-paper") if name in PAPER_TASKS else INSTALL
        raise ValueError(f"task {name!r} is in the package {OWNERS[name]}, which is not installed: {hint}")
    if name not in known:
        raise ValueError(f"unknown task {name!r}{validation.nearest(name, known)}: choose one of {', '.join(known)}")


def get_task(name: str, data: str | os.PathLike[str] | None = None, limit: int | None = None, **options: Any) -> Task:
    """Load a task.

    Args:
        name: Name of the task, see `list_tasks`.
        data: Folder or file with its questions; tasks that need none refuse it.
        limit: Number of questions to keep, from the first on.
        **options: Options of the task.

    Returns:
        The task.

    Raises:
        ValueError: The task is unknown, an argument is not valid, or the questions cannot be read.
    """
    build = _loader(name)
    if limit is not None:
        validation.integer("limit", limit, 1)
    known = [option for option in inspect.signature(build).parameters if option not in ("data", "limit")]
    for option in options:
        if option not in known:
            accepted = f"it has {', '.join(known) or 'none'}"
            raise ValueError(f"task {name} has no option {option!r}{validation.nearest(option, known)}: {accepted}")
    try:
        path = None if data is None else Path(data).expanduser()
        _ = path and path.exists()
    except (TypeError, OSError, RuntimeError) as error:  # a name that is too long, a home that is not known
        raise ValueError(f"data must be the path of a folder, got {data!r} ({error})") from None
    task = build(path, limit, **options)
    missing = [member for member in MEMBERS if not hasattr(task, member)]
    if missing:
        raise ValueError(f"task {name!r} lacks {', '.join(missing)} (a task must have {', '.join(MEMBERS)})")
    return task


def describe_task(name: str) -> TaskInfo:
    """Describe a task, by the first line of its function's docstring if it has no `task_info`; or say what fails."""
    try:
        load = _loader(name)
    except ValueError as error:
        return TaskInfo(f"not available: {error}")
    return getattr(load, INFO, None) or TaskInfo((load.__doc__ or "").strip().partition("\n")[0])


def _offered() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name; warns about one whose name is taken."""
    offered: dict[str, EntryPoint] = {}
    for point in plugin_entries(GROUP):
        package = point.dist.name if point.dist else None
        if OWNERS.get(point.name, package) != package or point.name in (*BUILT_IN, *_registered, *offered):
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


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file. Within a process, a file of the same size and time of change is read once."""
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _checksums:
        with open_regular(path) as file:
            _checksums[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _checksums[key]


def fingerprint(task: Task) -> str:
    """Return the SHA-256 of the questions, their images' names and the answers: the same on every machine."""
    asked = [[item.id, item.image, item.question, item.answer] for item in task.items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def image_checksum(task: Task, name: str) -> str | None:
    """Return the SHA-256 of an image's file, or of its pixels if the task has no files; None if it cannot be read."""
    try:
        path = task.file(name) if hasattr(task, "file") else None
        if path is not None:
            return file_checksum(path)
        image = task.open(name)
        size = f"{image.mode} {image.width} x {image.height} "
        return hashlib.sha256(size.encode() + image.tobytes()).hexdigest()
    except Exception:  # the error is reported when the image is opened for its questions
        return None


def has_surrogates(text: str) -> bool:
    """Check for lone surrogates, which JSON's escapes can hold, but no tokenizer and no UTF-8 file."""
    return re.search(r"[\ud800-\udfff]", text) is not None
