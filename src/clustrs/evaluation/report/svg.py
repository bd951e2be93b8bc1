"""Curves of the score against the level, as SVG that can stand inside a page."""

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clustrs.evaluation.report.blocks import Curve, Figure, Panel
from clustrs.evaluation.report.escaping import plain, short
from clustrs.palette import color, marker

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "clustrs",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDTH, HEIGHT = 4.2, 3.3
"""Inches of a panel: it fits the width of a telephone."""
CROWDED = 6
"""From so many levels on, or when their names are long, these are written at an angle."""
LINES: Mapping[str, tuple[str, str]] = {"solid": ("-", ""), "dashed": ("--", "6 3"), "dotted": (":", "2 3")}
"""For matplotlib and for SVG: what tells apart variants of a method, which have one colour."""


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    color: str
    marker: str
    line: str


@dataclass(frozen=True)
class Drawing:
    """A figure in parts that a page can arrange: an SVG per panel, and for the legend one per label."""

    panels: tuple[str, ...]
    legend: tuple[tuple[str, str], ...]


def draw(figure: Figure, prefix: str) -> Drawing | None:
    """Draw a figure; None without matplotlib. `prefix` keeps apart the names inside several drawings of a page."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    looks = _looks(figure)
    with mpl.rc_context():
        mpl.rcdefaults()
        settings: Any = mpl.rcParams
        settings.update(STYLE)
        limits = _limits(figure)
        panels = [_panel(figure, p, looks, limits, f"{prefix}-{i + 1}") for i, p in enumerate(figure.panels)]
    legend = [(short(plain(label), 60), _swatch(look)) for label, look in looks.items()]
    return Drawing(tuple(panels), tuple(legend))


def _looks(figure: Figure) -> dict[str, Look]:
    """The look of each label: a method's colour; variants of it differ in line and marker."""
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


def _limits(figure: Figure) -> tuple[float, float] | None:
    """The vertical range of all panels, so that they can be compared."""
    points = [point for panel in figure.panels for curve in panel.curves for point in curve.points]
    values = [v for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if not values:
        return None
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1.0
    return min(values) - margin, max(values) + margin


def _panel(
    figure: Figure, panel: Panel, looks: Mapping[str, Look], limits: tuple[float, float] | None, prefix: str
) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasSVG(canvas)
    axes: Any = canvas.subplots()
    spread = min(0.05, 0.3 / max(1, len(panel.curves)))
    for order, curve in enumerate(panel.curves):
        _line(axes, curve, spread * (order - (len(panel.curves) - 1) / 2), looks[curve.label])
    ticks = [short(plain(tick), 12) for tick in figure.ticks]
    crowded = len(ticks) > CROWDED or max(map(len, ticks)) > 6
    axes.set_xticks(range(len(ticks)), ticks, rotation=45 if crowded else 0)
    axes.set_xlim(-0.4, len(ticks) - 0.6)
    if limits is not None:
        axes.set_ylim(*limits)
    axes.set_xlabel(short(plain(figure.x_label), 40))
    axes.set_ylabel(figure.y_label)
    axes.set_title(panel.title, fontsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    content = io.StringIO()
    canvas.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _embedded(content.getvalue(), prefix)


def _line(axes: Any, curve: Curve, shift: float, look: Look) -> None:
    """A curve with its band; points are shifted a little so that equal ones stay visible."""
    x, y = [point.x + shift for point in curve.points], [point.mean for point in curve.points]
    style = LINES[look.line][0]
    axes.plot(x, y, linestyle=style, linewidth=1.6, markersize=5.5, color=look.color, marker=look.marker)
    bounds = [(p.x + shift, p.low, p.high) for p in curve.points if p.low is not None and p.high is not None]
    if bounds:
        axes.fill_between(*zip(*bounds, strict=True), color=look.color, alpha=0.12, linewidth=0)


def _swatch(look: Look) -> str:
    """A short piece of a curve with its marker, for the legend."""
    from matplotlib.markers import MarkerStyle

    style = MarkerStyle(look.marker)
    path = style.get_path().transformed(style.get_transform())
    shapes = "".join(_outline(polygon) for polygon in path.to_polygons(closed_only=False))
    filled = look.color if style.is_filled() else "none"
    return (
        f'<svg width="36" height="14" viewBox="-18 -7 36 14" aria-hidden="true"><g stroke="{look.color}">'
        f'<path d="M-18 0H18" stroke-width="1.8" stroke-dasharray="{LINES[look.line][1]}"/>'
        f'<path d="{shapes}" transform="scale(8)" stroke-width="0.15" fill="{filled}"/></g></svg>'
    )


def _outline(points: Any) -> str:
    """A path through points; downwards is positive in SVG."""
    return "M" + "L".join(f"{x:.3f} {-y:.3f}" for x, y in points)


def _embedded(svg: str, prefix: str) -> str:
    """The drawing without what belongs to a file of its own, its inner names with a prefix."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(?<=[\s"])id="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace('xlink:href="#', f'href="#{prefix}-')
    return re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2).strip()
