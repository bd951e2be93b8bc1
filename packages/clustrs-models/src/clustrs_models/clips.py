"""The task `clips`: short drawn clips in which objects pass one after the other, and questions that need their order.

One object stands still in a corner, and in every second clip another one stands there at the end.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from clustrs.evaluation.tasks import Item, task_info
from clustrs_models.drawing import Thing, clutter, draw_thing, ground, is_held_out, names
from clustrs_models.photographs import Question, generator_for
from clustrs_models.scenes import Scenes, choose

KINDS = ("second", "direction", "passing", "change")
SIDE = 56
"""Of a frame, in pixels."""
LENGTHS = (8, 16, 8, 32, 8, 16)
"""Frames of the test's clips, in turn."""
CLIPS, EACH = 200, 3
TEST_SEED = 20311
FEWEST, MOST = 2, 4
"""Objects that pass."""
AREA = (330.0, 450.0)
"""Of an object, in pixels."""
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


@dataclass(frozen=True)
class Passing:
    """An object that passes: its look (without a place), its way, and the frames in which it is there."""

    thing: Thing
    direction: str
    begin: tuple[float, float]
    end: tuple[float, float]
    frames: range

    def at(self, frame: int) -> Thing:
        """The object where it is in a frame."""
        share = (frame - self.frames.start) / (len(self.frames) - 1)
        x, y = (a + share * (b - a) for a, b in zip(self.begin, self.end, strict=True))
        return replace(self.thing, x=x, y=y)


@dataclass(frozen=True)
class Clip:
    """What happens in a clip: objects pass in order; `standing` is there until frame `until`, then `after` is."""

    length: int
    passing: tuple[Passing, ...]
    standing: Thing
    after: Thing
    until: int

    @property
    def changed(self) -> bool:
        return self.standing.name != self.after.name


