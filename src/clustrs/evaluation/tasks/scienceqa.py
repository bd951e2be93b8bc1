"""The task `scienceqa` (ScienceQA-IMG): school questions with up to five choices, asked and scored as LLaVA does."""

import re
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from clustrs import validation
from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.sources import Entry, Folder, Hub, Illustrated, gather, is_text, read_official

LETTERS = tuple("ABCDE")
INSTRUCTION = "Answer with the option's letter from the given choices directly."
HUB, CONFIG = "lmms-lab/ScienceQA", "ScienceQA-IMG"
ADVICE = (
    "pass data=DIR (--data DIR), a folder with llava_test_CQM-A.json (from the eval.zip of "
    "https://github.com/haotian-liu/LLaVA/blob/main/docs/Evaluation.md) and images/ (the test images of "
    "https://github.com/lupantech/ScienceQA)"
)


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


class ScienceQA(Illustrated):
    """ScienceQA-IMG. Kinds are the numbers of choices, since guessing gains more where there are few."""

    name = "scienceqa"
    max_new_tokens = 16
    judged = False
    without_image: frozenset[str] = frozenset()
    """Ids in the official file that have no image and are not part of this task."""

    def score(self, item: Item, text: str) -> float | None:
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
        dataset = Hub(hub or HUB, CONFIG, ADVICE, from_row)
        return ScienceQA(dataset.items[:limit], dataset)
    path, content = read_official(data, "llava_test_CQM-A.json", hub, ADVICE)
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of questions: {ADVICE}")
    entries = [(number, Entry(f"{path}, entry {number}", entry)) for number, entry in enumerate(content, 1)]
    illustrated = [pair for pair in entries if pair[1].fields.get("image") is not None]
    items = gather(path, illustrated, from_file)
    folder = Folder(data / "images" / "test" if (data / "images" / "test").is_dir() else data / "images")
    if present:
        items = [item for item in items if folder.has(item.image)]
        if not items:
            raise ValueError(f"present=True, but no image is in {folder.path}: {ADVICE}")
    task = ScienceQA(items[:limit], folder)
    without = (entry.fields.get("id") for _, entry in entries if entry.fields.get("image") is None)
    task.without_image = frozenset(str(name) for name in without if name is not None)
    return task


def from_file(_: int, entry: Entry) -> Item:
    """Make a question from an entry of LLaVA's file: a human's turn, which ends with the choices, and the letter."""
    turns = entry.fields.get("conversations")
    if not (isinstance(turns, list) and len(turns) == 2 and all(isinstance(turn, dict) for turn in turns)):
        raise entry.wrong("conversations", "two turns, the question and the answer")
    text, answer = (Entry(entry.where, turn).text("value") for turn in turns)
    begins = [line[:3] for line in bare(text).split("\n")]
    for number in range(len(LETTERS), 1, -1):
        if begins[-number:] == [f"{letter}. " for letter in LETTERS[:number]] and answer in LETTERS[:number]:
            return Item(entry.name("id"), entry.image("image"), asked(text), answer, (f"{number} choices",))
    raise entry.wrong("conversations", "a question that ends with choices (A. ..., B. ...) and one of their letters")


def from_row(index: int, entry: Entry) -> Item:
    """Make a question from a row of the hub, which has no id, in the words of LLaVA's file."""
    key = f"row-{index:04}"
    choices, answer, hint = entry.texts("choices"), entry.fields.get("answer"), entry.fields.get("hint")
    if not 2 <= len(choices) <= len(LETTERS):
        raise entry.wrong("choices", f"2 to {len(LETTERS)} strings")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise entry.wrong("answer", "the number of a choice, counted from 0")
    context = f"Context: {hint}\n" if is_text(hint) else ""
    question = asked(context + entry.text("question"), choices)
    return Item(key, key, question, LETTERS[answer], (f"{len(choices)} choices",))
