"""ClustRS against its rivals, and how each method withstands corruption."""

from collections.abc import Callable

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Difference
from clustrs.evaluation.report.analysis.scores import words
from clustrs.evaluation.report.analysis.tables import Group, budget_table
from clustrs.evaluation.report.blocks import NOTHING, Block, Row, Section, Table, Text, Value
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import Run

OURS = "clustrs"


def paired(summary: Summary) -> Section | None:
    """ClustRS minus each other method of the same budget, question by question."""
    tables = [table for budget in summary.run.budgets if (table := _differences(summary, budget)) is not None]
    if not tables:
        return None
    text = (
        f"Mean difference of the scores ({summary.unit}) on the same questions, with the 95 % interval and the "
        "two-sided p of a paired bootstrap over questions. Bold with a star: the interval excludes 0. Nothing is "
        "corrected for the number of comparisons: of twenty without any difference, about one gets a star."
    )
    return Section("ClustRS minus its rivals", (Text(text), *tables))


def robustness(summary: Summary) -> Section | None:
    """Retention, mCE, flips and overlap, each where it can be had."""
    run = summary.run
    blocks: list[Block] = []
    if run.unpruned is not None and run.labels:
        blocks += [
            Text("Retention: the share of the unpruned model's score, under the same corruption, in per cent."),
            budget_table(
                run, "Retention", "corruption", _per_condition(summary, _retention, clean=True), unpruned=False
            ),
        ]
        if summary.corrupted:
            blocks += [
                Text(
                    "Corruption error: errors summed over the levels of a corruption, relative to the same sum of the "
                    "unpruned model, in per cent; mCE is the mean over the corruptions. 100 is as good as the unpruned "
                    "model, more is worse."
                ),
                budget_table(run, "Corruption error", "corruption", _errors(summary), unpruned=False, best="lowest"),
            ]
    if summary.clean is not None and summary.corrupted and not run.totals_only:
        blocks += [
            Text(
                "Flip rate: the share of questions right on clean and wrong on corrupted images, or the other way "
                "round, in per cent. Right is a score of at least 0.5. No method is marked as the best: who is always "
                "wrong flips least."
            ),
            budget_table(run, "Flip rate", "corruption", _per_condition(summary, _flips), best=None),
        ]
        if run.labels and _knows_tokens(run):
            blocks += [
                Text(
                    "Overlap: the share of the tokens kept in the clean image that are also kept in the corrupted "
                    "one, in per cent. No method is marked as the best: random and grid keep the same positions by "
                    "construction."
                ),
                budget_table(
                    run,
                    "Overlap of kept tokens",
                    "corruption",
                    _per_condition(summary, _overlap),
                    unpruned=False,
                    best=None,
                ),
            ]
    return Section("Robustness", tuple(blocks)) if blocks else None


def _knows_tokens(run: Run) -> bool:
    """Whether the run says which tokens were kept; results from elsewhere do not."""
    return not run.kept or any(tokens.counts.any() for tokens in run.kept.values())


def _differences(summary: Summary, budget: str) -> Table | None:
    """Rows are conditions, then all corruptions together; columns are pairs."""
    run = summary.run
    subset = [i for i, method in enumerate(run.methods) if method.keep is not None and method.budget == budget]
    ours = [i for i in subset if run.methods[i].name == OURS]
    rivals = [i for i in subset if i not in ours]
    pairs = [(a, b) for a in ours for b in rivals] + [(ours[0], b) for b in ours[1:]]
    if not pairs:
        return None
    titles = [str(condition) for condition in run.conditions]
    scores = run.scores
    if len(summary.corrupted) > 1:
        titles.append("all corruptions")
        scores = np.concatenate([scores, scores[:, summary.corrupted].mean(1, keepdims=True)], axis=1)
    first, second = (scores[list(side)] for side in zip(*pairs, strict=True))
    flat = metrics.differences(first, second)
    rows = [
        Row((title,), tuple(_difference(summary, flat[pair * len(titles) + i]) for pair in range(len(pairs))))
        for i, title in enumerate(titles)
    ]
    columns = tuple(f"{run.methods[a].label} minus {run.methods[b].label}" for a, b in pairs)
    return Table(f"keep {budget}", ("corruption",), columns, tuple(rows))


def _difference(summary: Summary, difference: Difference) -> Value:
    if difference.mean is None:
        return NOTHING
    star = "*" if difference.clear else ""
    p = "" if difference.p is None else "p < 0.001" if difference.p < 0.001 else f"p {difference.p:.3f}"
    few = "" if difference.n == summary.run.config["items"] else f"n {difference.n}"
    return Value(
        summary.number(difference.mean, signed=True) + star,
        summary.interval(difference, signed=True),
        ", ".join(part for part in (p, few) if part),
        strong=difference.clear,
    )


Measure = Callable[[Summary, int, int], float | None]
"""Of a method under a condition, from 0 to 1."""


def _per_condition(summary: Summary, measure: Measure, clean: bool = False) -> list[Group]:
    def under(condition: int) -> Callable[[int], Value]:
        return lambda method: _percent(measure(summary, method, condition), 100)

    conditions = range(len(summary.run.conditions)) if clean else summary.corrupted
    return [(str(summary.run.conditions[condition]), under(condition)) for condition in conditions]


def _retention(summary: Summary, method: int, condition: int) -> float | None:
    unpruned = summary.run.unpruned
    return (
        None
        if unpruned is None
        else metrics.retention(summary.values[method, condition], summary.values[unpruned, condition])
    )


def _flips(summary: Summary, method: int, condition: int) -> float | None:
    scores = summary.run.scores[method]
    return None if summary.clean is None else metrics.flip_rate(scores[summary.clean], scores[condition])


def _overlap(summary: Summary, method: int, condition: int) -> float | None:
    """Of the seeds that have answers under both conditions."""
    run, clean = summary.run, summary.clean
    if clean is None:
        return None
    keys = [((method, clean, seed), (method, condition, seed)) for seed in range(len(run.seeds))]
    pairs = [(run.kept[a], run.kept[b]) for a, b in keys if a in run.kept and b in run.kept]
    return metrics.kept_overlap([a for a, _ in pairs], [b for _, b in pairs], len(run.items))


def _errors(summary: Summary) -> list[Group]:
    """A group for each corruption, and the mean of all."""
    families = {name: conditions for name, conditions in summary.run.families.items() if name != "clean"}
    groups = [(words(name), _error(summary, {name: conditions})) for name, conditions in families.items()]
    return [*groups, ("mCE", _error(summary, families))]


def _error(summary: Summary, families: dict[str, tuple[int, ...]]) -> Callable[[int], Value]:
    def scores(method: int) -> dict[str, metrics.Values]:
        return {name: summary.values[method, list(conditions)] for name, conditions in families.items()}

    def value(method: int) -> Value:
        unpruned = summary.run.unpruned
        return (
            NOTHING if unpruned is None else _percent(metrics.mean_corruption_error(scores(method), scores(unpruned)))
        )

    return value


def _percent(value: float | None, factor: float = 1) -> Value:
    return NOTHING if value is None else Value(f"{factor * value:.1f}")
