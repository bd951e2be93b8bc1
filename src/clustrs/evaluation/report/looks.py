"""How curves look, alike in the page and in the PDF figures: a colour per method, a line and marker per variant."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from clustrs.evaluation.report.blocks import Figure
from clustrs.evaluation.report.escaping import plain
from clustrs.palette import color, marker

LINES: Mapping[str, tuple[str, str]] = {"solid": ("-", ""), "dashed": ("--", "6 3"), "dotted": (":", "2 3")}
"""For matplotlib and for SVG: what tells apart variants of a method, which have one colour."""


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    color: str
    marker: str
    line: str


def looks_of(figure: Figure) -> dict[str, Look]:
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


def limits_of(figure: Figure) -> tuple[float, float]:
    """The vertical range of all panels, so that they can be compared."""
    points = [point for panel in figure.panels for curve in panel.curves for point in curve.points]
    values = [v for p in points for v in (p.mean, p.low, p.high) if v is not None]
    if not values:
        return 0.0, 1.0
    margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1.0
    return min(values) - margin, max(values) + margin


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most so many round numbers between two bounds."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]
