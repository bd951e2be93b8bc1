"""The task `mmvet` (MM-Vet): open questions about photographs, charts and memes, scored by a judge."""

from pathlib import Path

from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.sources import Entry, Folder, Hub, Illustrated, gather, read_official

HUB = "lmms-lab/MMVet"
ADVICE = (
    "pass data=DIR (--data DIR), a folder with mm-vet.json and images/, as in "
    "https://github.com/yuweihao/MM-Vet/releases/download/v1/mm-vet.zip"
)


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
def load(data: Path | None, limit: int | None = None, hub: str | None = None) -> MMVet:
    """Load the official folder, or without one a dataset of the hub."""
    if data is None:
        dataset = Hub(hub or HUB, None, ADVICE, from_row)
        return MMVet(dataset.items[:limit], dataset)
    path, content = read_official(data, "mm-vet.json", hub, ADVICE)
    entries = ((key, Entry(f"{path}, entry {key!r}", value)) for key, value in Entry(path, content).fields.items())
    return MMVet(gather(path, entries, from_file)[:limit], Folder(data / "images"))


def from_file(key: str, entry: Entry) -> Item:
    image, question, answer = entry.image("imagename"), entry.text("question"), entry.text("answer")
    return Item(key, image, question, answer, tuple(dict.fromkeys(entry.texts("capability"))))


def from_row(_: int, entry: Entry) -> Item:
    """Make a question from a row of the hub, which has the capabilities in one string, and no names of images."""
    key = entry.name("question_id")
    kinds = tuple(kind.strip() for kind in entry.text("capability").split(",") if kind.strip())
    return Item(key, key, entry.text("question"), entry.text("answer"), kinds)
