"""The task `custom`: a user's questions in a file of JSON lines beside its images."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from clustrs import validation
from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.scienceqa import LETTERS, asked, chosen, with_choices
from clustrs.evaluation.tasks.sources import (
    Entry,
    Folder,
    Illustrated,
    ImageSource,
    entry_of,
    gather,
    parse_json,
    read_text,
)

NEW_TOKENS = {"exact": 32, "contains": 128, "choice": 16, "judged": 1024}
"""Ways of scoring, and the length of the longest useful answer with each, in tokens."""


def plain(text: str) -> str:
    """Normalize a text: drop case, spacing and punctuation at its end."""
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
    scale = 100.0

    def __init__(self, items: Sequence[Item], images: ImageSource, scoring: str) -> None:
        super().__init__(items, images)
        self.scoring = scoring
        self.max_new_tokens = NEW_TOKENS[scoring]
        self.judged = scoring == "judged"

    def score(self, item: Item, text: str) -> float | None:
        """Return 1 if the text gives any of the accepted answers."""
        if self.scoring == "judged":
            return None
        if self.scoring == "choice":
            return float(chosen(text, item.extra["letters"]) == item.answer)
        accepted = item.extra["accepted"]
        if self.scoring == "contains":
            return float(any(occurs(answer, text) for answer in accepted))
        return float(any(plain(answer) == plain(text) for answer in accepted))


@task_info(
    measures="your own questions",
    scoring="--set-task scoring=exact, contains, choice or judged",
    data="--data FILE or FOLDER: questions.jsonl and its images",
)
def load(data: Path | None, limit: int | None = None, scoring: str = "exact") -> Custom:
    """Load a file of JSON lines, or a folder with a questions.jsonl; the images lie beside it or below."""
    validation.choice("scoring", scoring, NEW_TOKENS)
    if data is None:
        raise ValueError("data must be a file of JSON lines, or a folder with a questions.jsonl, got None")
    path = data / "questions.jsonl" if data.is_dir() else data
    if not path.is_file():
        raise ValueError(
            f"data must be a file of JSON lines or its folder, got {str(data)!r}: there is no file {path.name}"
        )
    lines = enumerate(read_text(path).split("\n"), 1)
    numbered = [(number, f"{path}, line {number}", line) for number, line in lines if line.strip()]
    records = [(number, entry_of(where, parse_json(line, where))) for number, where, line in numbered]
    items = gather(str(path), ((entry, from_line(number, entry, scoring)) for number, entry in records))
    return Custom(items[:limit], Folder(path.parent), scoring)


def from_line(number: int, entry: Entry, scoring: str) -> Item:
    """Make the question of a line; without an id, the line number serves."""
    key = f"line-{number}" if entry.fields.get("id") is None else entry.name("id")
    image, question, kinds = entry.image("image"), entry.text("question"), kinds_of(entry)
    if scoring == "choice":
        choices = entry.texts("choices")
        if not 2 <= len(choices) <= len(ascii_uppercase):
            raise entry.wrong("choices", f"2 to {len(ascii_uppercase)} strings")
        letters = tuple(ascii_uppercase[: max(len(choices), len(LETTERS))])
        answer = right_letter(entry, choices)
        return Item(key, image, asked(with_choices(question, choices)), answer, kinds, {"letters": letters})
    if "choices" in entry.fields:
        raise ValueError(f"{entry.where}: choices need scoring='choice', got scoring={scoring!r}")
    accepted = entry.texts("answer") if isinstance(entry.fields.get("answer"), list) else (entry.text("answer"),)
    return Item(key, image, question, "<OR>".join(accepted), kinds, {"accepted": accepted})


def right_letter(entry: Entry, choices: Sequence[str]) -> str:
    """Return the letter of the right choice, which is given as a letter or in full."""
    answer = entry.text("answer")
    letters = ascii_uppercase[: len(choices)]
    meant = {letter for letter, choice in zip(letters, choices, strict=True) if answer in (letter, choice)}
    if len(meant) != 1:
        raise entry.wrong("answer", f"one letter of {letters}, or exactly one of the choices in full")
    return meant.pop()


def kinds_of(entry: Entry) -> tuple[str, ...]:
    """Read `kind` or `kinds`."""
    if entry.fields.get("kinds") is None:
        return () if entry.fields.get("kind") is None else (entry.text("kind"),)
    if entry.fields.get("kind") is not None:
        raise entry.wrong("kind", "absent where there are kinds")
    return entry.kinds("kinds") if entry.fields["kinds"] != [] else ()
