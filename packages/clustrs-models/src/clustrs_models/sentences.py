"""Tasks for models that answer in sentences: `photos` and `scenes` scored by the expected word, and `describe`."""

import re
from dataclasses import replace
from pathlib import Path

from clustrs.evaluation.tasks import Item, task_info
from clustrs_models import photographs, scenes
from clustrs_models.photographs import Photos
from clustrs_models.scenes import Scenes

NAMES = {
    "turtle": "sea turtle",
    "piano": "grand piano",
    "guitar": "electric guitar",
    "phone": "cell phone",
    "ball": "soccer ball",
    "sign": "stop sign",
}
"""Full names of kinds that `photos` calls by one word; the short one is in each of them."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHOICES = (("yes", "no"), ("top", "bottom"), ("left", "right"), NUMBERS)
"""Words of which a right answer has exactly one."""


def words(text: str) -> str:
    """Return the words of a text in lower case with one space between and around them, digits spelled out."""
    found = re.findall(r"[a-z]+|[0-9]+", text.lower())
    return " ".join(["", *(NUMBERS[int(word)] if len(word) == 1 and word.isdigit() else word for word in found), ""])


def names(text: str, word: str) -> bool:
    """Tell whether an answer has the expected word, and of its alternatives (yes and no, numbers ...) none but it."""
    said, expected = words(text), words(word)
    rivals = next((choices for choices in CHOICES if expected.strip() in choices), ())
    return expected in said and not any(f" {other} " in said for other in rivals if f" {other} " != expected)


def reword(item: Item) -> Item:
    """Ask with the full names, in American spelling."""
    question = re.sub(r"\b[a-z]+\b", lambda found: NAMES.get(found[0], found[0]), item.question)
    return replace(item, question=question.replace("colour", "color").replace(" a orange", " an orange"))


class InSentences:
    """Mixin for a task: scored by the expected word in the answer."""

    max_new_tokens = 24

    def score(self, item: Item, text: str) -> float | None:
        return float(names(text, item.answer))


class PhotosInSentences(InSentences, Photos):
    """`photos` with full names."""

    name = "photos-sentences"


class ScenesInSentences(InSentences, Scenes):
    """`scenes` in American spelling."""

    name = "scenes-sentences"


class Describe(Photos):
    """A description of each image of `photos`, scored by the share of the things shown that it names."""

    name = "describe"
    max_new_tokens = 48

    def score(self, item: Item, text: str) -> float | None:
        shown = item.answer.split(", ")
        return sum(names(text, name) for name in shown) / len(shown)


@task_info(
    measures="1296 about 360 photographs and collages of four, in 7 kinds, for models that answer in sentences",
    scoring="the expected word in the answer",
    data="none (144 photographs come with clustrs-models), or --data FOLDER of Caltech-101",
)
def load_photos(data: Path | None = None, limit: int | None = None) -> PhotosInSentences:
    """Load `photos` in this wording."""
    task = photographs.load(data, limit)
    return PhotosInSentences([reword(item) for item in task.items], task.photos)


@task_info(
    measures="1490 about 250 drawn images, in 8 kinds, for models that answer in sentences",
    scoring="the expected word in the answer",
    data="none: the images are drawn",
)
def load_scenes(data: Path | None = None, limit: int | None = None) -> ScenesInSentences:
    """Load `scenes` in this wording."""
    task = scenes.load(data, limit)
    return ScenesInSentences([reword(item) for item in task.items], task.pixels)


@task_info(
    measures="360 descriptions of photographs and collages of four",
    scoring="the share of the things shown that are named",
    data="none (144 photographs come with clustrs-models), or --data FOLDER of Caltech-101",
)
def load_describe(data: Path | None = None, limit: int | None = None) -> Describe:
    """Load one question about each image of `photos`."""
    photos = photographs.load(data).photos
    items = [
        Item(image, image, "Describe the image.", ", ".join(photo.kind.name for photo in shown), ("describe",))
        for image, shown in list(photos.items())[:limit]
    ]
    return Describe(items, photos)
