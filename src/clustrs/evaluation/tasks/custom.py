"""The task `custom`: a user's questions in a file of JSON lines beside its images."""

import re
import unicodedata
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import ascii_uppercase

from clustrs import validation
from clustrs.evaluation.tasks import Item, parse_json, read_text, task_info
from clustrs.evaluation.tasks.scienceqa import LETTERS, asked, chosen
from clustrs.evaluation.tasks.sources import Entry, Folder, Illustrated, gather

NEW_TOKENS = {"exact": 32, "contains": 128, "choice": 16, "judged": 1024}  # tokens of the longest useful answer


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
