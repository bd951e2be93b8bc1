"""A report as a document of sections and blocks, rendered as Markdown, LaTeX and one HTML page.

Blocks are texts, tables, drawings and figures: curves as SVG inside a page, of the report or of the app, and as PDF.
"""

import math
import re
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.palette import color, dark_css, marker
from clustrs.tables import NOTHING, Table, for_markdown, for_tex, plain, short

if TYPE_CHECKING:
    from PIL import Image

HERE = Path(__file__).parent
DRAWING = re.compile(r"data:image/(png|webp|jpeg);base64,[A-Za-z0-9+/]+={0,2}\Z")
LARGEST_IMAGE = 480  # pixels of the longer side of an image inside a page
WIDTH, HEIGHT = 400, 310  # pixels of a panel, which fits the width of a telephone
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 28, 62  # its margins
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
OUTLINES = {"o": "M-4 0A4 4 0 1 1 4 0A4 4 0 1 1 -4 0Z", "x": "M-4 -4L4 4M-4 4L4 -4", "d": "M0 -5L3 0L0 5L-3 0Z"}
INK = "#000000"  # stands for the page's own text color, which is light in the dark
LINES = (("-", ""), ("--", "6 3"), (":", "2 3"))  # of the variants of a method, for matplotlib and for SVG


@dataclass(frozen=True)
class Text:
    """A paragraph; a headline and a warning stand out."""

    text: str
    style: Literal["", "headline", "warning"] = ""


@dataclass(frozen=True)
class Lines:
    """Sentences, each with a bullet, or the lines of a listing, shown as they are, in ASCII."""

    lines: tuple[str, ...]
    listing: bool = False


@dataclass(frozen=True)
class Tiles:
    """Short answers side by side, each with a title, lines and a note; Markdown and LaTeX have a bullet for each."""

    tiles: tuple[tuple[str, tuple[str, ...], str], ...]
    listing = False

    @property
    def lines(self) -> list[str]:
        return [f"{title}: {'; '.join(lines)}. {note}" for title, lines, note in self.tiles]


@dataclass(frozen=True)
class Shown:
    """The answer of one method, whether it was right, and a drawing of the kept tokens as a data URI."""

    method: str
    text: str
    right: bool
    drawing: str


@dataclass(frozen=True)
class DrawnExample:
    """One question on which methods disagree, with drawings; only the page shows it."""

    question: str
    answer: str
    where: str
    shown: tuple[Shown, ...]


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

    @property
    def bounds(self) -> list[tuple[int, float, float]]:
        return [(p.x, p.low, p.high) for p in self.points if p.low is not None and p.high is not None]


class Look(NamedTuple):
    """Number, text, color, marker and line (for matplotlib and for SVG) of the curves of a label."""

    key: int
    label: str
    color: str
    marker: str
    line: str
    dashes: str


