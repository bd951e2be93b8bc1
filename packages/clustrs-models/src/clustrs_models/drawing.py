"""Drawn scenes: a few colored shapes, some with a digit on them, and their rendering with numpy alone."""

import zlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLORS = {
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
"""Distance from the center of a shape of area 1 to its farthest point."""
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
"""One in this many sets of objects is kept for tests."""


@dataclass(frozen=True)
class Thing:
    """One object: center and area in pixels, angle in radians."""

    color: str
    shape: str
    x: float
    y: float
    area: float
    angle: float
    digit: int | None

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def reach(self) -> float:
        return REACH[self.shape] * self.area**0.5


@dataclass(frozen=True)
class Scene:
    """Objects of a square image; no two have both color and shape in common."""

    side: int
    things: tuple[Thing, ...]

    @property
    def held_out(self) -> bool:
        """True if images with this set of objects are for tests only; the set alone decides."""
        return is_held_out([thing.name for thing in self.things])

    def scaled(self, side: int) -> "Scene":
        """The same scene in an image of another size."""
        by = side / self.side
        things = (replace(t, x=by * t.x, y=by * t.y, area=by * by * t.area) for t in self.things)
        return Scene(side, tuple(things))


def is_held_out(names: list[str]) -> bool:
    """Return True for one in `HELD_OUT` sets of two objects or more; single objects are never held out."""
    return len(names) > 1 and zlib.crc32("|".join(sorted(names)).encode()) % HELD_OUT == 0


def areas(count: int, total: float, generator: Generator) -> list[float]:
    """`count` areas between the smallest and the largest that add up to `total`."""
    while True:
        shares = generator.dirichlet(np.full(count, 1.5))
        parts = SMALLEST + (total - count * SMALLEST) * shares
        if parts.max() <= LARGEST:
            return [float(part) for part in parts]


def names(count: int, generator: Generator) -> list[tuple[str, str]]:
    """Different pairs of color and shape, often with colors or shapes that repeat."""
    palette = generator.permutation(list(COLORS))[: generator.integers(2, len(COLORS) + 1)]
    moulds = generator.permutation(list(SHAPES))[: generator.integers(3, len(SHAPES) + 1)]
    pairs = [(str(color), str(shape)) for color in palette for shape in moulds]
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
    """Centers at which nothing touches anything else or the edge; `None` when they were not found quickly."""
    centers: list[tuple[float, float]] = []
    for i, reach in enumerate(reaches):
        low, high = min(reach + 1, side / 2), max(side - reach - 1, side / 2)
        for _ in range(30):
            x, y = generator.uniform(low, high, 2)
            if all((x - a) ** 2 + (y - b) ** 2 > (reach + reaches[j] + 3) ** 2 for j, (a, b) in enumerate(centers)):
                centers.append((float(x), float(y)))
                break
        if len(centers) <= i:
            return None
    return centers


def sample(generator: Generator, side: int = 192, held_out: bool = False, even: bool = False) -> Scene:
    """A random scene, from the part for tests or from the other one."""
    extents = sizes(side, even, generator)
    while True:
        pairs = names(len(extents), generator)
        if is_held_out([f"{color} {shape}" for color, shape in pairs]) != held_out:
            continue
        reaches = [REACH[shape] * area**0.5 for (_, shape), area in zip(pairs, extents, strict=True)]
        centers = place(side, reaches, generator)
        if centers is not None:
            break
        if side < FULL:
            extents = sizes(side, even, generator)
    things = []
    for (color, shape), area, (x, y) in zip(pairs, extents, centers, strict=True):
        digit = int(generator.integers(10)) if area >= DIGIT_AREA and generator.random() < 0.75 else None
        things.append(Thing(color, shape, x, y, area, float(generator.uniform(-0.35, 0.35)), digit))
    return Scene(side, tuple(things))


Floats = NDArray[np.float32]
PATCH = 8
"""Side of the patches in which coverage is counted."""
BLACK_ON = ("orange", "yellow", "cyan", "pink")
GLYPHS = (
    "01110 10001 10001 10001 10001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
DIGITS = np.array([[[int(bit) for bit in row] for row in glyph.split()] for glyph in GLYPHS], np.float32)
HEART = (1 + np.pi / 4) ** -0.5


@dataclass(frozen=True)
class Drawing:
    """`pixels`: (side, side, 3) bytes. `coverage`: (objects, rows, columns), how much of each patch an object covers.
    `digits`: the same for the box of its digit."""

    scene: Scene
    pixels: NDArray[np.uint8]
    coverage: Floats
    digits: Floats


def outside(shape: str, u: Floats, v: Floats) -> Floats:
    """About the distance from the outline of a shape of area 1 around the origin, negative inside. `v` points down."""
    if shape == "circle":
        return np.hypot(u, v) - np.float32(np.pi**-0.5)
    if shape == "square":
        return np.maximum(abs(u), abs(v)) - np.float32(0.5)
    if shape == "triangle":
        radius = (4 / 27**0.5) ** 0.5
        slope = np.float32(3**0.5 / 2) * abs(u) - np.float32(0.5) * v
        return np.maximum(slope, v) - np.float32(radius / 2)
    if shape == "star":
        radius = (5 * np.sin(np.pi / 5) / 2) ** -0.5
        sector = 2 * np.pi / 5
        angle = np.arctan2(u, -v)
        folded = abs(angle - sector * np.round(angle / sector))
        distance = np.hypot(u, v)
        tip, notch = np.array([radius, 0]), radius / 2 * np.array([np.cos(sector / 2), np.sin(sector / 2)])
        along = (notch - tip) / np.hypot(*(notch - tip))
        normal = np.array([along[1], -along[0]])
        return (distance * (normal[0] * np.cos(folded) + normal[1] * np.sin(folded)) - normal @ tip).astype(np.float32)
    if shape == "cross":
        half = 0.5 / 5**0.5
        wide, tall = abs(u), abs(v)
        return np.minimum(np.maximum(wide - 3 * half, tall - half), np.maximum(wide - half, tall - 3 * half))
    side = HEART
    down = v - np.float32(0.06)
    diamond = (abs(u) + abs(down)) / 2**0.5 - side / 2
    lobes = np.hypot(abs(u) - side / 8**0.5, down + side / 8**0.5) - side / 2
    return np.minimum(diamond, lobes).astype(np.float32)


def upsampling(cells: int, side: int) -> Floats:
    """(side, cells): linear interpolation from a coarse grid to pixels."""
    at = np.linspace(0, cells - 1, side, dtype=np.float32)
    return np.maximum(0, 1 - abs(at[:, None] - np.arange(cells, dtype=np.float32)))


def smooth(cells: int, side: int, channels: int, generator: Generator) -> Floats:
    """Normal noise on a coarse grid, interpolated."""
    across = upsampling(cells, side)
    grid = generator.standard_normal((channels, cells, cells), dtype=np.float32)
    return np.moveaxis((across @ grid @ across.T).astype(np.float32), 0, -1)


def ground(side: int, generator: Generator) -> Floats:
    """An uneven, textured background in muted colors."""
    value = generator.uniform(60, 190) + generator.normal(0, 12, 3)
    canvas = np.broadcast_to(value.astype(np.float32), (side, side, 3)).copy()
    canvas += np.float32(generator.uniform(5, 22)) * smooth(4, side, 3, generator) * np.float32(0.5)
    canvas += np.float32(generator.uniform(5, 25)) * smooth(3, side, 1, generator)
    canvas += np.float32(generator.uniform(0, 9)) * smooth(max(4, side // 5), side, 1, generator)
    if generator.random() < 0.4:
        angle, period, phase = generator.uniform(0, np.pi), generator.uniform(7, 30), generator.uniform(0, 2 * np.pi)
        line = np.arange(side, dtype=np.float32) * np.float32(2 * np.pi / period)
        waves = np.sin(line[:, None] * np.float32(np.sin(angle)) + line * np.float32(np.cos(angle)) + np.float32(phase))
        canvas += np.float32(generator.uniform(2, 9)) * waves[..., None]
    canvas += np.float32(generator.uniform(1, 5)) * generator.standard_normal((side, side, 1), dtype=np.float32)
    return canvas


def blend(canvas: Floats, alpha: Floats, color: Floats, top: int, left: int) -> None:
    height, width = alpha.shape
    window = canvas[top : top + height, left : left + width]
    window += alpha[..., None] * (color - window)


def box(x: float, y: float, reach: float, side: int) -> tuple[int, int, Floats, Floats]:
    """Top, left and centerd coordinates of the pixels around a point."""
    left, right = max(0, int(x - reach - 1)), min(side, int(x + reach + 3))
    top, bottom = max(0, int(y - reach - 1)), min(side, int(y + reach + 3))
    across = np.arange(left, right, dtype=np.float32) + np.float32(0.5 - x)
    down = np.arange(top, bottom, dtype=np.float32) + np.float32(0.5 - y)
    return top, left, np.broadcast_to(across, (len(down), len(across))), down[:, None]


def clutter(canvas: Floats, generator: Generator) -> None:
    """Things that are not objects: specks of any color, and strokes of a color near the ground's."""
    side = len(canvas)
    palette = np.array(list(COLORS.values()), np.float32)
    for _ in range(generator.poisson(10 * side**2 / 192**2)):
        x, y = generator.uniform(0, side, 2)
        radius = generator.uniform(0.8, 2.6)
        color = palette[generator.integers(len(palette))] if generator.random() < 0.5 else generator.uniform(20, 235, 3)
        top, left, u, v = box(x, y, radius, side)
        blend(canvas, np.clip(0.5 + radius - np.hypot(u, v), 0, 1), np.asarray(color, np.float32), top, left)
    for _ in range(generator.poisson(4 * side**2 / 192**2)):
        x, y = generator.uniform(0, side, 2)
        length, angle, width = generator.uniform(8, 30), generator.uniform(0, np.pi), generator.uniform(0.5, 1.3)
        top, left, u, v = box(x, y, length, side)
        cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        distance = np.maximum(abs(u * cos + v * sin) - np.float32(length), abs(v * cos - u * sin) - np.float32(width))
        color = canvas[int(y), int(x)] + np.float32(generator.choice([-1, 1]) * generator.uniform(20, 60))
        blend(canvas, np.clip(0.5 - distance, 0, 1), color, top, left)


def glyph(digit: int, u: Floats, v: Floats, cell: float) -> Floats:
    """Return the share of ink of each pixel around the center of a digit."""
    ink = np.zeros(np.broadcast_shapes(u.shape, v.shape), np.float32)
    for du, dv in ((-0.25, -0.25), (-0.25, 0.25), (0.25, -0.25), (0.25, 0.25)):
        column = np.floor((u + np.float32(du)) / np.float32(cell) + np.float32(2.5)).astype(int)
        row = np.floor((v + np.float32(dv)) / np.float32(cell) + np.float32(3.5)).astype(int)
        inside = (column >= 0) & (column < 5) & (row >= 0) & (row < 7)
        ink += np.where(inside, DIGITS[digit][np.clip(row, 0, 6), np.clip(column, 0, 4)], 0)
    return np.float32(0.25) * ink


def by_patch(alpha: Floats, top: int, left: int, side: int) -> Floats:
    """The mean of `alpha` over each patch of the image."""
    cells = side // PATCH
    full = np.zeros((side, side), np.float32)
    full[top : top + alpha.shape[0], left : left + alpha.shape[1]] = alpha
    return full.reshape(cells, PATCH, cells, PATCH).mean((1, 3)).astype(np.float32)


def draw_thing(canvas: Floats, thing: Thing, generator: Generator) -> tuple[Floats, Floats]:
    """Draw an object; what it and its digit cover, patch by patch."""
    side, scale = len(canvas), np.float32(thing.area**0.5)
    top, left, u, v = box(thing.x, thing.y, thing.reach, side)
    cos, sin = np.float32(np.cos(thing.angle)), np.float32(np.sin(thing.angle))
    turned_u, turned_v = (
        ((u * cos + v * sin) / scale).astype(np.float32),
        ((v * cos - u * sin) / scale).astype(np.float32),
    )
    alpha = np.clip(0.5 - scale * outside(thing.shape, turned_u, turned_v), 0, 1).astype(np.float32)
    base = np.asarray(COLORS[thing.color], np.float32) * np.float32(generator.uniform(0.85, 1.1))
    base = base + generator.normal(0, 6, 3).astype(np.float32)
    tilt = generator.uniform(-14, 14, 2).astype(np.float32) / scale
    shade = (u * tilt[0] + v * tilt[1])[..., None]
    blend(canvas, alpha, base + shade, top, left)
    covered = by_patch(alpha, top, left, side)
    if thing.digit is None:
        return covered, np.zeros_like(covered)
    cell = float(scale) / 11
    tone = np.float32(generator.uniform(10, 40) if thing.color in BLACK_ON else generator.uniform(220, 250))
    blend(canvas, alpha * glyph(thing.digit, u, v, cell), np.full(3, tone, np.float32), top, left)
    printed = ((abs(u) <= np.float32(2.5 * cell)) & (abs(v) <= np.float32(3.5 * cell))).astype(np.float32)
    return covered, by_patch(printed, top, left, side)


def draw(scene: Scene, generator: Generator) -> Drawing:
    """Draw a scene; background, clutter and shading come from `generator`."""
    canvas = ground(scene.side, generator)
    clutter(canvas, generator)
    covered = [draw_thing(canvas, thing, generator) for thing in scene.things]
    pixels = np.clip(canvas + 0.5, 0, 255).astype(np.uint8)
    return Drawing(scene, pixels, np.stack([a for a, _ in covered]), np.stack([b for _, b in covered]))
