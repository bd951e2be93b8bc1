"""One table type, rendered for a terminal and Markdown (LaTeX and HTML by templates), and the escaping of its text.

Text comes from result files, so every renderer makes it harmless for the place where it is shown.
"""

import csv
import io
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

NAMED = {"\\": "backslash", "^": "asciicircum", "~": "asciitilde", "<": "less", ">": "greater", "|": "bar"}
TEX = {
    **{character: f"\\{character}" for character in "{}$&#%_"},
    **{character: f"{{{character}}}" for character in "[]*"},  # else options of a line break before them
    **{character: rf"\text{name}{{}}" for character, name in {**NAMED, '"': "quotedbl", "`": "asciigrave"}.items()},
    "\N{EN DASH}": "--",
}
MARKDOWN = {ord(c): f"\\{c}" for c in "\\`*_{}[]#!|~"} | {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
FORMULA = re.compile(r"(^|[;\t])(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")  # some spreadsheets separate by semicolons
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", re.ASCII)
LONGEST = 40  # rows of a LaTeX table before it is divided at the next group


def plain(text: str) -> str:
    """Return one line without control characters, half characters, or marks that turn the direction of writing."""
    return "".join(
        " " if character.isspace() else "\ufffd" if unicodedata.category(character)[0] == "C" else character
        for character in text
    )


def for_markdown(text: str) -> str:
    return plain(text).translate(MARKDOWN)


def for_tex(text: str) -> str:
    """Escape text for pdflatex: ASCII and Western European letters, a question mark for the rest."""
    return "".join(TEX.get(c, c if c.isascii() or "À" <= c <= "ÿ" else "?") for c in plain(text))


def for_spreadsheet(text: str) -> str:
    """Put an apostrophe before what a spreadsheet would run as a formula; a number is none."""
    return text if NUMBER.fullmatch(text) else FORMULA.sub(r"\1'", plain(text))


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Write rows as CSV, with texts that no spreadsheet runs."""
    content = io.StringIO()
    safe = ([for_spreadsheet(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(content, lineterminator="\n").writerows(safe)
    return content.getvalue()


def short(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(frozen=True)
class Value:
    """One entry of a table, as text, and what is shown next to it."""

    text: str
    interval: str = ""
    note: str = ""
    paper: str = ""
    strong: bool = False  # the best of a row, where that means something, or a difference whose interval excludes 0


NOTHING = Value("\N{EN DASH}")


@dataclass(frozen=True)
class Row:
    """A table row: headings on the left, values on the right; `opens` begins a new group of rows."""

    heads: tuple[str, ...]
    values: tuple[Value, ...]
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """A table of values, with headings on the left of each row; `heads` and `columns` are their names.

    The first heading of a group is shown once. `caption` explains the table where it stands alone; `across` is what the
    columns are, a heading of the transposed table.

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

    def headings(self, row: Row) -> tuple[str, ...]:
        """Return the headings of a row; that of a group only where the group begins."""
        return ("", *row.heads[1:]) if not row.opens and self._grouped() else row.heads

    def _grouped(self) -> bool:
        return any(row.opens for row in self.rows)

    def transposed(self) -> "Table":
        """Return the table with its columns as rows; with two headings, the first goes on to name groups of rows."""
        *group, inner = self.heads
        names = tuple(dict.fromkeys(row.heads[-1] for row in self.rows))
        values = {row.heads: row.values for row in self.rows}
        empty = (NOTHING,) * len(self.columns)
        rows = tuple(
            Row((*title, column), tuple(values.get((*title, name), empty)[i] for name in names), bool(title) and i == 0)
            for title in dict.fromkeys(row.heads[:-1] for row in self.rows)
            for i, column in enumerate(self.columns)
        )
        columns = tuple(f"{inner} {name}" for name in names) if group else names
        return replace(self, heads=(*group, self.across), columns=columns, rows=rows, across=inner)

    def terminal(self, width: int | None = None) -> str:
        """Render aligned text; what is wider than `width` is transposed, then divided into tables below each other."""
        limit = sys.maxsize if width is None else width
        candidates = [self] if width is None or len(self.heads) > 2 else [self, self.transposed()]
        for table in candidates:
            lines = table._lines()
            if max(map(len, lines)) <= limit:
                return "\n".join(lines)
        return "\n\n".join("\n".join(part._lines()) for part in candidates[-1]._narrowed(limit))

    def _narrowed(self, width: int) -> "Iterator[Table]":
        """Yield tables of as many columns each as fit; headings are cut off where they leave no room for one."""
        widest = max((len(text) for row in self._cells()[1:] for text in row[len(self.heads) :]), default=0)
        columns = tuple(short(plain(column), max(widest, 16)) for column in self.columns)
        widest = max(widest, *map(len, columns))
        others = [max(len(plain(row.heads[i])) for row in self.rows) for i in range(len(self.heads) - 1)]
        limits = [min(other, width // 3) for other in others]
        limits.append(max(8, width - widest - sum(limits) - 2 * len(self.heads)))
        heads = [tuple(short(plain(head), limits[i]) for i, head in enumerate(row.heads)) for row in self.rows]
        first, last, named = 0, len(columns), list(zip(self.rows, heads, strict=True))
        while first < last:
            for stop in range(last, first, -1):
                rows = tuple(replace(row, heads=own, values=row.values[first:stop]) for row, own in named)
                part = replace(self, columns=columns[first:stop], rows=rows)
                if stop == first + 1 or max(map(len, part._lines())) <= width:
                    break
            yield part
            first = stop

    def _cells(self) -> list[list[str]]:
        """Return the text of all cells, the header first; numbers, margins, stars and brackets align in a column."""
        columns = []
        for i, name in enumerate(self.columns):
            values, column = [row.values[i] for row in self.rows], [plain(name)]
            margin = max((len(value.interval) for value in values), default=0)
            paper = max((len(value.paper) for value in values), default=0)
            starred = any(value.strong for value in values) or paper or margin
            for value in values:
                bounds = f" {value.interval.rjust(margin)}" if margin else ""
                star = "*" if value.strong else " " if starred else ""
                bracket = (f"({value.paper})" if value.paper else "").rjust(paper + 2 if paper else 0)
                column.append(f"{plain(value.text)}{bounds}{star}{bracket}")
            columns.append(column)
        heads = [list(self.heads), *([*map(plain, self.headings(row))] for row in self.rows)]
        return [[*head, *cells] for head, *cells in zip(heads, *columns, strict=True)]

    def _lines(self) -> list[str]:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        pad = [str.ljust] * len(self.heads) + [str.rjust] * len(self.columns)
        padded = ([align(text, n) for align, text, n in zip(pad, line, widths, strict=True)] for line in cells)
        head, *lines = ["  ".join(texts).rstrip() for texts in padded]
        return [head, "-" * max(map(len, (head, *lines))), *lines]

    def markdown(self) -> str:
        """Render a Markdown table, below its title where it has one."""
        rules = ["---"] * len(self.heads) + ["---:"] * len(self.columns)
        lines = [[for_markdown(text) for text in (*self.heads, *self.columns)], rules]
        for row in self.rows:
            line = [for_markdown(head) for head in row.heads]
            for value in row.values:
                text, paper = for_markdown(value.text), f"(paper {for_markdown(value.paper)})" if value.paper else ""
                parts = (f"**{text}**" if value.strong else text, value.interval, value.note, paper)
                line.append(" ".join(filter(None, parts)))
            lines.append(line)
        title = f"**{for_markdown(self.title)}**\n\n" if self.title else ""
        return title + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def parts(self) -> list[list[Row]]:
        """Divide rows that are more than a page holds, between groups where there are any."""
        parts: list[list[Row]] = [[]]
        for row in self.rows:
            if len(parts[-1]) >= LONGEST and (row.opens or not self._grouped()):
                parts.append([])
            parts[-1].append(row)
        return parts
