"""Documents as LaTeX with booktabs tables, to be compiled or copied from. Figures are left to the page."""

from clustrs.evaluation.report.blocks import NOTHING, Block, Document, Figure, Listing, Row, Table, Text, Value
from clustrs.evaluation.report.escaping import for_tex

OPENING = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{textcomp}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[margin=2cm]{geometry}
\begin{document}"""

LONGEST = 40
"""How many rows a table may have before it is divided at the next group."""


def latex(document: Document) -> str:
    """Render a document."""
    parts = [OPENING, rf"\section*{{{for_tex(document.title)}}}"]
    for section in document.sections:
        shown = [_block(block) for block in section.blocks if not isinstance(block, Figure)]
        parts += [rf"\subsection*{{{for_tex(section.title)}}}", *shown, r"\clearpage"] if shown else []
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text(text, warning):
            return rf"\textbf{{{for_tex(text)}}}" if warning else for_tex(text)
        case Listing(lines):
            return "\n".join([r"{\footnotesize\ttfamily\raggedright\noindent", *map(_listed, lines), "}"])
        case Table():
            return _table(block)
    raise TypeError(f"{type(block).__name__} has no place in LaTeX")


def _listed(line: str) -> str:
    text = line.lstrip(" ")
    return "~" * (len(line) - len(text)) + for_tex(text) + r"\\"


def _table(table: Table) -> str:
    """A table, or several if it is longer than a page."""
    parts: list[list[Row]] = [[]]
    for row in table.rows:
        if len(parts[-1]) >= LONGEST and (row.opens or not table.grouped):
            parts.append([])
        parts[-1].append(row)
    titles = [table.title, *[f"{table.title} (continued)"] * (len(parts) - 1)]
    return "\n\n".join(_part(table, title, rows) for title, rows in zip(titles, parts, strict=True))


def _part(table: Table, title: str, rows: list[Row]) -> str:
    wordy = any(len(head) > 60 for row in rows for head in row.heads)
    form = (r"p{0.6\linewidth}" if wordy else "l") * len(table.heads) + "r" * len(table.columns)
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{for_tex(title)}}}",
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
