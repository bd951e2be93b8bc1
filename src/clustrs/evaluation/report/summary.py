"""A run with its means computed once, how its numbers are written, and the hook for published reference numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate, Values
from clustrs.evaluation.results import Method, Run
from clustrs.plugins import install_hint, leave_out, load_entry, plugin_entries
from clustrs.tables import NOTHING, Row, Table, Value

UNPRUNED = "unpruned"
REPORT_SECTIONS = "clustrs.report_sections"
"""Entry-point group of callables `(run, compare_with) -> Reference | None`."""


@dataclass(frozen=True)
class Reference:
    """Published numbers to show next to a run's, returned by an entry point of the group `clustrs.report_sections`.

    A plugin is a callable `plugin(run: Run, compare_with: str | None) -> Reference | None`. It returns None if it has
    nothing on the run. `compare_with` is the model that the user asked to compare with (`--compare-with`), None for the
    run's own; the plugin raises ValueError for a model that it does not know. The first plugin that returns a
    `Reference` is used.

    Attributes:
        text: one or two sentences on the origin of the numbers; they call them `Numbers marked "paper"`.
        score: `score(method, corruption, level)` returns the published score, from 0 to 1, of a method of the run, or
            None. `level` None stands for clean images or for the mean over the levels of a corruption; the corruption
            "" has no published mean.
        tables: `tables(summary)` returns further tables to append to the section "Scores".

    Examples:
        >>> def half(run, compare_with):
        ...     return Reference("Numbers marked \"paper\" are made up.", lambda method, corruption, level: 0.5)

        with `[project.entry-points."clustrs.report_sections"]` and `half = "my_package:half"` in pyproject.toml.
    """

    text: str
    score: Callable[[Method, str, float | None], float | None]
    tables: "Callable[[Summary], Sequence[Table]]" = lambda summary: ()


def find_reference(run: Run, compare_with: str | None = None) -> Reference | None:
    """Return the published numbers on a run, from the first plugin that has some.

    Raises:
        ValueError: `compare_with` is given, and no plugin is installed, or none knows that model.
    """
    entries = plugin_entries(REPORT_SECTIONS)
    for entry in entries:
        try:
            plugin = load_entry(entry)
        except ValueError as error:
            leave_out(str(error))
            continue
        reference: Reference | None = plugin(run, compare_with)
        if reference is not None:
            return reference
    if compare_with is not None and not entries:
        raise ValueError(
            f"compare_with={compare_with!r} needs published numbers: {install_hint('cli', package='clustrs-paper')}"
        )
    return None


class Summary:
    """A run and its means.

    `values` are the scores [methods, conditions, items], averaged over seeds; `reference` holds published numbers on
    the run's cells, None if there are none.
    """

    def __init__(self, run: Run, compare_with: str | None = None) -> None:
        self.run = run
        self.values: Values = metrics.question_means(run.scores)
        self.reference = find_reference(run, compare_with)

    @cached_property
    def estimates(self) -> list[list[Estimate]]:
        """The estimate of each method under each condition."""
        methods, conditions, _ = self.values.shape
        flat = metrics.estimates(self.values)
        return [flat[i * conditions : (i + 1) * conditions] for i in range(methods)]

    def together(self, conditions: Sequence[int]) -> Values:
        """Return the scores [methods, items] averaged over conditions, of the questions that have one under each."""
        return np.mean(self.values[:, list(conditions)], axis=1)

    @property
    def corrupted(self) -> list[int]:
        """The indices of the conditions that are not clean."""
        return [i for i, condition in enumerate(self.run.conditions) if condition.level is not None]

    @property
    def clean(self) -> int | None:
        """The index of the condition without corruption."""
        return next((i for i, condition in enumerate(self.run.conditions) if condition.level is None), None)

    @property
    def decimals(self) -> int:
        """Thousandths of the largest score, or a little finer."""
        return 3 if self.run.scale <= 1 else 2 if self.run.scale <= 10 else 1

    @property
    def unit(self) -> str:
        """Unit in which scores are shown."""
        return "per cent" if self.run.scale == 100 else f"0 to {self.run.scale:g}"

    def number(self, score: float, signed: bool = False) -> str:
        """Format a score in the scale of the run; 0 has no sign."""
        rounded = round(score * self.run.scale, self.decimals) + 0.0
        return f"{rounded:{'+' if signed and rounded else ''}.{self.decimals}f}"

    def interval(self, estimate: Estimate, signed: bool = False) -> str:
        """Format the bounds of an estimate; "" where it has none."""
        if estimate.low is None or estimate.high is None:
            return ""
        return f"[{self.number(estimate.low, signed)}, {self.number(estimate.high, signed)}]"

    def value(self, estimate: Estimate, paper: float | None = None, whole: int | None = None) -> Value:
        """Return a mean as a table shows it, with the number of questions where it is not `whole` (by default, all)."""
        printed = "" if paper is None else self.number(paper)
        if estimate.mean is None:
            return Value(NOTHING.text, paper=printed)
        expected = self.run.config["items"] if whole is None else whole
        note = f"n {estimate.n}" if estimate.n != expected else ""
        return Value(self.number(estimate.mean), self.interval(estimate), note, printed)

    def paper_score(self, method: int, corruption: str, level: float | None) -> float | None:
        """Return the published score of a method of this run, from 0 to 1."""
        return None if self.reference is None else self.reference.score(self.run.methods[method], corruption, level)


Group = tuple[str, Sequence[Value]]
"""Heading of some rows, and the value of each method of the run."""


def budget_table(
    run: Run, title: str, head: str, groups: Sequence[Group], unpruned: bool = True, best: str | None = "highest"
) -> Table:
    """Build a table with a row per group and budget, and a column per method, as the paper has them.

    Args:
        run: the run.
        title: title of the table.
        head: name of the groups.
        groups: heading and values of each group.
        unpruned: add a column for the model that keeps everything, repeated in each row.
        best: "highest" or "lowest", whichever is marked; None where neither means that a method is good.
    """
    reference = run.unpruned if unpruned or not run.labels else None
    columns = (UNPRUNED,) * (reference is not None) + run.labels
    rows = []
    for text, values in groups:
        for number, budget in enumerate(run.budgets):
            methods = [run.find(label, budget) for label in run.labels]
            shown = marked([NOTHING if i is None else values[i] for i in methods], best)
            before = [] if reference is None else [values[reference]]
            rows.append(Row((text, budget), (*before, *shown), opens=number == 0))
    return Table(title, (head, "keep"), columns, tuple(rows))


def marked(values: Sequence[Value], best: str | None) -> list[Value]:
    """Mark the best values, where some are better than others; values that are written alike are equally good."""
    numbers = [float(value.text) for value in values if value.text != NOTHING.text]
    if best is None or len(set(numbers)) < 2:
        return list(values)
    goal = max(numbers) if best == "highest" else min(numbers)
    return [replace(value, strong=value.text != NOTHING.text and float(value.text) == goal) for value in values]
