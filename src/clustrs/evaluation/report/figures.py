"""Curves of the score against the level, as SVG that can stand inside a page."""

import io
import re
from typing import Any

from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.report.summary import Summary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f", "#666666")
"""Okabe and Ito's colours, without the yellow that is lost on white."""
MARKERS = "osD^vPX*"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "clustrs",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
PANELS = 3
"""How many stand side by side."""


def curves(summary: Summary, family: str, prefix: str) -> str | None:
    """One panel a budget; None without matplotlib. `prefix` keeps apart the names inside several drawings of a page."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return None
    run = summary.run
    columns = min(PANELS, len(run.budgets))
    lines = -(-len(run.budgets) // columns)
    with mpl.rc_context():
        mpl.rcdefaults()
        settings: Any = mpl.rcParams
        settings.update(STYLE)
        figure = Figure(figsize=(max(5.0, 3.8 * columns), 3.4 * lines + 0.6), layout="constrained")
        FigureCanvasSVG(figure)
        panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
        shown: dict[str, Any] = {}
        for panel, budget in zip(panels, run.budgets, strict=False):
            shown |= _panel(panel, summary, family, budget)
        for panel in panels[len(run.budgets) :]:
            panel.set_axis_off()
        if shown:
            figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=min(6, len(shown)))
        content = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(content, format="svg", metadata=nothing)
    return _embedded(content.getvalue(), prefix)


def _panel(panel: Any, summary: Summary, family: str, budget: str) -> dict[str, Any]:
    """Draw the methods of a budget; the lines by name, for the legend."""
    run = summary.run
    places = ([] if summary.clean is None else [summary.clean]) + list(run.families[family])
    drawn = {}
    methods = [(label, run.find(label, budget)) for label in run.labels]
    spread = min(0.05, 0.3 / max(1, len(methods)))
    for order, (label, method) in enumerate(methods):
        if method is not None:
            again, colour = divmod(order, len(COLOURS))
            look = {"color": COLOURS[colour], "marker": MARKERS[(colour + again) % len(MARKERS)]}
            shift = spread * (order - (len(methods) - 1) / 2)
            drawn[short(plain(label), 40)] = _line(panel, summary, method, places, shift, look)
    if run.unpruned is not None:
        look = {"color": "black", "linestyle": "--", "marker": "."}
        drawn["unpruned"] = _line(panel, summary, run.unpruned, places, 0.0, look)
    names = [run.conditions[place].level_text or "clean" for place in places]
    panel.set_xticks(range(len(places)), names)
    panel.set_xlim(-0.4, len(places) - 0.6)
    panel.set_xlabel(f"{short(plain(family), 40)} level")
    if panel.get_subplotspec().is_first_col():
        panel.set_ylabel(f"score ({summary.unit})")
    panel.set_title(f"keep {budget}", fontsize=11)
    panel.grid(axis="y", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    return drawn


def _line(panel: Any, summary: Summary, method: int, places: list[int], shift: float, look: dict[str, Any]) -> Any:
    """A curve with its band; points are a little beside each other so that equal ones stay visible."""
    scale = summary.run.scale
    points = [(x + shift, summary.estimates[method][place]) for x, place in enumerate(places)]
    there = [(x, e.mean * scale) for x, e in points if e.mean is not None]
    (line,) = panel.plot([x for x, _ in there], [y for _, y in there], linewidth=1.6, markersize=5.5, **look)
    bounds = [(x, e.low * scale, e.high * scale) for x, e in points if e.low is not None and e.high is not None]
    if bounds:
        x, low, high = zip(*bounds, strict=True)
        panel.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)
    return line


def _embedded(svg: str, prefix: str) -> str:
    """The drawing without what belongs to a file of its own, its inner names with a prefix."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(?<=[\s"])id="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace('xlink:href="#', f'href="#{prefix}-')
    return re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2).strip()
