"""The task `custom`: a user's questions in a file of JSON lines beside its images, which may be wrong in any way."""

import re
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from string import ascii_uppercase
from typing import Any, TypeVar

from PIL import Image

from clustrs import validation
from clustrs.corruptions.images import open_image
from clustrs.evaluation.tasks import Item, has_surrogates, task_info
from clustrs.validation import parse_json, read_text

K = TypeVar("K")
LETTERS = tuple("ABCDE")
INSTRUCTION = "Answer with the option's letter from the given choices directly."
NEW_TOKENS = {"exact": 32, "contains": 128, "choice": 16, "judged": 1024}  # tokens of the longest useful answer


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


class Illustrated:
    """Questions, and their images from a folder or from another object with a method `open(name)`."""

    scale = 100.0

    def __init__(self, items: Sequence[Item], images: Any) -> None:
        self.items = items
        self.images = images

    def open(self, image: str) -> Image.Image:
        opened: Image.Image = self.images.open(image)
        return opened

    def file(self, image: str) -> Path | None:
        """Return the file of an image; None if it has none of its own."""
        return self.images.file(image) if isinstance(self.images, Folder) else None


def asked(question: str, choices: Sequence[str] = ()) -> str:
    """Return what LLaVA sends for a question: without the image's placeholder, with choices and the instruction."""
    lines = [question, *(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))]
    return bare("\n".join(lines)) + "\n" + INSTRUCTION


def bare(text: str) -> str:
    return text.replace("<image>", "").strip()


def chosen(text: str, letters: Sequence[str] = LETTERS) -> str | None:
    """Return the letter that an answer names: alone, before ". ", or in a single "The answer is X" and a character."""
    text = text.strip()
    if text in letters:
        return text
    if text[:1] in letters and text[1:3] == ". ":
        return text[0]
    named = re.findall(r"The answer is ([A-Z]).", text)
    return named[0] if len(named) == 1 else None


def plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return text.rstrip(" .,;:!?") or text


def occurs(answer: str, text: str) -> bool:
    """Check whether an answer occurs in a text as whole words; a number not within another, nor without its minus."""
    answer = plain(answer)
    before = r"(?<!\d[.,])(?<!\W[-\u2212])(?<!^[-\u2212])" if answer[0].isdigit() else ""
    after = r"(?![.,]\d)" if answer[-1].isdigit() else ""
    return re.search(rf"(?<!\w){before}{re.escape(answer)}(?!\w){after}", plain(text)) is not None


class Custom(Illustrated):
    """Task of a user's questions, with one way of scoring for all."""

    name = "custom"

    def __init__(self, items: Sequence[Item], images: Folder, scoring: str) -> None:
        super().__init__(items, images)
        self.scoring = scoring
        self.max_new_tokens = NEW_TOKENS[scoring]
        self.judged = scoring == "judged"

    def score(self, item: Item, text: str) -> float | None:
        if self.scoring == "judged":
            return None
        if self.scoring == "choice":
            return float(chosen(text, item.extra["letters"]) == item.answer)
        if self.scoring == "contains":
            return float(any(occurs(answer, text) for answer in item.extra["accepted"]))
        return float(any(plain(answer) == plain(text) for answer in item.extra["accepted"]))


@task_info(
    measures="your own questions",
    scoring="--set-task scoring=exact, contains, choice or judged",
    data="--data FILE or FOLDER: questions.jsonl and its images",
)
def load(data: Path | None, limit: int | None = None, scoring: str = "exact") -> Custom:
    """Load a file of JSON lines, or a folder with a questions.jsonl; the images lie beside it or below."""
    validation.choice("scoring", scoring, NEW_TOKENS)
    path = None if data is None else data / "questions.jsonl" if data.is_dir() else data
    if path is None or not path.is_file():
        found = "None" if path is None else f"{str(data)!r}: there is no file {path.name}"
        raise ValueError(f"data must be a file of JSON lines, or a folder with a questions.jsonl, got {found}")
    lines = [(n, f"{path}, line {n}", line) for n, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    entries = ((number, Entry(where, parse_json(line, where))) for number, where, line in lines)
    return Custom(gather(str(path), entries, partial(from_line, scoring))[:limit], Folder(path.parent), scoring)


def from_line(scoring: str, number: int, entry: Entry) -> Item:
    """Make the question of a line; without an id, the line number serves."""
    kinds: tuple[str, ...] = ()
    if entry.fields.get("kinds") is not None:
        if entry.fields.get("kind") is not None:
            raise entry.wrong("kind", "absent where there are kinds")
        kinds = tuple(dict.fromkeys(entry.texts("kinds"))) if entry.fields["kinds"] != [] else ()
    elif entry.fields.get("kind") is not None:
        kinds = (entry.text("kind"),)
    key = f"line-{number}" if entry.fields.get("id") is None else entry.name("id")
    image, question = entry.image("image"), entry.text("question")
    if scoring == "choice":
        choices = entry.texts("choices")
        if not 2 <= len(choices) <= len(ascii_uppercase):
            raise entry.wrong("choices", f"2 to {len(ascii_uppercase)} strings")
        answer, own = entry.text("answer"), ascii_uppercase[: len(choices)]
        meant = [letter for letter, choice in zip(own, choices, strict=True) if answer in (letter, choice)]
        if len(meant) != 1:
            raise entry.wrong("answer", f"one letter of {own}, or exactly one of the choices in full")
        letters = tuple(ascii_uppercase[: max(len(choices), len(LETTERS))])
        return Item(key, image, asked(question, choices), meant[0], kinds, {"letters": letters})
    if "choices" in entry.fields:
        raise ValueError(f"{entry.where}: choices need scoring='choice', got scoring={scoring!r}")
    accepted = entry.texts("answer") if isinstance(entry.fields.get("answer"), list) else (entry.text("answer"),)
    return Item(key, image, question, "<OR>".join(accepted), kinds, {"accepted": accepted})
