"""Curves of the score against the level, as SVG that stands inside a page and follows its colours."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clustrs.evaluation.report.blocks import Curve, Figure, Panel, Point
from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.report.looks import LINES, Look, limits_of, looks_of, round_ticks

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 28, 52
"""Pixels of a panel, which fits the width of a telephone, and of its margins."""
CROWDED = 6
"""From so many levels on, or when their names are long, these are written at an angle."""
UNPRUNED = "#000000"
"""This colour stands for the page's own text colour, which is light in the dark."""


@dataclass(frozen=True)
class Mark:
    """A point: where its marker is, the index of its tick, and its numbers in words."""

    at: str
    tick: int
    words: str


@dataclass(frozen=True)
class Trace:
    """A curve ready to be written: paths of its line and band, and its marks; `key` says whose curve it is."""

    key: int
    look: Look
    line: str
    band: str
    marks: tuple[Mark, ...]

    @property
    def color(self) -> str:
        return ink(self.look)

    @property
    def dashes(self) -> str:
        return LINES[self.look.line][1]

    @property
    def marker(self) -> str:
        return marker_path(self.look.marker)


@dataclass(frozen=True)
class Plot:
    """A panel ready to be written: ticks are pixels and texts."""

    title: str
    x_ticks: tuple[tuple[str, str], ...]
    y_ticks: tuple[tuple[str, str], ...]
    traces: tuple[Trace, ...]
    slanted: bool


@dataclass(frozen=True)
class Entry:
    """A line of the legend."""

    key: int
    label: str
    color: str
    dashes: str
    marker: str


@dataclass(frozen=True)
class Drawing:
    """A figure in parts that a page can arrange."""

    plots: tuple[Plot, ...]
    legend: tuple[Entry, ...]


def draw(figure: Figure) -> Drawing:
    """Work out where everything in a figure lies."""
    looks, limits = looks_of(figure), limits_of(figure)
    keys = {label: key for key, label in enumerate(looks)}
    plots = tuple(_plot(figure, panel, looks, keys, limits) for panel in figure.panels)
    legend = tuple(
        Entry(keys[label], short(plain(label), 60), ink(look), LINES[look.line][1], marker_path(look.marker))
        for label, look in looks.items()
    )
    return Drawing(plots, legend)


def ink(look: Look) -> str:
    """The colour of a curve in a page that may be light or dark."""
    return "currentColor" if look.color == UNPRUNED else look.color


def marker_path(name: str) -> str:
    """The outline of a marker, named as matplotlib does, within 5 pixels around 0."""
    if name in "ox8":
        return {
            "o": "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z",
            "x": "M-4 -4L4 4M-4 4L4 -4",
            "8": _star(8, 4.4, 4.4, math.pi / 8),
        }[name]
    if name in "PX":
        return _star(4, 5.2, 2.2, math.pi / 4 if name == "X" else 0.0)
    shapes = {
        "s": _star(4, 5, 5, math.pi / 4),
        "D": _star(4, 5, 5, 0),
        "d": "M0 -5L3 0L0 5L-3 0Z",
        "^": _star(3, 5, 5, 0),
        "v": _star(3, 5, 5, math.pi),
        "<": _star(3, 5, 5, -math.pi / 2),
        ">": _star(3, 5, 5, math.pi / 2),
        "*": _star(5, 5.8, 2.4, 0),
        "p": _star(5, 5, 5, 0),
        "h": _star(6, 4.8, 4.8, 0),
    }
    return shapes[name]


def _star(count: int, outer: float, inner: float, turn: float) -> str:
    """A star, or a regular polygon where both radii are equal; the first corner points up, then it is turned."""
    radii = [outer] * count if outer == inner else [outer, inner] * count
    corners = []
    for i, radius in enumerate(radii):
        angle = turn + 2 * math.pi * i / len(radii)
        corners.append(f"{radius * math.sin(angle):.2f} {-radius * math.cos(angle):.2f}")
    return f"M{'L'.join(corners)}Z"


def _plot(
    figure: Figure, panel: Panel, looks: Mapping[str, Look], keys: Mapping[str, int], limits: tuple[float, float]
) -> Plot:
    ticks = [short(plain(tick), 12) for tick in figure.ticks]
    heights = round_ticks(*limits)
    return Plot(
        title=panel.title,
        x_ticks=tuple((f"{_x(i, len(ticks)):.1f}", tick) for i, tick in enumerate(ticks)),
        y_ticks=tuple((f"{_y(value, limits):.1f}", f"{value:g}") for value in heights),
        traces=tuple(_trace(figure, curve, keys[curve.label], looks[curve.label], limits) for curve in panel.curves),
        slanted=len(ticks) > CROWDED or max(map(len, ticks)) > 6,
    )


def _x(tick: int, count: int) -> float:
    """A lone tick lies in the middle, several are spread."""
    inner = WIDTH - LEFT - RIGHT
    return LEFT + inner * (0.5 if count == 1 else 0.06 + 0.88 * tick / (count - 1))


def _y(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _trace(figure: Figure, curve: Curve, key: int, look: Look, limits: tuple[float, float]) -> Trace:
    count = len(figure.ticks)
    places = [f"{_x(p.x, count):.1f} {_y(p.mean, limits):.1f}" for p in curve.points]
    marks = tuple(
        Mark(place, point.x, _words(figure, curve, point)) for place, point in zip(places, curve.points, strict=True)
    )
    known = [(p.x, p.low, p.high) for p in curve.points if p.low is not None and p.high is not None]
    upper = [f"{_x(x, count):.1f} {_y(high, limits):.1f}" for x, _, high in known]
    lower = [f"{_x(x, count):.1f} {_y(low, limits):.1f}" for x, low, _ in reversed(known)]
    band = f"M{'L'.join([*upper, *lower])}Z" if len(known) > 1 else ""
    return Trace(key, look, f"M{'L'.join(places)}" if places else "", band, marks)


def _words(figure: Figure, curve: Curve, point: Point) -> str:
    """What a reader sees who points at a mark."""
    number = f"{point.mean:.{figure.decimals}f}"
    bounds = ""
    if point.low is not None and point.high is not None:
        bounds = f" [{point.low:.{figure.decimals}f}, {point.high:.{figure.decimals}f}]"
    return f"{short(plain(curve.label), 60)}: {number}{bounds}"
