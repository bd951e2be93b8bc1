"""Tables in the paper's layout: a group of rows per corruption level, a row per budget, a column per method."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from clustrs.evaluation.report.blocks import NOTHING, Row, Table, Value
from clustrs.evaluation.results import Run

Group = tuple[str, Callable[[int], Value]]
"""The heading of some rows, and what they say about a method (by its index)."""
UNPRUNED = "unpruned"


def budget_table(
    run: Run, title: str, head: str, groups: Sequence[Group], unpruned: bool = True, best: str | None = "highest"
) -> Table:
    """`unpruned` adds a column for the model that keeps everything, again in each row. best: "highest", "lowest", or
    None where neither means that a method is good."""
    reference = run.unpruned if unpruned or not run.labels else None
    columns = (UNPRUNED,) * (reference is not None) + run.labels
    rows = []
    for text, value in groups:
        for number, budget in enumerate(run.budgets):
            methods = [run.find(label, budget) for label in run.labels]
            values = marked([NOTHING if i is None else value(i) for i in methods], best)
            before = [] if reference is None else [value(reference)]
            rows.append(Row((text, budget), (*before, *values), opens=number == 0))
    return Table(title, (head, "keep"), columns, tuple(rows))


def marked(values: Sequence[Value], best: str | None) -> list[Value]:
    """Mark the best one, where some are better than others; equal as written is equally good."""
    numbers = [float(value.text) for value in values if value.text != NOTHING.text]
    if best is None or len(set(numbers)) < 2:
        return list(values)
    goal = max(numbers) if best == "highest" else min(numbers)
    return [replace(value, strong=value.text != NOTHING.text and float(value.text) == goal) for value in values]
