"""Curves of the score against the level: as SVG inside a page, of the report or of the app, and as PDF for papers."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustrs.palette import color, marker
from clustrs.tables import plain, short

WIDTH, HEIGHT = 400, 300


LEFT, RIGHT, TOP, BOTTOM = 52, 10, 28, 52
"""Pixels of a panel, which fits the width of a telephone, and of its margins."""


CROWDED = 6
"""Number of levels above which their names are written at an angle."""


MARKERS = {
    "8": (8, 4.4, 4.4, 1 / 16),
    "P": (4, 5.2, 2.2, 0),
    "X": (4, 5.2, 2.2, 1 / 8),
    "s": (4, 5, 5, 1 / 8),
    "D": (4, 5, 5, 0),
    "^": (3, 5, 5, 0),
    "v": (3, 5, 5, 1 / 2),
    "<": (3, 5, 5, -1 / 4),
    ">": (3, 5, 5, 1 / 4),
    "*": (5, 5.8, 2.4, 0),
    "p": (5, 5, 5, 0),
    "h": (6, 4.8, 4.8, 0),
}
"""Stars, or polygons where both radii are equal: corners, outer and inner radius, and a turn in parts of a circle."""
UNPRUNED = "#000000"
"""This color stands for the page's own text color, which is light in the dark."""
LINES: Mapping[str, tuple[str, str]] = {"solid": ("-", ""), "dashed": ("--", "6 3"), "dotted": (":", "2 3")}
"""Lines, for matplotlib and for SVG, of the variants of a method, which share a color."""
STYLE: dict[str, Any] = {
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Point:
    """A mean, and its interval where there is one; x is the index of a tick."""

    x: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """The points of a method; `method` is its name, which has a color, and `label` also tells its variants apart."""

    method: str
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """The curves of one budget."""

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Figure:
    """Panels with the same axes. `ticks` label the horizontal axis; `decimals` are those of the scores. `name` is that
    of a file."""

    title: str
    x_label: str
    y_label: str
    ticks: tuple[str, ...]
    panels: tuple[Panel, ...]
    decimals: int
    name: str


@dataclass(frozen=True)
class Look:
    """Color, marker and line of a curve."""

    color: str
    marker: str
    line: str


def looks_of(figure: Figure) -> dict[str, Look]:
    """Return the look of each label: a method's color; variants of it differ in line and marker."""
    looks: dict[str, Look] = {}
    variants: dict[str, int] = {}
    for curve in (curve for panel in figure.panels for curve in panel.curves):
        if curve.label not in looks:
            number = variants.get(curve.method, 0)
            variants[curve.method] = number + 1
            name = plain(curve.method if not number else curve.label)
            line = "dashed" if curve.method == "none" else list(LINES)[number % len(LINES)]
            looks[curve.label] = Look(color(plain(curve.method)), marker(name), line)
    return looks


def limits_of(figure: Figure) -> tuple[float, float]:
    """Return the vertical range of all panels, so that they can be compared."""
    points = [point for panel in figure.panels for curve in panel.curves for point in curve.points]
    values = [v for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if not values:
        return 0.0, 1.0
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1.0
    return min(values) - margin, max(values) + margin


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` + 1 round numbers between two bounds."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


@dataclass(frozen=True)
class Trace:
    """A curve in pixels, ready for a template, or its entry in the legend, which has no paths.

    `key` identifies the label in all panels; `marks` are the position of each point, the index of its tick, and its
    numbers in words.
    """

    key: int
    label: str
    color: str
    dashes: str
    marker: str
    line: str = ""
    band: str = ""
    marks: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class Plot:
    """A panel in pixels, ready for a template: ticks are positions and texts."""

    title: str
    x_ticks: tuple[tuple[str, str], ...]
    y_ticks: tuple[tuple[str, str], ...]
    traces: tuple[Trace, ...]
    slanted: bool


@dataclass(frozen=True)
class Drawing:
    """A figure in pixels: its panels and its legend."""

    plots: tuple[Plot, ...]
    legend: tuple[Trace, ...]


def draw(figure: Figure) -> Drawing:
    """Compute the positions of everything in a figure."""
    limits = limits_of(figure)
    legend = {
        label: Trace(
            key=key,
            label=short(plain(label), 60),
            color="currentColor" if look.color == UNPRUNED else look.color,
            dashes=LINES[look.line][1],
            marker=marker_path(look.marker),
        )
        for key, (label, look) in enumerate(looks_of(figure).items())
    }
    ticks = [short(plain(tick), 12) for tick in figure.ticks]
    plots = tuple(
        Plot(
            title=panel.title,
            x_ticks=tuple((f"{_x(i, len(ticks)):.1f}", tick) for i, tick in enumerate(ticks)),
            y_ticks=tuple((f"{_y(value, limits):.1f}", f"{value:g}") for value in round_ticks(*limits)),
            traces=tuple(_trace(figure, curve, legend[curve.label], limits) for curve in panel.curves),
            slanted=_crowded(ticks),
        )
        for panel in figure.panels
    )
    return Drawing(plots, tuple(legend.values()))


def marker_path(name: str) -> str:
    """Return the outline of a marker, named as in matplotlib, within 6 pixels around 0."""
    drawn = {"o": "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z", "x": "M-4 -4L4 4M-4 4L4 -4", "d": "M0 -5L3 0L0 5L-3 0Z"}
    if name in drawn:
        return drawn[name]
    count, outer, inner, turn = MARKERS[name]
    radii = [outer] * count if outer == inner else [outer, inner] * count
    angles = [math.tau * (turn + i / len(radii)) for i in range(len(radii))]
    return _path(f"{r * math.sin(a):.2f} {-r * math.cos(a):.2f}" for r, a in zip(radii, angles, strict=True)) + "Z"


def _crowded(ticks: Sequence[str]) -> bool:
    """Return whether the labels of an axis must be written at an angle."""
    return len(ticks) > CROWDED or max(map(len, ticks)) > 6


def _x(tick: int, count: int) -> float:
    """A lone tick lies in the middle, several are spread."""
    inner = WIDTH - LEFT - RIGHT
    return LEFT + inner * (0.5 if count == 1 else 0.06 + 0.88 * tick / (count - 1))


def _y(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _path(points: Iterable[str]) -> str:
    return f"M{'L'.join(points)}"


def _trace(figure: Figure, curve: Curve, entry: Trace, limits: tuple[float, float]) -> Trace:
    def at(x: int, y: float) -> str:
        return f"{_x(x, len(figure.ticks)):.1f} {_y(y, limits):.1f}"

    known = [(p.x, p.low, p.high) for p in curve.points if p.low is not None and p.high is not None]
    outline = [*(at(x, high) for x, _, high in known), *(at(x, low) for x, low, _ in reversed(known))]
    marks = tuple((at(p.x, p.mean), p.x, f"{entry.label}: {_numbers(p, figure.decimals)}") for p in curve.points)
    return replace(
        entry,
        line=_path(place for place, *_ in marks) if marks else "",
        band=_path(outline) + "Z" if len(known) > 1 else "",
        marks=marks,
    )


def _numbers(point: Point, decimals: int) -> str:
    number = f"{point.mean:.{decimals}f}"
    return (
        number
        if point.low is None or point.high is None
        else f"{number} [{point.low:.{decimals}f}, {point.high:.{decimals}f}]"
    )


def figure_file(figure: Figure) -> str:
    """Return the name of the PDF file of a figure."""
    return f"report-{figure.name}.pdf"


def pdf_figures(figures: Sequence[Figure]) -> dict[str, bytes]:
    """Render figures as PDF, by the names of their files; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return {}
    with mpl.rc_context():
        mpl.rcdefaults()
        settings: Any = mpl.rcParams
        settings.update(STYLE)
        return {figure_file(figure): _draw(figure) for figure in figures}


def _draw(figure: Figure) -> bytes:
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure as Canvas

    looks, limits = looks_of(figure), limits_of(figure)
    columns = min(3, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    canvas = Canvas(figsize=(max(4.2, 2.6 * columns), 2.3 * rows + 0.5), layout="constrained")
    FigureCanvasPdf(canvas)
    axes: Any = canvas.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(figure.panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, figure.panels, strict=False):
        _panel(axis, figure, panel, looks)
        axis.set_ylim(*limits)
    for axis in axes[:, 0]:
        axis.set_ylabel(figure.y_label)
    shown = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    canvas.legend(shown.values(), shown, loc="outside lower center", ncols=4, frameon=False)
    content = io.BytesIO()
    canvas.savefig(content, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None})
    return content.getvalue()


def _panel(axis: Any, figure: Figure, panel: Panel, looks: Mapping[str, Look]) -> None:
    for curve in panel.curves:
        _curve(axis, curve, looks[curve.label])
    ticks = [short(plain(tick), 12) for tick in figure.ticks]
    axis.set_xticks(range(len(ticks)), ticks, rotation=45 if _crowded(ticks) else 0)
    axis.set_xlim(-0.4, len(ticks) - 0.6)
    axis.set_xlabel(short(plain(figure.x_label), 40))
    axis.set_title(panel.title, fontsize=9)
    axis.grid(axis="y", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)


def _curve(axis: Any, curve: Curve, look: Look) -> None:
    """A curve with its band."""
    x, y = [point.x for point in curve.points], [point.mean for point in curve.points]
    style = {"linestyle": LINES[look.line][0], "color": look.color, "marker": look.marker}
    axis.plot(x, y, **style, linewidth=1.3, markersize=4.5, label=short(plain(curve.label), 40))
    bounds = [(p.x, p.low, p.high) for p in curve.points if p.low is not None and p.high is not None]
    if bounds:
        axis.fill_between(*zip(*bounds, strict=True), color=look.color, alpha=0.12, linewidth=0)
