"""A report as a document of sections and blocks, rendered as Markdown, LaTeX and one HTML page."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.evaluation.report import charts
from clustrs.evaluation.report.charts import Figure
from clustrs.palette import dark_css
from clustrs.tables import Table, for_markdown, for_tex, plain

if TYPE_CHECKING:
    from PIL import Image

HERE = Path(__file__).parent
DRAWING = re.compile(r"data:image/(png|webp|jpeg);base64,[A-Za-z0-9+/]+={0,2}\Z")
LARGEST_IMAGE = 480  # pixels of the longer side of an image inside a page
OPENING = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[utf8]{inputenc}
\usepackage{textcomp}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[margin=2cm]{geometry}
\renewcommand{\topfraction}{0.95}
\renewcommand{\bottomfraction}{0.95}
\renewcommand{\textfraction}{0.02}
\renewcommand{\floatpagefraction}{0.75}
\setcounter{topnumber}{9}
\setcounter{bottomnumber}{9}
\setcounter{totalnumber}{18}
\extrafloats{200}
\begin{document}"""
"""Floats may fill a page, and a page of floats has to be nearly full."""


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
    """A title and its blocks."""

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
    parts = [f"# {for_markdown(title)}"]
    for section in sections:
        blocks = section.without_images
        parts += [f"## {for_markdown(section.title)}"] if blocks else []
        for block in blocks:
            match block:
                case Text(text, warning):
                    parts.append(f"**{for_markdown(text)}**" if warning else for_markdown(text))
                case Lines(lines, listing):
                    bullets = [f"- {for_markdown(line)}" for line in lines]
                    parts.append("\n".join(["```json", *lines, "```"] if listing else bullets))
                case Table():
                    parts.append(block.markdown())
    return "\n\n".join(parts) + "\n"


def latex(title: str, sections: Sequence[Section]) -> str:
    """Render a report as LaTeX; figures are PDF files next to it, and left out where theirs is missing."""
    parts = [OPENING, rf"\section*{{{for_tex(title)}}}"]
    labels: Counter[str] = Counter()

    def label(kind: str, text: str) -> str:
        """Return a label to refer to; a number is added to one that is taken."""
        name = f"{kind}:{re.sub(r'[^a-z0-9]+', '-', text.lower())[:60].strip('-') or 'untitled'}"
        labels[name] += 1
        return rf"\label{{{name}{f'-{labels[name]}' if labels[name] > 1 else ''}}}"

    def shown(block: Block, section: str) -> str:
        match block:
            case Text(text, warning):
                return rf"\textbf{{{for_tex(text)}}}" if warning else for_tex(text)
            case Lines(lines, False):
                items = [rf"\item {{}}{for_tex(line)}" for line in lines]
                return "\n".join([r"\begin{itemize}", *items, r"\end{itemize}"])
            case Lines(lines):
                texts = [line.lstrip(" ") for line in lines]
                indented = [rf"{'~' * (len(a) - len(b))}{for_tex(b)}\\" for a, b in zip(lines, texts, strict=True)]
                return "\n".join([r"{\footnotesize\ttfamily\raggedright\noindent", *indented, "}"])
            case Table():
                caption = f"{block.title} ({section}), {title}."
                return block.latex(caption, lambda: label("tab", f"{section} {block.title}"))
            case Figure():
                lines = (
                    rf"\IfFileExists{{{block.file}}}{{\begin{{figure}}[!htbp]",
                    r"\centering",
                    rf"\includegraphics[width=\linewidth]{{{block.file}}}",
                    rf"\caption{{{for_tex(f'{title}: {block.title}')}}}",
                    label("fig", block.name),
                    r"\end{figure}}{}",
                )
                return "\n".join(lines)
        raise TypeError(f"LaTeX cannot show a {type(block).__name__}")

    for section in sections:
        blocks = [*section.without_images, *section.figures]
        parts += [rf"\subsection*{{{for_tex(section.title)}}}"] if blocks else []
        parts += [shown(block, section.title) for block in blocks]
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def page(title: str, sections: Sequence[Section]) -> str:
    """Render a report as one page that needs no other file and no network, and a script only for comfort."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    checksum = b64encode(sha256(script.encode()).digest()).decode()
    code = {"script": Markup(script), "checksum": checksum, "dark_css": Markup(dark_css("figure"))}
    contents = {"title": title, "sections": sections, "kind": lambda block: type(block).__name__, "charts": charts}
    return TEMPLATES.get_template("page.html.j2").render(**code, **contents) + "\n"


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


TEMPLATES = Environment(  # in which every text is made plain and escaped, whatever the result files hold
    loader=FileSystemLoader(HERE),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=lambda value: plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
)
TEMPLATES.filters["drawing"] = _drawing