def durations(count: int, length: int, generator: Generator) -> list[range]:
    """Frames of each object, none shared. Their number in all is drawn before, so it says nothing about `count`."""
    shortest = max(2, length // 5)
    total = int(generator.integers(MOST * shortest, length + 1))
    own = shortest + generator.multinomial(total - count * shortest, np.full(count, 1 / count))
    gaps = generator.multinomial(length - total, np.full(count + 1, 1 / (count + 1)))
    found, start = [], 0
    for gap, frames in zip(gaps[:-1], own, strict=True):
        found.append(range(start + int(gap), start + int(gap + frames)))
        start = found[-1].stop
    return found


def sample(generator: Generator, length: int, held_out: bool = False) -> Clip:
    """A random clip, from the part for tests or from the other one; the set of passing objects decides."""
    count = int(generator.integers(FEWEST, MOST + 1))
    while True:
        pairs = names(count + 2, generator)
        if len(pairs) < count + 2 or any(a == b for a, b in zip(*pairs[-2:], strict=True)):
            continue  # what stands at the end must have another color and another shape
        if is_held_out([" ".join(pair) for pair in pairs[:count]]) == held_out:
            break
    looks = [
        Thing(color, shape, 0.0, 0.0, float(generator.uniform(*AREA)), float(generator.uniform(-0.35, 0.35)), None)
        for color, shape in pairs
    ]
    corner = [float(v) for v in generator.choice([0.0, 1.0], 2)]
    there = [SIDE / 2 + (2 * side - 1) * generator.uniform(14, 17) for side in corner]
    standing, after = (replace(look, x=there[0], y=there[1]) for look in looks[-2:])
    passing = []
    for look, frames in zip(looks[:count], durations(count, length, generator), strict=True):
        direction = str(generator.choice(list(DIRECTIONS)))
        axis = int(DIRECTIONS[direction][0] == 0)
        lane = SIDE / 2 - (2 * corner[1 - axis] - 1) * generator.uniform(6, 16)  # away from what stands
        near, far = generator.uniform(7, 15, 2)
        ends = (near, far + SIDE - 22) if direction in ("right", "down") else (far + SIDE - 22, near)
        begin, end = ((one, lane) if axis == 0 else (lane, one) for one in ends)
        passing.append(Passing(look, direction, begin, end, frames))
    changed = generator.random() < 0.5
    return Clip(length, tuple(passing), standing, after if changed else standing, length - max(1, length // 4))


def draw(clip: Clip, generator: Generator) -> list[NDArray[np.uint8]]:
    """Draw the frames; the background stays, and so does the shading of an object."""
    canvas = ground(SIDE, generator)
    clutter(canvas, generator)
    shades = generator.integers(2**31, size=len(clip.passing) + 2).tolist()
    frames = []
    for number in range(clip.length):
        frame = canvas.copy()
        for one, shade in zip(clip.passing, shades, strict=False):
            if number in one.frames:
                draw_thing(frame, one.at(number), generator_for(shade))
        late = number >= clip.until and clip.changed
        draw_thing(frame, clip.after if late else clip.standing, generator_for(shades[-1 if late else -2]))
        frames.append(np.clip(frame + 0.5, 0, 255).astype(np.uint8))
    return frames


def every(clip: Clip) -> list[Question]:
    """Return all questions about a clip, in a fixed order."""
    first, second = (one.thing for one in clip.passing[:2])
    questions = [Question("passing", "How many objects pass?", str(len(clip.passing)))]
    if first.color != second.color:
        questions.append(Question("second", "What colour passes second?", second.color))
    if first.shape != second.shape:
        questions.append(Question("second", "What shape passes second?", second.shape))
    questions += [
        Question("direction", f"Which direction does the {one.thing.name} move?", one.direction) for one in clip.passing
    ]
    return [*questions, Question("change", "Is the scene changed at the end?", "yes" if clip.changed else "no")]


@dataclass(frozen=True)
class ClipExample:
    """A clip (by number) and the questions about it."""

    number: int
    clip: Clip
    questions: tuple[Question, ...]

    def frames(self) -> list[NDArray[np.uint8]]:
        return draw(self.clip, generator_for(TEST_SEED, self.number, 1))


def examples(clips: int = CLIPS, each: int = EACH) -> Iterator[ClipExample]:
    """The test set, clip by clip; a shorter one is its beginning."""
    kinds: Counter[str] = Counter()
    answers: Counter[tuple[str, str]] = Counter()
    for number in range(clips):
        clip = sample(generator_for(TEST_SEED, number, 0), LENGTHS[number % len(LENGTHS)], held_out=True)
        yield ClipExample(number, clip, tuple(choose(every(clip), each, kinds, answers)))


class Clips(Scenes):
    """Fixed test set of drawn clips, scored as `scenes` is; kinds are the kinds of its questions."""

    name = "clips"

    def __init__(self, items: Sequence[Item], clips: Mapping[str, ClipExample]) -> None:
        self.items = items
        self.clips = clips

    def frames(self, image: str) -> list[Image.Image]:
        """Draw the frames of a clip, about 3 ms each."""
        if image not in self.clips:
            raise ValueError(f"clip {image!r}: there are {len(self.clips)}, from 'clip-0000' on")
        return [Image.fromarray(frame) for frame in self.clips[image].frames()]

    def open(self, image: str) -> Image.Image:
        """The frames side by side."""
        return Image.fromarray(np.concatenate([np.asarray(frame) for frame in self.frames(image)], 1))


@task_info(
    measures="600 about 200 drawn clips of 8 to 32 frames, in 4 kinds",
    scoring="the expected word",
    data="none: the clips are drawn",
)
def load(data: Path | None = None, limit: int | None = None) -> Clips:
    """Load the questions; clips are drawn when they are opened."""
    if data is not None:
        raise ValueError(f"data={str(data)!r}: the clips are drawn, leave it out")
    items: list[Item] = []
    clips = {}
    for example in examples():
        image = f"clip-{example.number:04}"
        clips[image] = example
        for number, question in enumerate(example.questions):
            items.append(Item(f"{image}-{number}", image, question.text, question.answer, (question.kind,)))
        if limit is not None and len(items) >= limit:
            break
    return Clips(items[:limit], clips)
