"""The paper's benchmarks: MM-Vet, scored by a judge, and ScienceQA-IMG, asked and scored as LLaVA does."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from clustrs import validation
from clustrs.corruptions.images import ImageTooLarge, check_size, first_sentence
from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.custom import LETTERS, Entry, Folder, Illustrated, asked, bare, chosen, gather, is_text
from clustrs.validation import parse_json, read_text

MMVET = "lmms-lab/MMVet"
MMVET_ADVICE = (
    "pass data=DIR (--data DIR), a folder with mm-vet.json and images/, as in "
    "https://github.com/yuweihao/MM-Vet/releases/download/v1/mm-vet.zip"
)
SCIENCEQA, SCIENCEQA_CONFIG = "lmms-lab/ScienceQA", "ScienceQA-IMG"
SCIENCEQA_ADVICE = (
    "pass data=DIR (--data DIR), a folder with llava_test_CQM-A.json (from the eval.zip of "
    "https://github.com/haotian-liu/LLaVA/blob/main/docs/Evaluation.md) and images/ (the test images of "
    "https://github.com/lupantech/ScienceQA)"
)


def read_official(data: Path, name: str, hub: str | None, advice: str) -> tuple[str, Any]:
    """Return the path and the content of the JSON file of that name in the folder `data`."""
    path = data / name
    if hub is not None:
        raise ValueError(f"pass either hub or data, got hub={hub!r} and data={str(data)!r}")
    if not path.is_file():
        what = f"there is no {name} in it" if data.is_dir() else "there is no such folder"
        raise ValueError(f"data={str(data)!r}: {what}: {advice}")
    return str(path), parse_json(read_text(path), str(path))


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


class MMVet(Illustrated):
    """MM-Vet. Questions are asked verbatim; `<AND>` and `<OR>` in the answers are for the judge."""

    name = "mmvet"
    max_new_tokens = 1024
    judged = True

    def score(self, item: Item, text: str) -> float | None:
        return None


@task_info(
    measures="218 about 200 images, in 6 capabilities",
    scoring="by a judge (clustrs judge)",
    data="--data FOLDER with mm-vet.json and images/, or a dataset of the Hugging Face hub",
)
def load_mmvet(data: Path | None, limit: int | None = None, hub: str | None = None) -> MMVet:
    """Load the official folder, or without one a dataset of the hub."""
    if data is None:
        dataset = Hub(hub or MMVET, None, MMVET_ADVICE, mmvet_row)
        return MMVet(dataset.items[:limit], dataset)
    path, content = read_official(data, "mm-vet.json", hub, MMVET_ADVICE)
    entries = ((key, Entry(f"{path}, entry {key!r}", value)) for key, value in Entry(path, content).fields.items())
    return MMVet(gather(path, entries, mmvet_entry)[:limit], Folder(data / "images"))


def mmvet_entry(key: str, entry: Entry) -> Item:
    image, question, answer = entry.image("imagename"), entry.text("question"), entry.text("answer")
    return Item(key, image, question, answer, tuple(dict.fromkeys(entry.texts("capability"))))


def mmvet_row(_: int, entry: Entry) -> Item:
    """Make a question from a row of the hub, which has the capabilities in one string, and no names of images."""
    key = entry.name("question_id")
    kinds = tuple(kind.strip() for kind in entry.text("capability").split(",") if kind.strip())
    return Item(key, key, entry.text("question"), entry.text("answer"), kinds)


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
def load_scienceqa(
    data: Path | None, limit: int | None = None, present: bool = False, hub: str | None = None
) -> ScienceQA:
    """Load the official folder, or without one a dataset of the hub. `present` leaves out questions whose images are
    not in the folder."""
    validation.choice("present", present, [True, False])
    if data is None:
        dataset = Hub(hub or SCIENCEQA, SCIENCEQA_CONFIG, SCIENCEQA_ADVICE, scienceqa_row)
        return ScienceQA(dataset.items[:limit], dataset)
    path, content = read_official(data, "llava_test_CQM-A.json", hub, SCIENCEQA_ADVICE)
    if not isinstance(content, list):
        raise ValueError(f"{path} must be a list of questions: {SCIENCEQA_ADVICE}")
    entries = [(number, Entry(f"{path}, entry {number}", entry)) for number, entry in enumerate(content, 1)]
    illustrated = [pair for pair in entries if pair[1].fields.get("image") is not None]
    items = gather(path, illustrated, scienceqa_entry)
    folder = Folder(data / "images" / "test" if (data / "images" / "test").is_dir() else data / "images")
    if present:
        items = [item for item in items if is_present(folder, item.image)]
        if not items:
            raise ValueError(f"present=True, but no image is in {folder.path}: {SCIENCEQA_ADVICE}")
    task = ScienceQA(items[:limit], folder)
    without = (entry.fields.get("id") for _, entry in entries if entry.fields.get("image") is None)
    task.without_image = frozenset(str(name) for name in without if name is not None)
    return task


def is_present(folder: Folder, image: str) -> bool:
    try:
        return folder.file(image).is_file()
    except ValueError:
        return False


def scienceqa_entry(_: int, entry: Entry) -> Item:
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


def scienceqa_row(index: int, entry: Entry) -> Item:
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
