"""Training images, drawn as they are needed. Step n of a stage sees the same images in every run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clustrs_models.drawing import COLORS, LARGEST, MOST, PATCH, SHAPES, SMALLEST, Drawing, Scene, draw, sample
from clustrs_models.photographs import Question, by_answer, generator_for
from clustrs_models.scenes import KINDS, draw_questions, lists, pairs

IGNORED = -100
USUAL = 700.0
"""An object with more pixels is a large one, in hints."""
CLEAR = 0.35
"""A patch belongs to an object that covers at least this much of it; below `FAINT` it is background."""
FAINT = 0.08
PLACES = 12
"""Columns, and rows, in which an object's center can lie, over the whole grid."""
SIZES = 9
"""Steps of an object's area, each larger by the same factor."""
COLOR = {name: i for i, name in enumerate(COLORS)}
SHAPE = {name: i for i, name in enumerate(SHAPES)}
NAMES = (*KINDS, "list", "hint", "grade")


@dataclass(frozen=True)
class Stage:
    """`sides` and `images` alternate from step to step."""

    sides: tuple[int, ...]
    images: tuple[int, ...]
    steps: int
    rate: float | None = None
    """Learning rate of this stage, instead of the schedule's cosine."""
    warmup: int = 0
    """Steps in which the learning rate rises from almost nothing when this stage begins."""
    lists: int = 0
    """Requests to list all objects, per image."""
    hints: int = 0
    """Simpler questions about one object or one property, per image; never in the test."""
    grades: int = 0
    """Questions for the place or the size of an object as a number from 0 to 9, per image; never in the test."""
    pairs: int = 0
    """Further questions that compare two objects, per image."""
    counts: int = 0
    """Further questions for the number of objects of a color or of a shape, per image."""
    spreading: bool = False
    """Hold the encoder's classifiers to unit weights, see `tower.spread`."""
    traces: bool = False
    """Of clips: let the language model's states of visual tokens tell what their objects do, see `clips.traced`."""
    even: bool = False
    """Make the area of all objects independent of their number in small images, too."""


def blurred(image: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    weights = np.exp(-0.5 * (np.arange(-2, 3) / max(sigma, 1e-3)) ** 2).astype(np.float32)
    weights /= weights.sum()
    for axis in (0, 1):
        padding = [(2, 2) if i == axis else (0, 0) for i in range(3)]
        padded = np.pad(image, padding, mode="edge")
        length = image.shape[axis]
        image = sum(w * np.take(padded, range(i, i + length), axis) for i, w in enumerate(weights))
    return image


def corrupted(pixels: NDArray[np.uint8], settings: dict[str, float], generator: Generator) -> NDArray[np.uint8]:
    """Mild changes of brightness, contrast, sharpness and grain."""
    image: Any = pixels.astype(np.float32) / 255
    if generator.random() < settings["chance"]:
        image = image + np.float32(generator.uniform(-1, 1) * settings["brightness"])
    if generator.random() < settings["chance"]:
        mean = image.mean()
        image = mean + (image - mean) * np.float32(1 + generator.uniform(-1, 1) * settings["contrast"])
    if generator.random() < settings["chance"]:
        image = blurred(image, generator.uniform(0.3, settings["blur"]))
    if generator.random() < settings["chance"]:
        sigma = np.float32(generator.uniform(0, settings["noise"]))
        image = image + sigma * generator.standard_normal(image.shape, dtype=np.float32)
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)


