"""What depends on whether somebody looks at a terminal: colour and boxes there, plain text in pipes and files."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from clustrs.tables import Table


def is_rich(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colour; NO_COLOR and TERM=dumb say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_examples(text: str) -> None:
    """Print the examples of a command: its lines that begin with `clustrs` in colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in text.splitlines():
        styled = Text(line, style="dim")
        if line.startswith("  clustrs "):
            shown, gap, comment = line.strip().partition("  ")
            styled = Text("  ").append(shown, style="cyan").append(gap + comment, style="dim")
        console.print(styled, soft_wrap=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """Print a table: drawn on a terminal, in Markdown elsewhere, one line per row. `numbers` are the heads of columns
    that are aligned to the right."""
    if not is_rich(sys.stdout):
        print(markdown_table(heads, rows, numbers))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def show_table(table: Table) -> None:
    """Print a table: as wide as the terminal, or in Markdown, one line per row, elsewhere."""
    if sys.stdout.isatty():
        print(table.terminal(width()))
        return
    rows = [[*row.heads, *(value.text for value in row.values)] for row in table.rows]
    print(markdown_table([*table.heads, *table.columns], rows, table.columns[: -1 if table.sentences else None]))


def width() -> int:
    """Return the columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A Markdown table, aligned but for its last column, which may be long."""
    cells = [list(heads), *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads) - 1)] + [len(heads[-1])]
    right = [head in numbers for head in heads]
    rules = ["-" * (w - 1) + ":" if r else ":" + "-" * (w - 1) for w, r in zip(widths, right, strict=True)]
    lines = [
        [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        for row in [cells[0], rules, *cells[1:]]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextmanager
def status(text: str) -> Iterator[None]:
    """Say on a terminal's standard error what is being done, for as long as it takes."""
    if not is_rich(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{text} ..."):
        yield


def say(text: str) -> None:
    """Print a line to standard error, above any progress bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print JSON for scripts."""
    import json

    print(json.dumps(value, indent=2))


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written to a folder that may not exist yet."""
    try:
        existing = folder
        while not existing.exists():
            existing = existing.parent
        problem = "" if existing.is_dir() else f"{str(existing)!r} is not a folder"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{str(existing)!r} is read-only"
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise ValueError(f"{option} must be a folder that can be written to, got {str(folder)!r} ({problem})")


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written, as far as its name and its folder tell."""
    try:
        folder = path.is_dir()
    except OSError as error:
        raise ValueError(f"{option} must be the name of a file, got {str(path)!r} ({error.strerror})") from None
    if folder:
        raise ValueError(f"{option} must be the name of a file, got the folder {str(path)!r}")
    check_folder(option, path.parent)


def print_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> None:
    """Write the report of a run; print its table and where the report is."""
    from clustrs.evaluation.report import terminal_table, write_report
    from clustrs.evaluation.results import load_run

    run = load_run(folder, judge)
    print(terminal_table(run, compare_with, width()))
    print(f"\nreport: {write_report(folder, judge, compare_with)}")
