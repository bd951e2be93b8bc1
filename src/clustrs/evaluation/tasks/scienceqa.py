"""The task `scienceqa` (ScienceQA-IMG): school questions with up to five choices, asked and scored as LLaVA does."""

import re
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from clustrs import validation
from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.sources import (
    Entry,
    Folder,
    Hub,
    Illustrated,
    entry_of,
    gather,
    hub_rows,
    is_text,
    official_file,
    parse_json,
    read_text,
)

LETTERS = tuple("ABCDE")
INSTRUCTION = "Answer with the option's letter from the given choices directly."
HUB, CONFIG = "lmms-lab/ScienceQA", "ScienceQA-IMG"
ADVICE = (
    "pass data=DIR (--data DIR), a folder with llava_test_CQM-A.json (from the eval.zip of "
    "https://github.com/haotian-liu/LLaVA/blob/main/docs/Evaluation.md) and images/ (the test images of "
    "https://github.com/lupantech/ScienceQA)"
)


def with_choices(question: str, choices: Sequence[str]) -> str:
    """Append a line for each choice to a question."""
    return "\n".join(
        [question, *(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))]
    )


def asked(text: str) -> str:
    """Return what LLaVA sends for a text: without its placeholder, with the instruction."""
    return f"{bare(text)}\n{INSTRUCTION}"


def bare(text: str) -> str:
    """Remove the placeholder of the image."""
    return text.replace("<image>", "").strip()


def chosen(text: str, letters: Sequence[str] = LETTERS) -> str | None:
    """Return the letter that an answer names: alone, before ". ", or in a single "The answer is X."

    LLaVA's pattern ends with an unescaped full stop, so any character may follow the letter, but one must.
    """
    text = text.strip()
    if text in letters:
        return text
    if text[:1] in letters and text[1:3] == ". ":
        return text[0]
    named = re.findall(r"The answer is ([A-Z]).", text)
    return named[0] if len(named) == 1 else None


class ScienceQA(Illustrated):
    """ScienceQA-IMG. Kinds are the numbers of choices, since guessing gains more where there are few."""

    name = "scienceqa"
    max_new_tokens = 16
    judged = False
    scale = 100.0
    without_image: frozenset[str] = frozenset()
    """Ids in the official file that have no image and are not part of this task."""

    def score(self, item: Item, text: str) -> float | None:
        """Return 1 for the right letter; an answer without one is wrong."""
        return float(chosen(text) == item.answer)


@task_info(
    measures="2017 with an image and 2 to 5 choices",
    scoring="the right letter",
    data="--data FOLDER with llava_test_CQM-A.json and images/, or a dataset of the Hugging Face hub",
)
def load(data: Path | None, limit: int | None = None, present: bool = False, hub: str | None = None) -> ScienceQA:
    """Load the official folder, or without one a dataset of the hub. `present` leaves out questions whose images are
    not in the folder."""
    validation.choice("present", present, [True, False])
    if data is None:
        return from_hub(hub or HUB, limit)
    if hub is not None:
        raise ValueError(f"pass either hub or data, got hub={hub!r} and data={str(data)!r}")
    path = official_file(data, "llava_test_CQM-A.json", ADVICE)
    entries = parse_json(read_text(path), str(path))
    if not isinstance(entries, list):
        raise ValueError(f"{path} must be a list of questions: {ADVICE}")
    records = [entry_of(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1)]
    illustrated = [entry for entry in records if entry.fields.get("image") is not None]
    items = gather(str(path), ((entry, from_file(entry)) for entry in illustrated))
    folder = Folder(data / "images" / "test" if (data / "images" / "test").is_dir() else data / "images")
    if present:
        items = [item for item in items if folder.has(item.image)]
        if not items:
            raise ValueError(f"present=True, but no image is in {folder.path}: {ADVICE}")
    task = ScienceQA(items[:limit], folder)
    bare_ids = (entry.fields.get("id") for entry in records if entry.fields.get("image") is None)
    task.without_image = frozenset(str(name) for name in bare_ids if name is not None)
    return task


def from_file(entry: Entry) -> Item:
    """Make a question from an entry of LLaVA's file: a human's turn, and the letter."""
    turns = entry.fields.get("conversations")
    if not (isinstance(turns, list) and len(turns) == 2 and all(isinstance(turn, dict) for turn in turns)):
        raise entry.wrong("conversations", "two turns, the question and the answer")
    text, answer = (Entry(entry.where, turn).text("value") for turn in turns)
    number = count_choices(text)
    if answer not in LETTERS[:number]:
        raise entry.wrong(
            "conversations", "a question that ends with choices (A. ..., B. ...) and one of their letters"
        )
    return Item(entry.name("id"), entry.image("image"), asked(text), answer, (f"{number} choices",))


def count_choices(text: str) -> int:
    """Count the lines at the end of a question that are choices, from A on."""
    lines = bare(text).split("\n")
    for number in range(len(LETTERS), 1, -1):
        last = lines[-number:]
        if [line[:3] for line in last] == [f"{letter}. " for letter in LETTERS[:number]]:
            return number
    return 0


def from_hub(hub: str, limit: int | None) -> ScienceQA:
    """Load a dataset of the hub; its rows have no ids and get their indices."""
    rows, records = hub_rows(hub, CONFIG, ADVICE)
    items = gather(hub, ((entry, from_row(f"row-{index:04}", entry)) for index, entry in enumerate(records)))
    return ScienceQA(items[:limit], Hub(rows, {item.image: index for index, item in enumerate(items)}))


def from_row(key: str, entry: Entry) -> Item:
    """Make a question from a row of the hub, in the words of LLaVA's file."""
    choices, answer, hint = entry.texts("choices"), entry.fields.get("answer"), entry.fields.get("hint")
    if not 2 <= len(choices) <= len(LETTERS):
        raise entry.wrong("choices", f"2 to {len(LETTERS)} strings")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise entry.wrong("answer", "the number of a choice, counted from 0")
    context = f"Context: {hint}\n" if is_text(hint) else ""
    text = with_choices(context + entry.text("question"), choices)
    return Item(key, key, asked(text), LETTERS[answer], (f"{len(choices)} choices",))
