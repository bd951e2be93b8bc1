"""Questions and images from files of users, which may be wrong in any way, and from the Hugging Face hub."""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar

from PIL import Image

from clustrs.corruptions.images import ImageTooLarge, check_size, first_sentence, open_image
from clustrs.evaluation.tasks import Item, has_surrogates, parse_json, read_text

K = TypeVar("K")


@dataclass(frozen=True)
class Entry:
    """Entry of a file, which must be an object; `where` names file and entry in messages."""

    where: str
    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.fields, dict):
            raise ValueError(f"{self.where}: expected a JSON object, got {reprlib.repr(self.fields)}")

    def wrong(self, key: str, accepted: str) -> ValueError:
        found = reprlib.repr(self.fields[key]) if key in self.fields else "nothing"
        return ValueError(f"{self.where}: {key} must be {accepted}, got {found}")

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not is_text(value):
            raise self.wrong(key, "a string that is not empty")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.fields.get(key)
        if not (isinstance(value, list) and value and all(map(is_text, value))):
            raise self.wrong(key, "a list of strings, none empty")
        return tuple(value)

    def name(self, key: str) -> str:
        value = self.fields.get(key)
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else self.text(key)

    def image(self, key: str) -> str:
        if leaves(self.text(key)):
            raise self.wrong(key, "a path inside the folder, neither absolute nor with '..'")
        return self.text(key)


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not has_surrogates(value)


def leaves(path: str) -> bool:
    """Check whether a path may lead out of its folder, here or on another system."""
    windows = PureWindowsPath(path)
    return bool(windows.anchor) or ".." in windows.parts


def gather(source: str, entries: Iterable[tuple[K, Entry]], make: Callable[[K, Entry], Item]) -> list[Item]:
    """Make the questions of numbered or named entries: at least one, each with an id of its own."""
    items: dict[str, Item] = {}
    for key, entry in entries:
        item = make(key, entry)
        if item.id in items:
            raise ValueError(f"{entry.where}: the id {item.id!r} occurs twice")
        items[item.id] = item
    if not items:
        raise ValueError(f"{source} has no questions")
    return list(items.values())


def read_official(data: Path, name: str, hub: str | None, advice: str) -> tuple[str, Any]:
    """Return the path and the content of the JSON file of that name in the folder `data`."""
    path = data / name
    if hub is not None:
        raise ValueError(f"pass either hub or data, got hub={hub!r} and data={str(data)!r}")
    if not path.is_file():
        what = f"there is no {name} in it" if data.is_dir() else "there is no such folder"
        raise ValueError(f"data={str(data)!r}: {what}: {advice}")
    return str(path), parse_json(read_text(path), str(path))


@dataclass(frozen=True)
class Folder:
    """Source of images by their paths in a folder. The folder may be a link, but nothing in it may lead out of it."""

    path: Path

    def open(self, name: str) -> Image.Image:
        return open_image(self.file(name))

    def file(self, name: str) -> Path:
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
        try:
            return self.file(image).is_file()
        except ValueError:
            return False


class Hub:
    """Source of questions and images: the rows of the test split of a dataset of the hub."""

    def __init__(self, hub: str, config: str | None, advice: str, make: Callable[[int, Entry], Item]) -> None:
        try:
            datasets = import_module("datasets")
        except ImportError:
            raise ValueError(f"{advice}; or install `datasets` to have them from the hub ({hub})") from None
        try:
            self.rows = datasets.load_dataset(hub, config, split="test")
            questions = list(self.rows.remove_columns(["image"]))
        except Exception as error:  # the network, the hub and the files' formats raise many kinds
            raise ValueError(f"hub {hub!r} could not be loaded ({first_sentence(error)}): {advice}") from error
        numbered = ((number, Entry(f"hub {hub!r}, row {number}", row)) for number, row in enumerate(questions))
        self.items = gather(hub, numbered, make)
        self.indices = {item.image: index for index, item in enumerate(self.items)}

    def open(self, name: str) -> Image.Image:
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


class Illustrated:
    scale = 100.0

    def __init__(self, items: Sequence[Item], images: Folder | Hub) -> None:
        self.items = items
        self.images = images

    def open(self, image: str) -> Image.Image:
        return self.images.open(image)

    def file(self, image: str) -> Path | None:
        """Return the file of an image; None if it has none of its own."""
        return self.images.file(image) if isinstance(self.images, Folder) else None
