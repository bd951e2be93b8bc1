"""The task `scenes`: drawn scenes, questions with answers of one word, and the fixed test set."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from clustrs.evaluation.tasks import Item, normalize_answer, task_info
from clustrs_models.drawing import COLORS, SHAPES, Drawing, Scene, Thing, draw, sample
from clustrs_models.photographs import Question, by_answer, generator_for

KINDS = ("colour", "shape", "count", "count of a colour", "presence", "place", "digit", "size")
IMAGES, EACH = 250, 6
TEST_SEED = 20251
APART = 20.0
"""Smallest distance of two centers, in pixels, in the direction of a question."""
RATIO = 1.5
"""Areas must differ by this factor to be compared."""


def only(things: Sequence[Thing], **properties: str) -> Thing | None:
    """Return the object with these properties, if there is exactly one."""
    matches = [thing for thing in things if all(getattr(thing, key) == value for key, value in properties.items())]
    return matches[0] if len(matches) == 1 else None


def pairs(things: Sequence[Thing]) -> list[Question]:
    """Ask for the place of one object relative to another, and for the larger of two."""
    questions = []
    for a, b in permutations(things, 2):
        if abs(a.x - b.x) >= APART:
            text = f"Is the {a.name} left or right of the {b.name}?"
            questions.append(Question("place", text, "left" if a.x < b.x else "right"))
        if abs(a.y - b.y) >= APART:
            text = f"Is the {a.name} above or below the {b.name}?"
            questions.append(Question("place", text, "above" if a.y < b.y else "below"))
        if max(a.area, b.area) >= RATIO * min(a.area, b.area):
            text = f"Is the {a.name} larger or smaller than the {b.name}?"
            questions.append(Question("size", text, "larger" if a.area > b.area else "smaller"))
    return questions


def presence(things: Sequence[Thing]) -> list[Question]:
    """Ask whether an object is there; of absent ones, only for those whose color or shape is there."""
    there = {(thing.color, thing.shape) for thing in things}
    colors, shapes = {color for color, _ in there}, {shape for _, shape in there}
    return [
        Question("presence", f"Is there a {color} {shape}?", "yes" if (color, shape) in there else "no")
        for color in COLORS
        for shape in SHAPES
        if color in colors or shape in shapes
    ]


def every(scene: Scene) -> list[Question]:
    """Return all questions about a scene, in a fixed order."""
    things = scene.things
    questions = [Question("count", "How many objects are there?", str(len(things)))]
    lone = [thing for shape in SHAPES if (thing := only(things, shape=shape))]
    questions += [Question("colour", f"What colour is the {thing.shape}?", thing.color) for thing in lone]
    for color in COLORS:
        if thing := only(things, color=color):
            questions.append(Question("shape", f"What shape is the {color} object?", thing.shape))
        number = sum(thing.color == color for thing in things)
        if number <= 3:
            questions.append(Question("count of a colour", f"How many {color} objects are there?", str(number)))
    marked = [thing for thing in things if thing.digit is not None]
    questions += [Question("digit", f"Which digit is on the {thing.name}?", str(thing.digit)) for thing in marked]
    return questions + presence(things) + pairs(things)


def draw_questions(scene: Scene, count: int, generator: Generator) -> list[Question]:
    """Random questions: the kind first, then one of the answers it can have here, then the question."""
    table = by_answer(every(scene))
    chosen = []
    kinds = list(table)
    for _ in range(count):
        answers = table[kinds[generator.integers(len(kinds))]]
        group = list(answers.values())[generator.integers(len(answers))]
        chosen.append(group[generator.integers(len(group))])
    return chosen


def lists(scene: Scene) -> list[Question]:
    """Requests to list all objects in some order, with the digits on them. These have longer answers."""
    orders: dict[str, Callable[[Thing], float]] = {
        "from left to right": lambda thing: thing.x,
        "from top to bottom": lambda thing: thing.y,
        "from large to small": lambda thing: -thing.area,
    }
    questions = []
    for words, key in orders.items():
        said = [t.name if t.digit is None else f"{t.name} {t.digit}" for t in sorted(scene.things, key=key)]
        questions.append(Question("list", f"List the objects {words}.", ", ".join(said)))
    return questions


@dataclass(frozen=True)
class SceneExample:
    """An image (by number) and the questions about it."""

    number: int
    drawing: Drawing
    questions: tuple[Question, ...]


def choose(
    questions: Sequence[Question], count: int, kinds: Counter[str], answers: Counter[tuple[str, str]]
) -> list[Question]:
    """The kinds and the answers that have been asked for least so far, each kind once. Updates the counts."""
    table = by_answer(questions)
    chosen = []
    for kind in sorted(table, key=lambda kind: kinds[kind])[:count]:
        answer = min(table[kind], key=lambda answer: answers[kind, answer])
        group = table[kind][answer]
        chosen.append(group[kinds[kind] * 7919 % len(group)])
        kinds[kind] += 1
        answers[kind, answer] += 1
    return chosen


def examples(images: int = IMAGES, each: int = EACH, side: int = 192, seed: int = TEST_SEED) -> Iterator[SceneExample]:
    """The test set, image by image. The same seed gives the same set; a shorter one is its beginning."""
    kinds: Counter[str] = Counter()
    answers: Counter[tuple[str, str]] = Counter()
    for number in range(images):
        generator = generator_for(seed, side, number)
        scene = sample(generator, side, held_out=True)
        yield SceneExample(number, draw(scene, generator), tuple(choose(every(scene), each, kinds, answers)))


class Scenes:
    """Fixed test set of drawn scenes; kinds are the kinds of its questions."""

    name = "scenes"
    max_new_tokens = 4
    judged = False
    scale = 100.0

    def __init__(self, items: Sequence[Item], pixels: Mapping[str, NDArray[np.uint8]]) -> None:
        self.items = items
        self.pixels = pixels

    def open(self, image: str) -> Image.Image:
        if image not in self.pixels:
            raise ValueError(f"image {image!r}: there are {len(self.pixels)}, from 'scene-0000' on")
        return Image.fromarray(self.pixels[image])

    def score(self, item: Item, text: str) -> float | None:
        """1 for the expected word and nothing else."""
        return float(normalize_answer(text) == normalize_answer(item.answer))


@task_info(
    measures="1490 about 250 drawn images, in 8 kinds",
    scoring="the expected word",
    data="none: the images are drawn",
)
def load(data: Path | None = None, limit: int | None = None) -> Scenes:
    """Draws the images that are needed, about 4 ms each."""
    if data is not None:
        raise ValueError(f"data={str(data)!r}: the scenes are drawn, leave it out")
    items: list[Item] = []
    pixels = {}
    for example in examples():
        image = f"scene-{example.number:04}"
        pixels[image] = example.drawing.pixels
        for number, question in enumerate(example.questions):
            items.append(Item(f"{image}-{number}", image, question.text, question.answer, (question.kind,)))
        if limit is not None and len(items) >= limit:
            break
    return Scenes(items[:limit], pixels)