def patch_labels(drawing: Drawing, corner: NDArray[np.int64], grid: int) -> dict[str, NDArray[Any]]:
    """Return the labels of each patch: shape, color, digit (0: none), and of its object the center and the size."""
    things = drawing.scene.things
    nearest = drawing.coverage.argmax(0)
    covered = drawing.coverage.max(0)
    clear, unclear = covered >= CLEAR, (covered > FAINT) & (covered < CLEAR)

    def label(values: list[int]) -> NDArray[np.int64]:
        return np.where(unclear, IGNORED, np.where(clear, np.array(values)[nearest] + 1, 0)).reshape(-1)

    printed = np.take_along_axis(drawing.digits, nearest[None], 0)[0]
    digit = np.array([-1 if thing.digit is None else thing.digit for thing in things])[nearest] + 1
    digit = np.where(printed >= CLEAR, digit, np.where(printed > FAINT, IGNORED, 0))
    place = np.array([[thing.x, thing.y] for thing in things]) + corner[::-1] * PATCH
    steps = (place * PLACES / (grid * PATCH)).astype(int).clip(0, PLACES - 1)
    areas = np.array([thing.area for thing in things])
    size = (np.log(areas / SMALLEST) / np.log(1.25 * LARGEST / SMALLEST) * SIZES).astype(int).clip(0, SIZES - 1)
    place = np.concatenate([place / (grid * PATCH) * 4 - 2, 2 * np.log(areas / 800)[:, None]], 1)
    return {
        "shape": label([SHAPE[thing.shape] for thing in things]),
        "color": label([COLOR[thing.color] for thing in things]),
        "digit": digit.reshape(-1),
        "column": label(steps[:, 0].tolist()),
        "row": label(steps[:, 1].tolist()),
        "size": label(size.tolist()),
        "geometry": place[nearest].astype(np.float32).reshape(-1, 3),
    }