@dataclass(frozen=True)
class Figure:
    """Panels, each with a title and curves, on the same axes; `name` is that of a file.

    Ticks are equally far from each other unless they have places.
    """

    title: str
    x_label: str
    y_label: str
    ticks: tuple[str, ...]
    panels: tuple[tuple[str, tuple[Curve, ...]], ...]
    decimals: int
    name: str
    places: tuple[float, ...] = ()

    @property
    def file(self) -> str:
        return f"report-{self.name}.pdf"

    @property
    def positions(self) -> Sequence[float]:
        return self.places or range(len(self.ticks))

    @property
    def slanted(self) -> bool:
        return len(self.ticks) > 6 or any(len(plain(tick)) > 6 for tick in self.ticks)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The look of each label: a method's color; variants of it differ in line and marker."""
        looks: dict[str, Look] = {}
        variants: Counter[str] = Counter()
        for curve in (curve for _, curves in self.panels for curve in curves):
            if curve.label not in looks:
                number = variants[curve.method]
                variants[curve.method] += 1
                line = LINES[1 if curve.method == "none" else number % len(LINES)]
                shape = marker(plain(curve.label if number else curve.method))
                looks[curve.label] = Look(len(looks), plain(curve.label), color(plain(curve.method)), shape, *line)
        return looks

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Return the vertical range of all panels, so that they can be compared."""
        points = [point for _, curves in self.panels for curve in curves for point in curve.points]
        values = [v for p in points for v in (p.mean, p.low, p.high) if v is not None]
        if not values:
            return 0.0, 1.0
        margin = 0.05 * (max(values) - min(values)) or 0.05 * abs(values[0]) or 1.0
        return min(values) - margin, max(values) + margin

    @property
    def heights(self) -> list[float]:
        """The round numbers at which the vertical axis has ticks."""
        low, high = self.limits
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= rough)
        return [round(i * step, 12) + 0.0 for i in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def x(self, tick: int) -> str:
        """Return the position of a tick in a panel, in pixels, for SVG."""
        first, last = self.positions[0], self.positions[-1]
        spread = 0.5 if len(self.ticks) == 1 else 0.06 + 0.88 * (self.positions[tick] - first) / (last - first)
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * spread:.1f}"

    def y(self, value: float) -> str:
        low, high = self.limits
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low):.1f}"

    def line(self, curve: Curve) -> str:
        return _path(f"{self.x(p.x)} {self.y(p.mean)}" for p in curve.points)

    def band(self, curve: Curve) -> str:
        upper = [f"{self.x(tick)} {self.y(top)}" for tick, _, top in curve.bounds]
        return _path([*upper, *(f"{self.x(tick)} {self.y(base)}" for tick, base, _ in reversed(curve.bounds))]) + "Z"

    def numbers(self, point: Point) -> str:
        mean, low, high = (None if v is None else f"{v:.{self.decimals}f}" for v in (point.mean, point.low, point.high))
        return f"{mean}" if low is None or high is None else f"{mean} [{low}, {high}]"


Block = Table | Figure | Text | Lines | Tiles | DrawnExample


@dataclass(frozen=True)
class Section:
    """Blocks below a title; the page shows those of a folded section on a click."""

    title: str
    blocks: tuple[Block, ...]
    folded: bool = False

    @property
    def figures(self) -> list[Figure]:
        return [block for block in self.blocks if isinstance(block, Figure)]

    @property
    def without_images(self) -> list[Block]:
        """The blocks for a format without images; none of a section that is about its images."""
        about_images = any(isinstance(block, DrawnExample) for block in self.blocks)
        return [] if about_images else [block for block in self.blocks if not isinstance(block, Figure)]


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Render a report as Markdown, without figures and examples."""
    return _environment(for_markdown).get_template("report.md.j2").render(title=title, sections=sections, kind=_kind)


def latex(title: str, sections: Sequence[Section]) -> str:
    """Render a report as LaTeX; figures are PDF files next to it, and left out where theirs is missing."""
    labels: Counter[str] = Counter()

    def label(kind: str, text: str) -> Markup:
        """Return a label to refer to; a number is added to one that is taken."""
        name = f"{kind}:{re.sub(r'[^a-z0-9]+', '-', text.lower())[:60].strip('-') or 'untitled'}"
        labels[name] += 1
        return Markup(rf"\label{{{name}{f'-{labels[name]}' if labels[name] > 1 else ''}}}")

    def signed(text: str) -> Markup:
        """Escape a number, with a minus sign for each hyphen; the dash of an absent one stays."""
        return Markup(for_tex(text) if text == NOTHING.text else for_tex(text).replace("-", "$-$"))

    signs = {"block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<"}
    environment = _environment(for_tex, **signs, variable_end_string=">>")
    environment.filters |= {"tex": for_tex, "signed": signed}
    return environment.get_template("report.tex.j2").render(title=title, sections=sections, kind=_kind, label=label)


