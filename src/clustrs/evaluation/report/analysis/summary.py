"""A run with its means worked out once, and how numbers of it are written."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate, Values
from clustrs.evaluation.report.analysis.paper_reference import described, reference_of
from clustrs.evaluation.report.blocks import NOTHING, Value
from clustrs.evaluation.results import Run


class Summary:
    """`values` are the scores [methods, conditions, items], averaged over seeds; `reference` is what the paper has
    on the run's cells, None if it has nothing."""

    def __init__(self, run: Run, compare_with: str | None = None) -> None:
        self.run = run
        self.values: Values = metrics.question_means(run.scores)
        self.reference = reference_of(run, compare_with)

    @cached_property
    def estimates(self) -> list[list[Estimate]]:
        """For each method and condition."""
        methods, conditions, _ = self.values.shape
        flat = metrics.estimates(self.values)
        return [flat[i * conditions : (i + 1) * conditions] for i in range(methods)]

    def together(self, conditions: Sequence[int]) -> Values:
        """The scores [methods, items] averaged over conditions, of the questions that have one under each."""
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
        """What scores are shown in."""
        return "per cent" if self.run.scale == 100 else f"0 to {self.run.scale:g}"

    def number(self, score: float, signed: bool = False) -> str:
        """A score in the scale of the run; 0 has no sign."""
        rounded = round(score * self.run.scale, self.decimals) + 0.0
        return f"{rounded:{'+' if signed and rounded else ''}.{self.decimals}f}"

    def interval(self, estimate: Estimate, signed: bool = False) -> str:
        """The bounds of an estimate; nothing where it has none."""
        if estimate.low is None or estimate.high is None:
            return ""
        return f"[{self.number(estimate.low, signed)}, {self.number(estimate.high, signed)}]"

    def value(self, estimate: Estimate, paper: float | None = None, whole: int | None = None) -> Value:
        """A mean as a table shows it; the number of questions where it is not `whole` (by default, all)."""
        printed = "" if paper is None else self.number(paper)
        if estimate.mean is None:
            return Value(NOTHING.text, paper=printed)
        expected = self.run.config["items"] if whole is None else whole
        note = f"n {estimate.n}" if estimate.n != expected else ""
        return Value(self.number(estimate.mean), self.interval(estimate), note, printed)

    def paper_score(self, method: int, corruption: str, level: float | None) -> float | None:
        """What the paper has for a method of this run."""
        own = self.run.methods[method]
        return self.reference.score(described(own), own.keep, corruption, level) if self.reference else None
