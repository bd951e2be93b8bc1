"""Tables as aligned plain text for the terminal."""

from clustrs.evaluation.report.analysis.scores import mean_table
from clustrs.evaluation.report.analysis.summary import Summary
from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Run


def terminal_table(run: Run) -> str:
    """Render a row per corruption and budget, a column per method; a star marks the best pruning method of a row."""
    summary = Summary(run)
    table = mean_table(summary)
    lines = [[*table.heads, *(short(plain(column), 32) for column in table.columns)]]
    lines += [
        [*map(plain, table.headings(row)), *(v.text + ("*" if v.strong else " ") for v in row.values)]
        for row in table.rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [_aligned(line, widths, len(table.heads)) for line in lines]
    text.insert(1, "-" * max(map(len, text)))
    text.append(f"mean score ({summary.unit}); * the best pruning method of the row")
    counts = ((MISSING, "missing"), (FAILED, "failed"), (UNJUDGED, "not judged"))
    lacking = [f"{run.count(state)} {name}" for state, name in counts if run.count(state)]
    if lacking:
        text.append(f"of {run.expected} answers: {', '.join(lacking)}")
    return "\n".join(text) + "\n"


def _aligned(cells: list[str], widths: list[int], heads: int) -> str:
    """Headings to the left, numbers to the right."""
    parts = [c.ljust(w) if i < heads else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(parts).rstrip()
