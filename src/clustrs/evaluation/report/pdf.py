"""Curves of the score against the level as PDF, for papers."""

import io
from collections.abc import Mapping
from typing import Any

from clustrs.evaluation.report.blocks import Curve, Document, Figure, Panel
from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.report.latex import figure_file
from clustrs.evaluation.report.looks import LINES, Look, limits_of, looks_of

STYLE: dict[str, Any] = {
    "pdf.fonttype": 42,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLUMNS = 3
CROWDED = 6
"""From so many levels on, or when their names are long, these are written at an angle."""


def pdf_figures(document: Document) -> dict[str, bytes]:
    """Render every figure of a document, by the names of its files; nothing without matplotlib."""
    figures = [block for section in document.sections for block in section.blocks if isinstance(block, Figure)]
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
    columns = min(COLUMNS, len(figure.panels))
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
    crowded = len(ticks) > CROWDED or max(map(len, ticks)) > 6
    axis.set_xticks(range(len(ticks)), ticks, rotation=45 if crowded else 0)
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
