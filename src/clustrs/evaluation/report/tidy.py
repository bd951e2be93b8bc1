"""A run as a tidy CSV: one row a cell, and with several seeds one more for all of them together."""

import csv
import io
import json

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED

COLUMNS = (
    *("task", "model", "method", "keep", "corruption", "level", "seed"),
    *("n", "failed", "not_judged", "missing", "mean", "low", "high", "scale", "paper", "parameters"),
)


def tidy(summary: Summary) -> str:
    """Means and bounds are in the scale of the run; n is the number of questions with a score."""
    run = summary.run
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(COLUMNS)
    groups = [(str(seed), [i]) for i, seed in enumerate(run.seeds)]
    if len(run.seeds) > 1:
        groups.append(("all", list(range(len(run.seeds)))))
    values = np.stack([metrics.question_means(run.scores[:, :, seeds]) for _, seeds in groups], axis=2)
    found = iter(metrics.estimates(values))
    for i, method in enumerate(run.methods):
        for j, condition in enumerate(run.conditions):
            for name, seeds in groups:
                estimate, states = next(found), run.states[i, j, seeds]
                here = int((states != MISSING).sum())
                paper = summary.paper_score(i, condition.name, condition.level)
                writer.writerow(
                    (
                        *(run.config["task"], run.config["model"], method.label, method.budget),
                        *(condition.name, condition.level_text, name, estimate.n),
                        *(int((states == state).sum()) for state in (FAILED, UNJUDGED)),
                        len(seeds) * run.config["items"] - here,
                        *(_number(bound, run.scale) for bound in (estimate.mean, estimate.low, estimate.high)),
                        f"{run.scale:g}",
                        _number(paper, run.scale),
                        json.dumps(method.parameters),
                    )
                )
    return content.getvalue()


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6f}"
