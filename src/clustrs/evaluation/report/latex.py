"""Documents as LaTeX with booktabs tables, to be compiled or copied from. Figures are PDF files next to it."""

import re
from collections import Counter

from clustrs.evaluation.report.blocks import (
    NOTHING,
    Block,
    Bullets,
    Document,
    Figure,
    Listing,
    Row,
    Section,
    Table,
    Text,
    Value,
)
from clustrs.evaluation.report.escaping import for_tex

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

LONGEST = 40
"""How many rows a table may have before it is divided at the next group."""


def figure_file(figure: Figure) -> str:
    """The name of the PDF file that a figure is in."""
    return f"report-{figure.name}.pdf"


def latex(document: Document) -> str:
    """Render a document."""
    parts = [OPENING, rf"\section*{{{for_tex(document.title)}}}"]
    labels: Counter[str] = Counter()
    for section in document.sections:
        figures = [block for block in section.blocks if isinstance(block, Figure)]
        shown = [_block(block, section, document, labels) for block in (*section.without_images, *figures)]
        parts += [rf"\subsection*{{{for_tex(section.title)}}}", *shown] if shown else []
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def _block(block: Block, section: Section, document: Document, labels: "Counter[str]") -> str:
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
            return _table(block, section, document, labels)
    raise TypeError(f"{type(block).__name__} has no place in LaTeX")


def _listed(line: str) -> str:
    text = line.lstrip(" ")
    return "~" * (len(line) - len(text)) + for_tex(text) + r"\\"


def _label(kind: str, text: str, labels: "Counter[str]") -> str:
    """A label that a paper can refer to; a number is added to one that is taken."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:60].strip("-") or "untitled"
    labels[f"{kind}:{name}"] += 1
    number = labels[f"{kind}:{name}"]
    return rf"\label{{{kind}:{name}{f'-{number}' if number > 1 else ''}}}"


def _figure(figure: Figure, document: Document, labels: "Counter[str]") -> str:
    """A figure; without matplotlib there is no file, and nothing is shown."""
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


def _table(table: Table, section: Section, document: Document, labels: "Counter[str]") -> str:
    """A table, or several if it is longer than a page."""
    parts: list[list[Row]] = [[]]
    for row in table.rows:
        if len(parts[-1]) >= LONGEST and (row.opens or not table.grouped):
            parts.append([])
        parts[-1].append(row)
    caption = table.caption or f"{table.title} ({section.title}), {document.title}."
    captions = [caption, *[f"{table.title} (continued)."] * (len(parts) - 1)]
    name = f"{section.title} {table.title}"
    return "\n\n".join(
        _part(table, caption, _label("tab", name, labels), rows) for caption, rows in zip(captions, parts, strict=True)
    )


def _part(table: Table, caption: str, label: str, rows: list[Row]) -> str:
    wordy = any(len(head) > 60 for row in rows for head in row.heads)
    form = (r"p{0.6\linewidth}" if wordy else "l") * len(table.heads) + "r" * len(table.columns)
    lines = [
        r"\begin{table}[!htbp]",
        r"\centering",
        rf"\caption{{{for_tex(caption)}}}",
        label,
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
        _line([for_tex(text) for text in (*table.heads, *table.columns)]),
        r"\midrule",
    ]
    for number, row in enumerate(rows):
        if row.opens and number:
            lines.append(r"\midrule")
        lines.append(_line([*map(for_tex, table.headings(row)), *map(_value, row.values)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}"])


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _value(value: Value) -> str:
    """The number, and small next to it the interval and what else is known."""
    extras = [_numbers(part) for part in (value.interval, value.note) if part]
    extras += [f"(paper {_numbers(value.paper)})"] if value.paper else []
    small = rf" {{\scriptsize {' '.join(extras)}}}" if extras else ""
    return (rf"\textbf{{{_numbers(value.text)}}}" if value.strong else _numbers(value.text)) + small


def _numbers(text: str) -> str:
    """With a minus where a hyphen stood."""
    return for_tex(text) if text == NOTHING.text else for_tex(text).replace("-", "$-$")
