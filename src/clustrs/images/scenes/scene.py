"""What is in a drawn image: a few coloured shapes, some with a digit on them, and where they are."""

import zlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLOURS = {
    "red": (214, 40, 40),
    "orange": (243, 140, 30),
    "yellow": (240, 220, 50),
    "green": (45, 160, 70),
    "cyan": (60, 205, 215),
    "blue": (40, 80, 205),
    "purple": (125, 50, 170),
    "pink": (245, 140, 190),
}
REACH = {"circle": 0.565, "square": 0.708, "triangle": 0.878, "star": 0.825, "cross": 0.708, "heart": 0.80}
"""How far a shape of area 1 reaches from its centre."""
SMALLEST, LARGEST = 350.0, 1900.0
"""The area of one object, in pixels."""
TOTAL = (2000.0, 3400.0)
"""The area of all objects of a full-size image together, drawn before their number: it says nothing about it."""
MOST = 5
FULL = 160
"""Images from this side on hold as many objects as the test set's; smaller ones are for early training."""
DIGIT_AREA = 650.0
"""An object needs this area to carry a digit."""
HELD_OUT = 8
"""One in so many sets of objects is kept for tests."""


@dataclass(frozen=True)
class Thing:
    """One object: centre and area in pixels, angle in radians."""

    colour: str
    shape: str
    x: float
    y: float
    area: float
    angle: float
    digit: int | None

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def reach(self) -> float:
        return REACH[self.shape] * self.area**0.5


@dataclass(frozen=True)
class Scene:
    """A square image's objects; no two have both colour and shape in common."""

    side: int
    things: tuple[Thing, ...]

    @property
    def held_out(self) -> bool:
        """Whether images with this set of objects are for tests only, decided by the set alone."""
        return is_held_out([thing.name for thing in self.things])

    def scaled(self, side: int) -> "Scene":
        """The same scene in an image of another size."""
        by = side / self.side
        things = (replace(t, x=by * t.x, y=by * t.y, area=by * by * t.area) for t in self.things)
        return Scene(side, tuple(things))


def is_held_out(names: list[str]) -> bool:
    """Single objects are everybody's; of the larger sets one in `HELD_OUT` is for tests."""
    return len(names) > 1 and zlib.crc32("|".join(sorted(names)).encode()) % HELD_OUT == 0


def areas(count: int, total: float, generator: Generator) -> list[float]:
    """`count` areas between the smallest and the largest that add up to `total`."""
    while True:
        shares = generator.dirichlet(np.full(count, 1.5))
        parts = SMALLEST + (total - count * SMALLEST) * shares
        if parts.max() <= LARGEST:
            return [float(part) for part in parts]


def names(count: int, generator: Generator) -> list[tuple[str, str]]:
    """Different pairs of colour and shape, often with colours or shapes that repeat."""
    palette = generator.permutation(list(COLOURS))[: generator.integers(2, len(COLOURS) + 1)]
    moulds = generator.permutation(list(SHAPES))[: generator.integers(3, len(SHAPES) + 1)]
    pairs = [(str(colour), str(shape)) for colour in palette for shape in moulds]
    return [pairs[i] for i in generator.permutation(len(pairs))[:count]]


def sizes(side: int, even: bool, generator: Generator) -> list[float]:
    """Areas of the objects of an image: full-size ones obey `TOTAL`, small ones (for training) hold fewer. With `even`
    the small ones too have a total that says nothing about the number."""
    if side >= FULL:
        total = generator.uniform(*TOTAL)
        return areas(int(generator.integers(2, MOST + 1)), total, generator)
    if even:
        most = 3 if side < 120 else 4
        return areas(int(generator.integers(1, most + 1)), generator.uniform(most * SMALLEST + 50, 1850), generator)
    if side >= 96:
        return [generator.uniform(SMALLEST, 1300) for _ in range(generator.integers(1, 4))]
    return [generator.uniform(SMALLEST, 900)]


def place(side: int, reaches: list[float], generator: Generator) -> list[tuple[float, float]] | None:
    """Centres at which nothing touches anything else or the edge; `None` when they were not found quickly."""
    centres: list[tuple[float, float]] = []
    for i, reach in enumerate(reaches):
        low, high = min(reach + 1, side / 2), max(side - reach - 1, side / 2)
        for _ in range(30):
            x, y = generator.uniform(low, high, 2)
            if all((x - a) ** 2 + (y - b) ** 2 > (reach + reaches[j] + 3) ** 2 for j, (a, b) in enumerate(centres)):
                centres.append((float(x), float(y)))
                break
        if len(centres) <= i:
            return None
    return centres


def sample(generator: Generator, side: int = 192, held_out: bool = False, even: bool = False) -> Scene:
    """A random scene, from the part for tests or from the other one."""
    extents = sizes(side, even, generator)
    while True:
        pairs = names(len(extents), generator)
        if is_held_out([f"{colour} {shape}" for colour, shape in pairs]) != held_out:
            continue
        reaches = [REACH[shape] * area**0.5 for (_, shape), area in zip(pairs, extents, strict=True)]
        centres = place(side, reaches, generator)
        if centres is not None:
            break
        if side < FULL:
            extents = sizes(side, even, generator)
    things = []
    for (colour, shape), area, (x, y) in zip(pairs, extents, centres, strict=True):
        digit = int(generator.integers(10)) if area >= DIGIT_AREA and generator.random() < 0.75 else None
        things.append(Thing(colour, shape, x, y, area, float(generator.uniform(-0.35, 0.35)), digit))
    return Scene(side, tuple(things))
