"""The mean of every cell of a run: one method and budget under one corruption, for each seed and for all together."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Condition, Method


@dataclass(frozen=True)
class CellMean:
    """Scores go from 0 to 1, `scale` is what they are shown in; `seed` is None for the mean over all seeds."""

    task: str
    model: str
    method: Method
    condition: Condition
    seed: int | None
    estimate: Estimate
    failed: int
    not_judged: int
    missing: int
    scale: float
    paper: float | None


def cell_means(summary: Summary) -> Iterator[CellMean]:
    """Work out all cells; with several seeds each of them, then their mean."""
    run = summary.run
    groups: list[tuple[int | None, list[int]]] = [(seed, [i]) for i, seed in enumerate(run.seeds)]
    if len(run.seeds) > 1:
        groups.append((None, list(range(len(run.seeds)))))
    for i, method in enumerate(run.methods):
        values = np.stack([metrics.question_means(run.scores[i][:, seeds]) for _, seeds in groups], axis=1)
        estimates = iter(metrics.estimates(values))
        for j, condition in enumerate(run.conditions):
            for seed, indices in groups:
                states = run.states[i, j, indices]
                yield CellMean(
                    task=run.config["task"],
                    model=run.config["model"],
                    method=method,
                    condition=condition,
                    seed=seed,
                    estimate=next(estimates),
                    failed=int((states == FAILED).sum()),
                    not_judged=int((states == UNJUDGED).sum()),
                    missing=len(indices) * run.config["items"] - int((states != MISSING).sum()),
                    scale=run.scale,
                    paper=summary.paper_score(i, condition.name, condition.level),
                )
