"""Sources of questions and images: files of users, which may be wrong in any way, and the hub."""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path, PureWindowsPath
from typing import Any

from PIL import Image

from clustrs.corruptions.images import ImageTooLarge, check_size, first_sentence, open_image, open_regular
from clustrs.evaluation.tasks import Item

ImageSource = Callable[[str], Image.Image]
"""Function from an image's name to the image, which raises a ValueError if it cannot be read."""


class Illustrated:
    """Base class of tasks with an `ImageSource`."""

    def __init__(self, items: Sequence[Item], images: ImageSource) -> None:
        self.items = items
        self.images = images

    def open(self, image: str) -> Image.Image:
        """Open an image in RGB."""
        return self.images(image)

    def file(self, image: str) -> Path | None:
        """Return the file of an image; None if it has none of its own."""
        return self.images.file(image) if isinstance(self.images, Folder) else None


@dataclass(frozen=True)
class Entry:
    """Entry of a file; `where` names file and entry in messages."""

    where: str
    fields: Mapping[str, Any]

    def wrong(self, key: str, accepted: str) -> ValueError:
        """Return an error about one field."""
        found = reprlib.repr(self.fields[key]) if key in self.fields else "nothing"
        return ValueError(f"{self.where}: {key} must be {accepted}, got {found}")

    def text(self, key: str) -> str:
        """Return a string that is not empty."""
        value = self.fields.get(key)
        if not is_text(value):
            raise self.wrong(key, "a string that is not empty")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, at least one."""
        value = self.fields.get(key)
        if not (isinstance(value, list) and value and all(map(is_text, value))):
            raise self.wrong(key, "a list of strings, none empty")
        return tuple(value)

    def kinds(self, key: str) -> tuple[str, ...]:
        """Return a list of groups, each once."""
        return tuple(dict.fromkeys(self.texts(key)))

    def name(self, key: str) -> str:
        """Return a string or an integer, as a string."""
        value = self.fields.get(key)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(key)

    def image(self, key: str) -> str:
        """Return the path of an image below the task's folder."""
        if leaves(self.text(key)):
            raise self.wrong(key, "a path inside the folder, neither absolute nor with '..'")
        return self.text(key)


def is_text(value: Any) -> bool:
    """Check for a string that is not empty and has no half characters."""
    return isinstance(value, str) and bool(value.strip()) and not has_half_characters(value)


def has_half_characters(text: str) -> bool:
    """Check for lone surrogates, which JSON's escapes can hold, but no tokenizer and no UTF-8 file."""
    return re.search(r"[\ud800-\udfff]", text) is not None


def leaves(path: str) -> bool:
    """Check whether a path may lead out of its folder, here or on another system."""
    windows = PureWindowsPath(path)
    return bool(windows.anchor) or ".." in windows.parts


def entry_of(where: str, value: Any) -> Entry:
    """Make an entry of a value that must be an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {reprlib.repr(value)}")
    return Entry(where, value)


def gather(source: str, pairs: Iterable[tuple[Entry, Item]]) -> list[Item]:
    """Collect the questions: at least one, each with an id of its own."""
    items: dict[str, Item] = {}
    for entry, item in pairs:
        if item.id in items:
            raise ValueError(f"{entry.where}: the id {item.id!r} occurs twice")
        items[item.id] = item
    if not items:
        raise ValueError(f"{source} has no questions")
    return list(items.values())


def read_text(path: Path) -> str:
    """Read a text file in UTF-8."""
    try:
        with TextIOWrapper(open_regular(path), "utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be a text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; no key may occur twice in an object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if key in made:
                raise ValueError(f"the key {reprlib.repr(key)} occurs twice")
            made[key] = value
        return made

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}, line {error.lineno} column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def official_file(data: Path, name: str, advice: str) -> Path:
    """Return the file of that name in the folder `data`."""
    if not (data / name).is_file():
        what = f"there is no {name} in it" if data.is_dir() else "there is no such folder"
        raise ValueError(f"data={str(data)!r}: {what}: {advice}")
    return data / name


@dataclass(frozen=True)
class Folder:
    """Source of images by their paths in a folder. The folder may be a link, but nothing in it may lead out of it."""

    path: Path

    def __call__(self, name: str) -> Image.Image:
        return open_image(self.file(name))

    def file(self, name: str) -> Path:
        """Return the path of an image."""
        if leaves(name):
            raise ValueError(f"image {reprlib.repr(name)}: it lies outside of the task's folder")
        try:
            file = self.path / name
            if not file.resolve().is_relative_to(self.path.resolve()):
                raise ValueError(f"image {reprlib.repr(name)}: it is a link that leads out of the task's folder")
            file.is_file()
        except (OSError, RuntimeError) as error:  # a name that is too long, a link to itself
            raise ValueError(f"image {reprlib.repr(name)}: {getattr(error, 'strerror', error)}") from None
        return file

    def has(self, image: str) -> bool:
        """Check whether there is such a file."""
        try:
            return self.file(image).is_file()
        except ValueError:
            return False


@dataclass(frozen=True)
class Hub:
    """Source of images in the rows of a dataset of the Hugging Face hub, by name."""

    rows: Any
    indices: Mapping[str, int]

    def __call__(self, name: str) -> Image.Image:
        if name not in self.indices:
            raise ValueError(f"image {name!r}: the dataset has no such image")
        try:
            image: Image.Image | None = self.rows[self.indices[name]]["image"]
            if image is not None:
                check_size(f"image {name!r}", image.size)
                return image.convert("RGB")
        except ImageTooLarge:
            raise
        except Exception as error:  # damaged files make the decoders raise many kinds
            raise ValueError(f"image {name!r} could not be read: {first_sentence(error)}") from error
        raise ValueError(f"image {name!r}: its row in the dataset has none")


def hub_rows(hub: str, config: str | None, advice: str) -> tuple[Any, list[Entry]]:
    """Return the test split of a dataset, and its rows without the images."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ValueError(f"{advice}; or install `datasets` to have them from the hub ({hub})") from None
    try:
        rows = datasets.load_dataset(hub, config, split="test")
        questions = list(rows.remove_columns(["image"]))
    except Exception as error:  # the network, the hub and the files' formats raise many kinds
        raise ValueError(f"hub {hub!r} could not be loaded ({first_sentence(error)}): {advice}") from error
    return rows, [Entry(f"hub {hub!r}, row {number}", row) for number, row in enumerate(questions)]