def page(title: str, sections: Sequence[Section]) -> str:
    """Render a report as one page that needs no other file and no network, and a script only for comfort."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    checksum = b64encode(sha256(script.encode()).digest()).decode()
    code = {"script": Markup(script), "checksum": checksum, "dark_css": Markup(dark_css("figure"))}
    contents = {"title": title, "sections": sections, "kind": _kind, "charts": sys.modules[__name__]}
    return TEMPLATES.get_template("page.html.j2").render(**code, **contents)


def marker_path(name: str) -> str:
    """Return the outline of a marker, named as in matplotlib, within 6 pixels around 0."""
    if name in OUTLINES:
        return OUTLINES[name]
    count, outer, inner, turn = MARKERS[name]
    radii = [outer] * count if outer == inner else [outer, inner] * count
    angles = [math.tau * (turn + i / len(radii)) for i in range(len(radii))]
    return _path(f"{r * math.sin(a):.2f} {-r * math.cos(a):.2f}" for r, a in zip(radii, angles, strict=True)) + "Z"


def _path(points: Iterable[str]) -> str:
    return f"M{'L'.join(points)}"


def pdf_figures(figures: Sequence[Figure]) -> dict[str, bytes]:
    """Render figures as PDF, by the names of their files; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return {}
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure as Canvas

    files: dict[str, bytes] = {}
    with mpl.rc_context(fname=Path(__file__).with_name("report.mplstyle")):
        for figure in figures:
            ticks, at = [short(plain(tick), 12) for tick in figure.ticks], figure.positions
            columns = min(3, len(figure.panels))
            rows = -(-len(figure.panels) // columns)
            canvas = Canvas(figsize=(max(4.2, 2.6 * columns), 2.3 * rows + 0.5), layout="constrained")
            FigureCanvasPdf(canvas)
            axes: Any = canvas.subplots(rows, columns, squeeze=False, sharey=True)
            for axis in axes.flat[len(figure.panels) :]:
                axis.set_axis_off()
            for axis, (title, curves) in zip(axes.flat, figure.panels, strict=False):
                for curve in curves:
                    look = figure.looks[curve.label]
                    places, means = [at[point.x] for point in curve.points], [point.mean for point in curve.points]
                    style = {"linestyle": look.line, "color": look.color, "marker": look.marker}
                    axis.plot(places, means, **style, linewidth=1.3, markersize=4.5, label=short(look.label, 40))
                    bounds = [(at[x], low, high) for x, low, high in curve.bounds]
                    if len(bounds) > 1:
                        axis.fill_between(*zip(*bounds, strict=True), color=look.color, alpha=0.12, linewidth=0)
                    elif bounds:
                        axis.vlines(*bounds[0], color=look.color, linewidth=1.3)
                axis.set_xticks(at, ticks, rotation=45 if figure.slanted else 0)
                margin = 0.1 * (at[-1] - at[0]) or 0.4
                axis.set_xlim(at[0] - margin, at[-1] + margin)
                axis.set_xlabel(short(plain(figure.x_label), 40))
                axis.set_title(title, fontsize=9)
                axis.grid(axis="y", color="#dddddd", linewidth=0.7)
                axis.set_axisbelow(True)
                axis.set_ylim(*figure.limits)
            for axis in axes[:, 0]:
                axis.set_ylabel(figure.y_label)
            shown = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
            canvas.legend(shown.values(), shown, loc="outside lower center", ncols=4, frameon=False)
            content = BytesIO()
            nameless = {"CreationDate": None, "Creator": None, "Producer": None}
            canvas.savefig(content, format="pdf", metadata=nameless)
            files[figure.file] = content.getvalue()
    return files


def data_uri(image: "Image.Image", quality: int = 88, method: int = 4) -> str:
    """Encode an image, made smaller if need be, as a data URI, so that no file of it is left on the disk."""
    shown, content = image.convert("RGB"), BytesIO()
    shown.thumbnail((LARGEST_IMAGE, LARGEST_IMAGE))
    shown.save(content, "WEBP", quality=quality, method=method)
    return f"data:image/webp;base64,{b64encode(content.getvalue()).decode()}"


def _drawing(text: str) -> str:
    """Accept an image inside the page, and nothing else that a file may name."""
    if not DRAWING.match(text):
        raise ValueError(f"drawing must be an image as a data URI, got {text[:40]!r}: draw the examples again")
    return text


def _kind(block: Block) -> str:
    return type(block).__name__


def _environment(escape: Callable[[str], str], **options: Any) -> Environment:
    """Make an environment in which every text is escaped, whatever the result files hold."""
    return Environment(
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        finalize=lambda value: escape(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        keep_trailing_newline=True,
        **options,
    )


TEMPLATES = _environment(plain, autoescape=True)
TEMPLATES.filters["drawing"] = _drawing
