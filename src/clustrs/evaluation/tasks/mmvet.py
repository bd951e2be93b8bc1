"""The task `mmvet` (MM-Vet): open questions about photographs, charts and memes, scored by a judge."""

from pathlib import Path

from clustrs.evaluation.tasks import Item, task_info
from clustrs.evaluation.tasks.sources import (
    Entry,
    Folder,
    Hub,
    Illustrated,
    entry_of,
    gather,
    hub_rows,
    official_file,
    parse_json,
    read_text,
)

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
    scale = 100.0

    def score(self, item: Item, text: str) -> float | None:
        """Return None: a judge scores the answers."""
        return None


@task_info(
    measures="218 about 200 images, in 6 capabilities",
    scoring="by a judge (clustrs judge)",
    data="--data FOLDER with mm-vet.json and images/, or a dataset of the Hugging Face hub",
)
def load(data: Path | None, limit: int | None = None, hub: str | None = None) -> MMVet:
    """Load the official folder, or without one a dataset of the hub."""
    if data is None:
        return from_hub(hub or HUB, limit)
    if hub is not None:
        raise ValueError(f"pass either hub or data, got hub={hub!r} and data={str(data)!r}")
    path = official_file(data, "mm-vet.json", ADVICE)
    entries = entry_of(str(path), parse_json(read_text(path), str(path))).fields
    records = [(key, entry_of(f"{path}, entry {key!r}", value)) for key, value in entries.items()]
    items = gather(str(path), ((entry, from_file(key, entry)) for key, entry in records))
    return MMVet(items[:limit], Folder(data / "images"))


def from_file(key: str, entry: Entry) -> Item:
    """Make a question from an entry of the official file."""
    image, question, answer = entry.image("imagename"), entry.text("question"), entry.text("answer")
    return Item(key, image, question, answer, entry.kinds("capability"))


def from_hub(hub: str, limit: int | None) -> MMVet:
    """Load a dataset of the hub; its images have no names and get those of their questions."""
    rows, records = hub_rows(hub, None, ADVICE)
    items = gather(hub, ((entry, from_row(entry)) for entry in records))
    return MMVet(items[:limit], Hub(rows, {item.image: index for index, item in enumerate(items)}))


def from_row(entry: Entry) -> Item:
    """Make a question from a row of the hub, which has the capabilities in one string."""
    key = entry.name("question_id")
    kinds = tuple(kind.strip() for kind in entry.text("capability").split(",") if kind.strip())
    return Item(key, key, entry.text("question"), entry.text("answer"), kinds)
