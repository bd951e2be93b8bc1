"""Where the image of a trial comes from: a sample of the package, or a visitor's upload; and how it is corrupted."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from clustrs import embedded
from clustrs.corruptions import Corruption, corruption_rule
from clustrs.corruptions.images import open_image
from clustrs.evaluation.config import CLEAN

PREVIEW = 480
"""Longest side in pixels of the images that the page shows."""


@dataclass(frozen=True)
class Source:
    """An image file, its name (which seeds corruptions), and the questions about it whose answers are known."""

    path: Path
    name: str
    questions: tuple[tuple[str, str], ...] = ()

    def open(self) -> Image.Image:
        return open_image(self.path)

    def expected(self, question: str) -> str | None:
        """The known answer to a question; None where there is none."""
        return dict(self.questions).get(question.strip())


@dataclass(frozen=True)
class LevelRange:
    """Which levels a slider offers for a corruption, and where it starts."""

    minimum: float
    maximum: float
    step: float
    start: float


def sample_sources(task: str | None = None) -> list[Source]:
    """The sample images, those of a task first, or else those of the default model's."""
    first = task or embedded.default_task(embedded.DEFAULT)
    listed = sorted(embedded.samples(), key=lambda sample: sample.task != first)
    return [Source(sample.path, sample.path.name, sample.questions) for sample in listed]


def uploaded(path: Path) -> Source:
    """A visitor's file, once it is clear that it is an image and not too large; a ValueError says so in one line."""
    try:
        open_image(path)
    except ValueError as error:
        raise ValueError(str(error).replace(repr(str(path)), repr(path.name))) from None
    return Source(path, path.name)


def level_range(name: str) -> LevelRange:
    """The levels that the corruption is usually measured at, and those below: what it accepts at most is unusual.

    A slider starts at the first of them, as a rule the mildest. A corruption that grows weaker with its level, as
    JPEG's quality does, is offered up to what it accepts.
    """
    rule = corruption_rule(name)
    descending = rule.levels[0] > rule.levels[-1]
    top = rule.high if descending else max(rule.levels)
    steps = {"any": 0.01 if top - rule.low <= 1 else 0.05, "integer": 1, "odd": 2}
    return LevelRange(rule.low, top, steps[rule.kind], rule.levels[0])


def nearest_level(name: str, level: float) -> float:
    """The level that a slider stands at, without the rounding of its steps and inside what the corruption accepts."""
    span = level_range(name)
    steps = round((level - span.minimum) / span.step)
    return min(span.maximum, max(span.minimum, round(span.minimum + steps * span.step, 4)))


def corrupted(source: Source, corruption: str, level: float, seed: int) -> Image.Image:
    """The image as the model gets it: the same pixels as `clustrs ask --corrupt NAME:LEVEL --seed SEED`."""
    image = source.open()
    if corruption == CLEAN:
        return image
    return Corruption(corruption, nearest_level(corruption, level)).apply(image, source.name, seed)


def data_uri(image: Image.Image, longest: int = PREVIEW) -> str:
    """An image inside a page, so that no file of it is left on the disk."""
    shown = image.convert("RGB")
    if max(shown.size) > longest:
        shown.thumbnail((longest, longest))
    content = io.BytesIO()
    shown.save(content, "WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
