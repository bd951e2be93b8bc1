"""The scores of a run as an aligned table of plain text."""

from clustrs.evaluation import metrics
from clustrs.evaluation.report.blocks import NOTHING, Value
from clustrs.evaluation.report.escaping import plain, short
from clustrs.evaluation.report.grids import Group, grid
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Run


def terminal_table(run: Run) -> str:
    """A row for each corruption and budget, a column a method; a star marks the best pruning method of a row."""
    summary = Summary(run)

    def about(place: int) -> Group:
        def value(method: int) -> Value:
            mean = metrics.mean(summary.values[method, place])
            return NOTHING if mean is None else Value(summary.number(mean))

        return str(run.conditions[place]), value

    table = grid(run, "", "corruption", [about(place) for place in range(len(run.conditions))])
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
