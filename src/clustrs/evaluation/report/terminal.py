"""Tables as aligned plain text for the terminal."""

from clustrs.evaluation.report.analysis.scores import mean_table
from clustrs.evaluation.report.blocks import Value
from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Run


def terminal_table(run: Run, compare_with: str | None = None) -> str:
    """Render a row per corruption and budget, a column per method; a star marks the best pruning method of a row.

    The paper's numbers stand in brackets, from the table that the run reproduces; `compare_with` names another of its
    models than the run's.
    """
    summary = Summary(run, compare_with)
    table = mean_table(summary)
    columns = range(len(table.columns))
    wide = [max(len(row.values[i].paper) for row in table.rows) for i in columns]
    margins = [max(len(row.values[i].interval) for row in table.rows) for i in columns]
    lines = [[*table.heads, *(short(plain(column), 32) for column in table.columns)]]
    lines += [
        [
            *map(plain, table.headings(row)),
            *(_cell(*parts) for parts in zip(row.values, margins, wide, strict=True)),
        ]
        for row in table.rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [_aligned(line, widths, len(table.heads)) for line in lines]
    text.insert(1, "-" * max(map(len, text)))
    bounds = "; \N{PLUS-MINUS SIGN} half of its 95 % interval" if any(margins) else ""
    text.append(f"mean score ({summary.unit}){bounds}; * the best pruning method of the row")
    if summary.reference is not None and any(wide):
        text.append(summary.reference.text.replace('marked "paper"', "in brackets"))
    counts = ((MISSING, "missing"), (FAILED, "failed"), (UNJUDGED, "not judged"))
    lacking = [f"{run.count(state)} {name}" for state, name in counts if run.count(state)]
    if lacking:
        text.append(f"of {run.expected} answers: {', '.join(lacking)}")
    return "\n".join(text) + "\n"


def _cell(value: Value, margin: int, width: int) -> str:
    """A number with its margin and its star, and the paper's in brackets, in columns of that many characters."""
    paper = f"({value.paper})".rjust(width + 2) if value.paper else " " * (width + 2 if width else 0)
    bounds = f" {value.interval.rjust(margin)}" if margin else ""
    return f"{value.text}{bounds}{'*' if value.strong else ' '}{paper}"


def _aligned(cells: list[str], widths: list[int], heads: int) -> str:
    """Headings to the left, numbers to the right."""
    parts = [c.ljust(w) if i < heads else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(parts).rstrip()
