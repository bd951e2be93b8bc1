"""Curves of the score against the level as SVG whose colours follow the page's theme, with a number on every point."""

from dataclasses import dataclass
from typing import Any

from clustrs.evaluation.report.blocks import Curve, Figure
from clustrs.palette import color, marker

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 44
INK = "currentColor"
"""What the unpruned model is drawn in: its black would vanish in the dark."""


@dataclass(frozen=True)
class Mark:
    """A point of a curve; `text` is what it says when it is pointed at."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve in the units of the drawing: the path through its points, its interval's outline, its marker's path."""

    label: str
    color: str
    dashed: bool
    path: str
    band: str
    marker: str
    filled: bool
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """Everything a template needs to draw one panel."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]


def draw_panel(figure: Figure, index: int) -> Chart:
    """One panel of a figure."""
    from matplotlib.ticker import MaxNLocator

    curves = figure.panels[index].curves
    values = [v for c in curves for p in c.points for v in (p.mean, p.low, p.high) if v is not None] or [0.0]
    ticks = [float(tick) for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(min(values), max(values))]
    scale = _Scale(len(figure.ticks), min(ticks), max(ticks))
    return Chart(
        title=figure.title,
        x_label=figure.x_label,
        y_label=figure.y_label,
        x_ticks=tuple((scale.x(i), tick) for i, tick in enumerate(figure.ticks)),
        y_ticks=tuple((scale.y(tick), f"{tick:g}") for tick in ticks),
        lines=tuple(_line(curve, scale, figure.ticks) for curve in curves),
    )


@dataclass(frozen=True)
class _Scale:
    """From levels and scores to the units of the drawing."""

    count: int
    low: float
    high: float

    def x(self, index: float) -> float:
        room = WIDTH - LEFT - RIGHT - 40
        return round(LEFT + 20 + room * (index / (self.count - 1) if self.count > 1 else 0.5), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def _line(curve: Curve, scale: _Scale, ticks: tuple[str, ...]) -> Line:
    unpruned = curve.method == "none"
    marks = tuple(
        Mark(scale.x(p.x), scale.y(p.mean), f"{curve.label}, {ticks[p.x]}: {p.mean:.3g}{_interval(p)}")
        for p in curve.points
    )
    bounds = [
        (scale.x(p.x), scale.y(p.low), scale.y(p.high))
        for p in curve.points
        if p.low is not None and p.high is not None
    ]
    outline = [(x, high) for x, _, high in bounds] + [(x, low) for x, low, _ in reversed(bounds)]
    path, filled = marker_path(marker(curve.method))
    return Line(
        label=curve.label,
        color=INK if unpruned else color(curve.method),
        dashed=unpruned,
        path=_path([(mark.x, mark.y) for mark in marks]),
        band=_path(outline),
        marker=path,
        filled=filled,
        marks=marks,
    )


def _interval(point: Any) -> str:
    return "" if point.low is None or point.high is None else f" [{point.low:.3g}, {point.high:.3g}]"


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def marker_path(name: str) -> tuple[str, bool]:
    """The outline of one of matplotlib's markers, about 8 units wide, and whether it is filled."""
    from matplotlib.markers import MarkerStyle

    style = MarkerStyle(name)
    path = style.get_path().transformed(style.get_transform())
    polygons: Any = path.to_polygons(closed_only=False)
    return "".join(_path([(8 * x, -8 * y) for x, y in polygon]) for polygon in polygons), bool(style.is_filled())
