"""Variants of ClustRS on a grid of the evaluation, for the ablation and the sensitivity study."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Difference, Estimate, Values
from clustrs.evaluation.results import FAILED, SCORED, UNJUDGED, Condition, Run, load_run
from clustrs.evaluation.runner import run as run_evaluation
from clustrs.evaluation.store import identity
from clustrs.pruners import from_dict
from clustrs_paper.studies.curves import evaluation_config
from clustrs_paper.studies.settings import GridStudyConfig, Keep
from clustrs_paper.tables import PaperReference, paper_table

Variant = Mapping[str, Any]
"""Parameters of ClustRS that are not as proposed."""
Row = dict[str, Any]
EMBEDDED_TASKS = ("scenes", "photos")
"""Tasks with more questions than a study has to ask."""
QUESTIONS = 600
"""If two variants of ClustRS answer one question in eight differently, 600 questions put their difference to within
0.03, the size of what the paper reports of RRS at k = 16, and the mean over some levels to within less."""


@dataclass(frozen=True)
class GridCell:
    """A table row: a budget under a condition, or a mean; `indices` are the [budget, condition] that it averages."""

    keep: Keep | None
    condition: Condition | None
    indices: tuple[tuple[int, int], ...]

    @property
    def names(self) -> Row:
        """The cell as the table has it."""
        corruption, level = ("mean", None) if self.condition is None else (self.condition.name, self.condition.level)
        return {"corruption": corruption, "level": level, "keep": "all" if self.keep is None else self.keep}

    @property
    def words(self) -> str:
        condition = "mean over conditions" if self.condition is None else str(self.condition)
        return f"{condition}, {'all budgets' if self.keep is None else f'k = {self.keep}'}"


@dataclass(frozen=True)
class Grid:
    """The scores [variants, budgets, conditions, seeds, items] of a run."""

    run: Run
    variants: tuple[Variant, ...]
    keeps: tuple[Keep, ...]
    scores: Values

    @cached_property
    def cells(self) -> tuple[GridCell, ...]:
        """Every budget under every condition, the mean of every budget, and that of all."""
        every = range(len(self.run.conditions))
        cells = []
        for k, keep in enumerate(self.keeps):
            cells += [GridCell(keep, self.run.conditions[c], ((k, c),)) for c in every]
            if len(every) > 1:
                cells.append(GridCell(keep, None, tuple((k, c) for c in every)))
        if len(self.keeps) > 1:
            cells.append(GridCell(None, None, tuple((k, c) for k in range(len(self.keeps)) for c in every)))
        return tuple(cells)

    def of(self, cell: GridCell, variant: int) -> Values:
        """Scores [seeds, items]; an answer that lacks a score in one of the averaged cells has none."""
        return np.mean([self.scores[variant, k, c] for k, c in cell.indices], axis=0)

    def estimates(self, variant: int) -> list[Estimate]:
        """The mean score in each cell, with a 95 % interval over questions."""
        values = np.stack([self.of(cell, variant) for cell in self.cells])
        return metrics.estimates(metrics.question_means(values))

    def differences(self, first: int, second: int) -> list[Difference]:
        """Return the paired difference of two variants in each cell."""
        better, worse = (np.stack([self.of(cell, variant) for cell in self.cells]) for variant in (first, second))
        return metrics.differences(better, worse)

    def paper(self, table: str, variant: int) -> list[float | None]:
        """The score that a table of the paper has for each cell; for a mean, that of its cells, if it has them all.

        For the mean of everything, over just the table's budgets and conditions, it is the table's own mean row.
        """
        printed, mean = paper_scores(table), self._paper_mean(table, variant)
        changed = identity(self.variants[variant])
        scores: list[float | None] = []
        for cell in self.cells:
            if cell.keep is None and mean is not None:
                scores.append(mean)
                continue
            conditions = [(self.keeps[k], self.run.conditions[c]) for k, c in cell.indices]
            values = [printed.get((changed, keep, c.name, c.level)) for keep, c in conditions]
            known = [value for value in values if value is not None]
            scores.append(sum(known) / len(known) if len(known) == len(values) else None)
        return scores

    def _paper_mean(self, table: str, variant: int) -> float | None:
        """The mean row of a table of the paper, if this grid has the same budgets and conditions."""
        reference = PaperReference("mm-vet", "llava-1.5-7b", (table,))
        grid = {(keep, c.name, c.level) for keep in self.keeps for c in self.run.conditions}
        return reference.mean({"name": "clustrs", **self.variants[variant]}) if grid == reference.grid else None

    @property
    def about(self) -> str:
        """Describe what was measured, and what is left out."""
        config = self.run.config
        text = f"{config['task']}, {config['model']}, {config['items']} questions, scores from 0 to 1."
        for state, words in ((FAILED, "failed"), (UNJUDGED, "not judged")):
            count = self.run.count(state)
            if count:
                text += f" {count} of {self.run.expected} answers are left out: {words}."
        return text


def paired_columns(score: Estimate, difference: Difference) -> Row:
    """Cell of a table on a variant: its score, and its difference to another on the same questions."""
    return {
        "questions": difference.n,
        "score": score.mean,
        "score_low": score.low,
        "score_high": score.high,
        "difference": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "difference_p": difference.p,
    }


def paper_difference(first: float | None, second: float | None) -> float | None:
    """The difference of two printed scores, without the rounding errors of their binary fractions."""
    return None if first is None or second is None else round(first - second, 6)


def paper_scores(table: str) -> dict[tuple[str, Keep, str, float | None], float]:
    """The scores of a table by what differs from ClustRS as proposed, budget, corruption and level."""
    return {
        (identity(cell.parameters), cell.keep, cell.corruption, cell.level): cell.value
        for cell in paper_table(table)
        if cell.metric == "score" and cell.keep is not None
    }


def measure(config: GridStudyConfig, variants: Sequence[Variant], corruptions: Sequence[str], questions: int) -> Grid:
    """Run what is left of the grid and read its scores. Without a limit, an embedded task asks `questions` of them."""
    methods = [
        from_dict({"name": "clustrs", **variant, "keep": keep}).to_dict()
        for variant in variants
        for keep in config.keep
    ]
    evaluation = replace(
        evaluation_config(config),
        methods=tuple(methods),
        corruptions=tuple(corruptions),
        seeds=config.seeds,
        limit=questions if config.limit is None and config.task in EMBEDDED_TASKS else config.limit,
    )
    folder = Path(config.folder)
    run_evaluation(evaluation, folder, progress=config.progress)
    run = load_run(folder, config.judge_model)
    if not run.count(SCORED):
        raise ValueError(nothing_scored(run, folder))
    shape = (len(variants), len(config.keep), *run.scores.shape[1:])
    return Grid(run, tuple(variants), config.keep, run.scores.reshape(shape))


def nothing_scored(run: Run, folder: Path) -> str:
    """Why there are no scores, and what to do."""
    if run.count(UNJUDGED):
        return (
            f"the answers are there, a judge has to score them: run `clustrs judge {folder} --judge-model NAME`, "
            "then this command again"
        )
    return f"no question could be answered: {max(run.errors, key=lambda error: run.errors[error])}"
