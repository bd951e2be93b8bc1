"""A report as a document of sections and blocks, rendered as Markdown, LaTeX and one HTML page."""

import re
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clustrs.evaluation.report import charts
from clustrs.evaluation.report.charts import Figure, figure_file
from clustrs.palette import dark_css
from clustrs.tables import Table, for_markdown, for_tex, plain

HERE = Path(__file__).parent
DRAWING = re.compile(r"data:image/(png|webp|jpeg);base64,[A-Za-z0-9+/]+={0,2}\Z")
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
class Bullets:
    """Sentences, each a line of its own."""

    lines: tuple[str, ...]


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
class Gallery:
    """Drawn examples."""

    examples: tuple[DrawnExample, ...]


@dataclass(frozen=True)
class Listing:
    """Lines that are shown as they are, in ASCII."""

    lines: tuple[str, ...]


Block = Table | Figure | Text | Bullets | Gallery | Listing


@dataclass(frozen=True)
class Section:
    """A title and its blocks."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def without_images(self) -> tuple[Block, ...]:
        """The blocks for a format without images; none of a section that is about its images."""
        if any(isinstance(block, Gallery) for block in self.blocks):
            return ()
        return tuple(block for block in self.blocks if not isinstance(block, Figure))


@dataclass(frozen=True)
class Document:
    """A report: a title and its sections."""

    title: str
    sections: tuple[Section, ...]

    @property
    def figures(self) -> list[Figure]:
        """All figures."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def markdown(document: Document) -> str:
    """Render a document as Markdown, without figures and examples."""
    parts = [f"# {for_markdown(document.title)}"]
    for section in document.sections:
        shown = [_markdown_block(block) for block in section.without_images]
        parts += [f"## {for_markdown(section.title)}", *shown] if shown else []
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Text(text, warning):
            return f"**{for_markdown(text)}**" if warning else for_markdown(text)
        case Bullets(lines):
            return "\n".join(f"- {for_markdown(line)}" for line in lines)
        case Listing(lines):
            return "\n".join(["```json", *lines, "```"])
        case Table():
            return block.markdown()
    raise TypeError(f"Markdown cannot show a {type(block).__name__}")


def latex(document: Document) -> str:
    """Render a document as LaTeX; figures are PDF files next to it."""
    parts = [OPENING, rf"\section*{{{for_tex(document.title)}}}"]
    labels: Counter[str] = Counter()
    for section in document.sections:
        figures = [block for block in section.blocks if isinstance(block, Figure)]
        shown = [_latex_block(block, section, document, labels) for block in (*section.without_images, *figures)]
        parts += [rf"\subsection*{{{for_tex(section.title)}}}", *shown] if shown else []
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def _latex_block(block: Block, section: Section, document: Document, labels: "Counter[str]") -> str:
    match block:
        case Text(text, warning):
            return rf"\textbf{{{for_tex(text)}}}" if warning else for_tex(text)
        case Bullets(lines):
            items = [rf"\item {{}}{for_tex(line)}" for line in lines]
            return "\n".join([r"\begin{itemize}", *items, r"\end{itemize}"])
        case Listing(lines):
            return "\n".join([r"{\footnotesize\ttfamily\raggedright\noindent", *map(_listed, lines), "}"])
        case Figure():
            return _figure(block, document, labels)
        case Table():
            name = f"{section.title} {block.title}"
            caption = f"{block.title} ({section.title}), {document.title}."
            return block.latex(caption, [_label("tab", name, labels) for _ in block.pages()])
    raise TypeError(f"LaTeX cannot show a {type(block).__name__}")


def _listed(line: str) -> str:
    text = line.lstrip(" ")
    return "~" * (len(line) - len(text)) + for_tex(text) + r"\\"


def _label(kind: str, text: str, labels: "Counter[str]") -> str:
    """Return a label to refer to; a number is added to one that is taken."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:60].strip("-") or "untitled"
    labels[f"{kind}:{name}"] += 1
    number = labels[f"{kind}:{name}"]
    return rf"\label{{{kind}:{name}{f'-{number}' if number > 1 else ''}}}"


def _figure(figure: Figure, document: Document, labels: "Counter[str]") -> str:
    """A figure; nothing is shown where its file is missing (without matplotlib)."""
    file = figure_file(figure)
    lines = [
        rf"\IfFileExists{{{file}}}{{\begin{{figure}}[!htbp]",
        r"\centering",
        rf"\includegraphics[width=\linewidth]{{{file}}}",
        rf"\caption{{{for_tex(f'{document.title}: {figure.title}')}}}",
        _label("fig", figure.name, labels),
        r"\end{figure}}{}",
    ]
    return "\n".join(lines)


def page(document: Document) -> str:
    """Render a document as one page that needs no other file and no network, and a script only for comfort."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    checksum = b64encode(sha256(script.encode()).digest()).decode()
    template = environment().get_template("page.html.j2")
    text = {"script": Markup(script), "checksum": checksum, "dark_css": Markup(dark_css("figure"))}
    return template.render(document=document, draw=charts.draw, size=charts, **text) + "\n"


@cache
def environment() -> Environment:
    """Return templates in which every text is made plain and escaped, whatever the result files hold."""
    made = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, finalize=_plain)
    made.filters["drawing"] = _drawing
    kinds = {"text_block": Text, "bullets": Bullets, "listing": Listing, "figure_block": Figure, "gallery": Gallery}
    for name, kind in kinds.items():
        made.tests[name] = lambda block, kind=kind: isinstance(block, kind)
    return made


def _drawing(text: str) -> str:
    """Accept an image inside the page, and nothing else that a file may name."""
    if not DRAWING.match(text):
        raise ValueError(f"drawing must be an image as a data URI, got {text[:40]!r}: draw the examples again")
    return text


def _plain(value: Any) -> Any:
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