class Images(Dataset[dict[str, Tensor]]):
    """Item n is the whole batch of step n."""

    def __init__(
        self,
        settings: dict[str, Any],
        family: str,
        stage: int,
        plan: Stage,
        words: dict[str, int] | None = None,
    ) -> None:
        own = settings[family]
        self.seed, self.photometry, self.stage, self.plan, self.words = (
            settings["seed"],
            settings["photometry"],
            stage,
            plan,
            words,
        )
        self.grid, self.scale, self.questions = own["encoder"]["grid"], own["scale"], own["language"]["questions"]

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        turn = step % len(self.plan.sides)
        side = self.plan.sides[turn]
        purpose = 1 if self.words is None else 2
        rows = []
        for number in range(self.plan.images[turn]):
            generator = generator_for(self.seed, purpose, self.stage, step, number)
            scene = sample(generator, side, even=self.plan.even)
            drawing = draw(scene.scaled(round(side * self.scale)), generator)
            pixels = corrupted(drawing.pixels, self.photometry, generator)
            corner = generator.integers(0, self.grid - len(pixels) // PATCH + 1, 2)
            row: dict[str, Any] = {"pixels": pixels, "corner": corner}
            if self.words is None:
                row |= patch_labels(drawing, corner, self.grid)
                present = np.zeros(len(COLOR) * len(SHAPE), np.float32)
                for thing in drawing.scene.things:
                    present[COLOR[thing.color] * len(SHAPE) + SHAPE[thing.shape]] = 1
                row |= {"present": present, "count": np.array(min(len(drawing.scene.things), MOST) - 1)}
            else:
                asked = draw_questions(drawing.scene, self.questions, generator)
                asked += [lists(drawing.scene)[i] for i in generator.permutation(3)[: self.plan.lists]]
                asked += some(pairs(drawing.scene.things), self.plan.pairs, generator)
                asked += drawn(counts(drawing.scene), self.plan.counts, generator)
                whole = self.grid * PATCH
                asked += some(hints(drawing.scene, corner * PATCH, whole / 2), self.plan.hints, generator)
                asked += some(grades(drawing.scene, corner * PATCH, whole), self.plan.grades, generator)
                row |= blocks(asked, self.words)
            rows.append(row)
        if self.words is not None:
            pad(rows, "ids", 0)
            pad(rows, "segments", -1)
            pad(rows, "positions", 0)
            pad(rows, "targets", IGNORED)
            pad(rows, "kinds", -1)
        return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def hints(scene: Scene, corner: NDArray[np.int64], middle: float) -> list[Question]:
    """Steps towards the harder kinds: where in the whole image an object lies, whether it is large, whether there is
    anything of a shape or of a color (two questions of each, so that yes and no are about as frequent)."""
    found = []
    for thing in scene.things:
        x, y = thing.x + corner[1], thing.y + corner[0]
        found += [
            Question("hint", f"Is the {thing.name} left or right?", "left" if x < middle else "right"),
            Question("hint", f"Is the {thing.name} above or below?", "above" if y < middle else "below"),
            Question("hint", f"Is the {thing.name} larger or smaller?", "larger" if thing.area > USUAL else "smaller"),
        ]
    for key, every, words in (("shape", SHAPE, "a {}"), ("color", COLOR, "a {} object")):
        there = {getattr(thing, key) for thing in scene.things}
        absent = [value for value in every if value not in there]
        for value in [*sorted(there)[:2], *absent[:: max(1, len(absent) // 2)][:2]]:
            found.append(Question("hint", f"Is there {words.format(value)}?", "yes" if value in there else "no"))
    return found


def counts(scene: Scene) -> list[Question]:
    """Ask for the number of objects of each color, and of each shape."""
    found = []
    for key, values in (("color", COLOR), ("shape", SHAPE)):
        for value in values:
            number = sum(getattr(thing, key) == value for thing in scene.things)
            found.append(Question("hint", f"How many {value} objects are there?", str(number)))
    return found


def some(questions: list[Question], count: int, generator: Generator) -> list[Question]:
    """Some of the questions, each as likely as any other; none of none."""
    return [questions[i] for i in generator.integers(0, len(questions), count)] if questions else []


def drawn(questions: list[Question], count: int, generator: Generator) -> list[Question]:
    """Some of the questions, each answer as likely as any other."""
    groups = [group for answers in by_answer(questions).values() for group in answers.values()]
    chosen = [groups[i] for i in generator.integers(0, len(groups), count)]
    return [group[generator.integers(len(group))] for group in chosen]


def grades(scene: Scene, corner: NDArray[np.int64], side: float) -> list[Question]:
    """Ask for the place of each object in the whole image, and for its size, in ten steps."""
    found = []
    for thing in scene.things:
        size = np.log(thing.area / SMALLEST) / np.log(LARGEST / SMALLEST)
        shares = {
            "from left to right": (thing.x + corner[1]) / side,
            "from top to bottom": (thing.y + corner[0]) / side,
            "from small to large": size,
        }
        for words, share in shares.items():
            answer = str(int(np.clip(10 * share, 0, 9)))
            found.append(Question("grade", f"Which digit is the {thing.name} {words}?", answer))
    return found


def pad(rows: list[dict[str, Any]], key: str, value: int) -> None:
    longest = max(len(row[key]) for row in rows)
    for row in rows:
        row[key] = np.pad(row[key], (0, longest - len(row[key])), constant_values=value)


def split(text: str) -> list[str]:
    """Words as the tokenizer makes them."""
    for mark in "?.,:":
        text = text.replace(mark, f" {mark} ")
    return text.lower().split()


def blocks(asked: list[Question], words: dict[str, int], names: Sequence[str] = NAMES) -> dict[str, NDArray[np.int64]]:
    """The questions and answers of an image in a row. Each sees the image and itself: `segments` tells them apart,
    `positions` start anew. `targets` are the answers, shifted to where they are predicted; `kinds` says of what, as an
    index into `names`."""
    ids: list[int] = []
    segments: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    kinds: list[int] = []
    for number, question in enumerate(asked):
        prompt = [words[word] for word in split(f"{question.text} ASSISTANT:")]
        answer = [*(words[word] for word in split(question.answer)), words["</s>"]]
        block = prompt + answer[:-1]
        ids += block
        segments += [number] * len(block)
        positions += range(len(block))
        targets += [IGNORED] * (len(prompt) - 1) + answer
        kinds += [-1] * (len(prompt) - 1) + [names.index(question.kind)] * (len(answer) - 1) + [-1]
    table = {"ids": ids, "segments": segments, "positions": positions, "targets": targets, "kinds": kinds}
    return {key: np.array(values) for key, values in table.items()}


class From(torch.utils.data.Sampler[int]):
    """Steps from the given one on."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps = first, steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.steps))

    def __len__(self) -> int:
        return self.steps - self.first


def batches(images: Images, first: int) -> DataLoader[dict[str, Tensor]]:
    """Batches from step `first` on, drawn by one other process."""
    return DataLoader(images, batch_size=None, sampler=From(first, len(images)), num_workers=1, prefetch_factor=4)
