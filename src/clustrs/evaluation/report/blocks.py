"""The parts of a report, as the analysis makes them and renderers show them. Text is plain: renderers escape it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """One number of a table, as text, with what is shown next to it."""

    text: str
    interval: str = ""
    note: str = ""
    paper: str = ""
    strong: bool = False
    """The best of its row, where that means something, or a difference whose interval excludes 0."""


NOTHING = Value("\N{EN DASH}")


@dataclass(frozen=True)
class Row:
    """A table row: headings on the left, values on the right; `opens` says that a new group of rows begins here."""

    heads: tuple[str, ...]
    values: tuple[Value, ...]
    opens: bool = False


@dataclass(frozen=True)
class Table:
    """`heads` name the columns of headings, `columns` those of values. `caption` explains the table where it stands
    alone, as in a paper."""

    title: str
    heads: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    caption: str = ""

    @property
    def grouped(self) -> bool:
        return any(row.opens for row in self.rows)

    def headings(self, row: Row) -> tuple[str, ...]:
        """The headings of a row; that of a group only where the group begins."""
        return ("", *row.heads[1:]) if self.grouped and not row.opens else row.heads


@dataclass(frozen=True)
class Point:
    """A mean, and its interval where there is one; x is the index of a tick."""

    x: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Curve:
    """The points of a method; `method` is its name, which has a colour, and `label` also tells its variants apart."""

    method: str
    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """The curves of one budget."""

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Figure:
    """Panels with the same axes. `ticks` label the horizontal axis; `decimals` are those of the scores. `name` is that
    of a file."""

    title: str
    x_label: str
    y_label: str
    ticks: tuple[str, ...]
    panels: tuple[Panel, ...]
    decimals: int
    name: str


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
    """What one method kept and answered: a drawing as a data URI, the answer, and whether it was right."""

    method: str
    text: str
    right: bool
    drawing: str


@dataclass(frozen=True)
class Example:
    """One question on which methods disagree. Only the page shows examples."""

    question: str
    answer: str
    where: str
    shown: tuple[Shown, ...]


@dataclass(frozen=True)
class Gallery:
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Listing:
    """Lines that are shown as they are, in ASCII."""

    lines: tuple[str, ...]


Block = Table | Figure | Text | Bullets | Gallery | Listing


@dataclass(frozen=True)
class Section:
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
    title: str
    sections: tuple[Section, ...]
