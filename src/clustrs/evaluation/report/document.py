"""A report as a document of sections and blocks, rendered as Markdown, LaTeX and one HTML page."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.evaluation.report import charts
from clustrs.evaluation.report.charts import Figure
from clustrs.palette import dark_css
from clustrs.tables import NOTHING, Table, for_markdown, for_tex, plain

if TYPE_CHECKING:
    from PIL import Image

HERE = Path(__file__).parent
DRAWING = re.compile(r"data:image/(png|webp|jpeg);base64,[A-Za-z0-9+/]+={0,2}\Z")
LARGEST_IMAGE = 480  # pixels of the longer side of an image inside a page


@dataclass(frozen=True)
class Text:
    """A paragraph; a warning stands out."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Lines:
    """Sentences, each with a bullet, or the lines of a listing, shown as they are, in ASCII."""

    lines: tuple[str, ...]
    listing: bool = False


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


Block = Table | Figure | Text | Lines | DrawnExample


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]

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
    contents = {"title": title, "sections": sections, "kind": _kind, "charts": charts}
    return TEMPLATES.get_template("page.html.j2").render(**code, **contents)


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
