"""What a task is: images, questions, how an answer is scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image


@dataclass(frozen=True)
class Item:
    """One question. `image` names the image (several questions may share one); `question` is what the model is
    asked, word for word, without a placeholder for the image; `kinds` are the groups in which it is counted."""

    id: str
    image: str
    question: str
    answer: str
    kinds: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Data, prompt, parse rule and score.

    A task whose images are files may also have `file(image) -> Path | None`: then the checksums of a run are those of
    the files, and images need not be decoded for them.
    """

    name: str
    items: Sequence[Item]
    max_new_tokens: int
    """The longest answer that makes sense."""
    judged: bool
    """Whether scores come from a judge, in a step of its own."""
    scale: float
    """What a mean score is multiplied with in reports: 100 for accuracy in per cent, 1 or 100 for a judge's score."""

    def open(self, image: str) -> Image.Image:
        """The image in RGB; a ValueError says what is wrong with it."""
        ...

    def score(self, item: Item, text: str) -> float | None:
        """From 0 to 1; None when a judge has to say."""
        ...


def normalize_answer(text: str) -> str:
    """Drop what does not count in a short answer: case, space around it, a full stop."""
    return text.strip().lower().removesuffix(".").rstrip()
