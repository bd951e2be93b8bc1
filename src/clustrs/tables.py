"""One table type, rendered for a terminal, Markdown and LaTeX (and HTML, by templates), and the escaping of its text.

Text comes from result files, so every renderer makes it harmless for the place where it is shown.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "`": r"\textasciigrave{}",
    "\N{EN DASH}": "--",
}
"""Brackets and stars would be taken for options of a line break before them."""
MARKDOWN = "\\`*_{}[]#!|~"
FORMULA = re.compile(r"(^|[;\t])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Start of a formula in a spreadsheet, also in one that separates columns by semicolons."""
LONGEST = 40
"""Rows of a LaTeX table before it is divided at the next group."""
NARROWEST = 24
"""Characters that a column of sentences needs."""


def plain(text: str) -> str:
    """Return one line without control characters, half characters, or marks that turn the direction of writing."""
    return "".join(
        " " if character.isspace() else "\ufffd" if unicodedata.category(character)[0] == "C" else character
        for character in text
    )


def for_markdown(text: str) -> str:
    """Escape whatever Markdown or HTML would interpret."""
    text = "".join("\\" + character if character in MARKDOWN else character for character in plain(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def for_tex(text: str) -> str:
    """Escape text for pdflatex: ASCII and Western European letters, a question mark for the rest."""
    return "".join(TEX.get(c, c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in plain(text))


def for_spreadsheet(text: str) -> str:
    """Put an apostrophe before what a spreadsheet would run as a formula."""
    return FORMULA.sub(r"\1'", plain(text))


def short(text: str, length: int = 200) -> str:
    """Cut off a text that is too long."""
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class Value:
    """One entry of a table, as text, and what is shown next to it.

    `strong` marks the best of a row, where that means something, or a difference whose interval excludes 0.
    """

    text: str
    interval: str = ""
    note: str = ""
    paper: str = ""
    strong: bool = False


NOTHING = Value("\N{EN DASH}")


@dataclass(frozen=True)
class Row:
    """A table row: headings on the left, values on the right; `opens` begins a new group of rows."""

    heads: tuple[str, ...]
    values: tuple[Value, ...]
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table of values, with headings on the left of each row.

    Attributes:
        title: shown above the table.
        heads: names of the heading columns.
        columns: names of the value columns.
        rows: the rows; the first heading of a group is shown once.
        caption: explains the table where it stands alone, as in a paper.
        across: what the columns are, which becomes a heading when the table is transposed.
        sentences: the last column holds sentences, which are aligned to the left and wrapped.

    Examples:
        >>> rows = (Row(("clean", "16"), (Value("58.3", strong=True), Value("55.7"))),)
        >>> print(Table("", ("level", "keep"), ("grid", "clustrs"), rows).terminal())
        level  keep   grid  clustrs
        ---------------------------
        clean  16    58.3*     55.7
    """

    title: str
    heads: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    across: str = "method"
    sentences: bool = False

    @property
    def grouped(self) -> bool:
        """True if the rows form groups."""
        return any(row.opens for row in self.rows)

    def headings(self, row: Row) -> tuple[str, ...]:
        """Return the headings of a row; that of a group only where the group begins."""
        return ("", *row.heads[1:]) if self.grouped and not row.opens else row.heads

    def transposed(self) -> "Table":
        """Return the table with its columns as rows; with two headings, the first goes on to name groups of rows."""
        if len(self.heads) == 1:
            rows = tuple(Row((c,), tuple(row.values[i] for row in self.rows)) for i, c in enumerate(self.columns))
            names = tuple(row.heads[0] for row in self.rows)
            return replace(self, heads=(self.across,), columns=names, rows=rows, across=self.heads[0], sentences=False)
        group, inner = self.heads
        names = tuple(dict.fromkeys(row.heads[1] for row in self.rows))
        values = {row.heads: row.values for row in self.rows}
        empty = (NOTHING,) * len(self.columns)
        rows = tuple(
            Row((title, column), tuple(values.get((title, name), empty)[i] for name in names), opens=i == 0)
            for title in dict.fromkeys(row.heads[0] for row in self.rows)
            for i, column in enumerate(self.columns)
        )
        columns = tuple(f"{inner} {name}" for name in names)
        return replace(self, heads=(group, self.across), columns=columns, rows=rows, across=inner)

    def terminal(self, width: int | None = None) -> str:
        """Render aligned plain text of at most `width` columns.

        A table that is too wide is transposed; if that is too wide as well, its columns go into several tables below
        each other. A star marks a strong value; paper numbers stand in brackets.
        """
        if width is None:
            return "\n".join(self._lines(None))
        candidates = [self] if self.sentences or len(self.heads) > 2 else [self, self.transposed()]
        for table in candidates:
            lines = table._lines(width)
            if max(map(len, lines)) <= width:
                return "\n".join(lines)
        return "\n\n".join("\n".join(part._lines(width)) for part in candidates[-1]._narrowed(width))

    def _narrowed(self, width: int) -> "Iterator[Table]":
        """Yield tables of as many columns each as fit; headings are cut off where they leave no room for one."""
        numbers = [row[len(self.heads) : -1 if self.sentences else None] for row in self._cells()[1:]]
        widest = max((len(text) for row in numbers for text in row), default=0)
        columns = tuple(short(plain(column), max(widest, 16)) for column in self.columns)
        widest = max(widest, NARROWEST if self.sentences else 0, *map(len, columns))
        others = [max(len(plain(row.heads[i])) for row in self.rows) for i in range(len(self.heads) - 1)]
        limits = [min(other, width // 3) for other in others]
        limits.append(max(8, width - widest - sum(limits) - 2 * len(self.heads)))
        rows = tuple(
            replace(row, heads=tuple(short(plain(head), limit) for head, limit in zip(row.heads, limits, strict=True)))
            for row in self.rows
        )
        first, last = 0, len(columns)
        table = replace(self, columns=columns, rows=rows)
        while first < last:
            stop = last
            while stop > first + 1 and max(map(len, table._columns(first, stop)._lines(width))) > width:
                stop -= 1
            yield table._columns(first, stop)
            first = stop

    def _columns(self, first: int, stop: int) -> "Table":
        rows = tuple(replace(row, values=row.values[first:stop]) for row in self.rows)
        return replace(
            self, columns=self.columns[first:stop], rows=rows, sentences=self.sentences and stop == len(self.columns)
        )

    def _cells(self) -> list[list[str]]:
        """Return the text of all cells, the header first; parts of values are aligned within a column."""
        columns = range(len(self.columns))
        papers = [max((len(row.values[i].paper) for row in self.rows), default=0) for i in columns]
        margins = [max((len(row.values[i].interval) for row in self.rows), default=0) for i in columns]
        starred = [any(row.values[i].strong for row in self.rows) for i in columns]
        lines = [[*self.heads, *map(plain, self.columns)]]
        for row in self.rows:
            shown = [_cell(*parts) for parts in zip(row.values, margins, papers, starred, strict=True)]
            lines.append([*map(plain, self.headings(row)), *shown])
        return lines

    def _lines(self, width: int | None) -> list[str]:
        cells = self._cells()
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        left = [i < len(self.heads) or (self.sentences and i == len(widths) - 1) for i in range(len(widths))]
        last: list[list[str]] = [[line[-1]] for line in cells]
        if self.sentences:
            room = None if width is None else width - sum(widths[:-1]) - 2 * (len(widths) - 1)
            if room is not None and NARROWEST <= room < widths[-1]:
                widths[-1] = room
            last = [wrap(line[-1], widths[-1]) or [""] for line in cells]
        text = []
        for line, ending in zip(cells, last, strict=True):
            for number, end in enumerate(ending):
                parts = [*([""] * (len(line) - 1) if number else line[:-1]), end]
                padded = [
                    c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in zip(parts, widths, left, strict=True)
                ]
                text.append("  ".join(padded).rstrip())
        text.insert(len(last[0]), "-" * max(map(len, text)))
        return text

    def markdown(self) -> str:
        """Render a Markdown table, below its title where it has one."""
        lines = [f"**{for_markdown(self.title)}**", ""] if self.title else []
        rules = [":---" if self.sentences and i == len(self.columns) - 1 else "---:" for i in range(len(self.columns))]
        lines += [
            _markdown_line([for_markdown(text) for text in (*self.heads, *self.columns)]),
            _markdown_line(["---"] * len(self.heads) + rules),
        ]
        for row in self.rows:
            lines.append(_markdown_line([*map(for_markdown, row.heads), *map(_markdown_value, row.values)]))
        return "\n".join(lines)

    def latex(self, caption: str, labels: Sequence[str]) -> str:
        """Render a booktabs table, or several if it is longer than a page; `labels` are taken in turn."""
        parts = self.pages()
        captions = [self.caption or caption, *[f"{self.title} (continued)."] * (len(parts) - 1)]
        pairs = zip(captions, labels, parts, strict=True)
        return "\n\n".join(self._latex_part(caption, label, rows) for caption, label, rows in pairs)

    def pages(self) -> list[list[Row]]:
        """Divide the rows into parts that fit a page each, at the beginning of a group."""
        parts: list[list[Row]] = [[]]
        for row in self.rows:
            if len(parts[-1]) >= LONGEST and (row.opens or not self.grouped):
                parts.append([])
            parts[-1].append(row)
        return parts

    def _latex_part(self, caption: str, label: str, rows: list[Row]) -> str:
        wordy = any(len(head) > 60 for row in rows for head in row.heads)
        form = (r"p{0.6\linewidth}" if wordy else "l") * len(self.heads) + "r" * len(self.columns)
        lines = [
            r"\begin{table}[!htbp]",
            r"\centering",
            rf"\caption{{{for_tex(caption)}}}",
            label,
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{form}}}",
            r"\toprule",
            _latex_line([for_tex(text) for text in (*self.heads, *self.columns)]),
            r"\midrule",
        ]
        for number, row in enumerate(rows):
            if row.opens and number:
                lines.append(r"\midrule")
            lines.append(_latex_line([*map(for_tex, self.headings(row)), *map(_latex_value, row.values)]))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}"])


def _cell(value: Value, margin: int, paper: int, starred: bool) -> str:
    """A number with its margin and its star, and the paper's in brackets, in fields of that many characters."""
    bracket = f"({value.paper})".rjust(paper + 2) if value.paper else " " * (paper + 2 if paper else 0)
    bounds = f" {value.interval.rjust(margin)}" if margin else ""
    star = "*" if value.strong else " " if starred or paper or margin else ""
    return f"{plain(value.text)}{bounds}{star}{bracket}"


def _markdown_line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_value(value: Value) -> str:
    text = for_markdown(value.text)
    parts = [f"**{text}**" if value.strong else text, value.interval, value.note]
    parts.append(f"(paper {for_markdown(value.paper)})" if value.paper else "")
    return " ".join(part for part in parts if part)


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_value(value: Value) -> str:
    """The number, and small next to it the interval and what else is known."""
    extras = [_latex_number(part) for part in (value.interval, value.note) if part]
    extras += [f"(paper {_latex_number(value.paper)})"] if value.paper else []
    small = rf" {{\scriptsize {' '.join(extras)}}}" if extras else ""
    return (rf"\textbf{{{_latex_number(value.text)}}}" if value.strong else _latex_number(value.text)) + small


def _latex_number(text: str) -> str:
    """A minus sign for each hyphen."""
    return for_tex(text) if text == NOTHING.text else for_tex(text).replace("-", "$-$")
