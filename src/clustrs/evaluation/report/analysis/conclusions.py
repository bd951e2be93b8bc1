"""The run in words: which method is best at which budget, how sure that is, and what a smaller budget costs."""

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Difference
from clustrs.evaluation.report.blocks import Bullets, Section
from clustrs.evaluation.report.summary import Summary

OURS = "clustrs"


def conclusions(summary: Summary) -> Section | None:
    """A sentence for each budget, and one on the smallest that is as good as no pruning; None without a score."""
    run = summary.run
    first = [_unpruned(summary)] if run.unpruned is not None else []
    lines = [*first, *(_best_at(summary, budget) for budget in run.budgets), _smallest(summary)]
    told = tuple(line for line in lines if line)
    return Section("Summary", (Bullets(told),)) if told else None


def judged_on(summary: Summary) -> tuple[str, list[int]]:
    """What methods are ranked by: all corrupted conditions together, or clean images where there are no others."""
    if summary.corrupted:
        many = len(summary.corrupted) > 1
        return "over all corrupted conditions" if many else f"under {summary.run.conditions[-1]}", summary.corrupted
    return "on clean images", list(range(len(summary.run.conditions)))


def ranked(summary: Summary, budget: str) -> list[tuple[int, float]]:
    """The pruning methods of a budget that have scores, the best first, with their means."""
    _, conditions = judged_on(summary)
    values = summary.together(conditions)
    means = [
        (i, mean)
        for i, method in enumerate(summary.run.methods)
        if method.keep is not None and method.budget == budget and (mean := metrics.mean(values[i])) is not None
    ]
    return sorted(means, key=lambda entry: (-entry[1], entry[0]))


def compare(summary: Summary, first: int, second: int) -> Difference:
    """First minus second on what methods are ranked by."""
    _, conditions = judged_on(summary)
    scores = summary.run.scores[:, conditions].mean(axis=1)
    return metrics.differences(scores[first], scores[second])[0]


def _unpruned(summary: Summary) -> str:
    unpruned = summary.run.unpruned
    assert unpruned is not None
    parts = []
    if summary.clean is not None:
        parts.append((summary.values[unpruned, summary.clean], "on clean images"))
    if summary.corrupted:
        parts.append((summary.together(summary.corrupted)[unpruned], judged_on(summary)[0]))
    told = [f"{summary.number(mean)} {where}" for values, where in parts if (mean := metrics.mean(values)) is not None]
    return f"Unpruned, the model scores {' and '.join(told)} ({summary.unit})." if told else ""


def _best_at(summary: Summary, budget: str) -> str:
    """The best method of a budget, how sure that is, and where ClustRS stands."""
    order, run = ranked(summary, budget), summary.run
    if not order:
        return ""
    (best, mean), where = order[0], judged_on(summary)[0]
    text = f"Keep {budget}: {run.methods[best].label} has the highest mean {where}, {summary.number(mean)}"
    if run.unpruned is not None:
        kept = metrics.retention(*(summary.together(judged_on(summary)[1])[i] for i in (best, run.unpruned)))
        text += "" if kept is None else f", {100 * kept:.0f} % of the unpruned model's"
    text += "."
    if len(order) > 1:
        text += f" {_sure(summary, best, order[1][0])}"
    place = next((i for i, (method, _) in enumerate(order) if run.methods[method].name == OURS), 0)
    if place > 1:
        text += (
            f" {run.methods[order[place][0]].label} is in place {place + 1}. {_sure(summary, order[place][0], best)}"
        )
    return text


def _sure(summary: Summary, first: int, second: int) -> str:
    """A difference in words, with its interval."""
    difference, run = compare(summary, first, second), summary.run
    if difference.mean is None or difference.low is None:
        return ""
    names = f"{run.methods[first].label} minus {run.methods[second].label}"
    sure = "more than chance" if difference.clear else "may be chance"
    return (
        f"{names}: {summary.number(difference.mean, signed=True)} {summary.interval(difference, signed=True)}, {sure}."
    )


def _smallest(summary: Summary) -> str:
    """The smallest budget at which some method is not clearly worse than the unpruned model."""
    run = summary.run
    if run.unpruned is None:
        return ""
    where = judged_on(summary)[0]
    found = False
    for budget in sorted(run.budgets, key=lambda text: (np.nanmin(_tokens(summary, text)), text)):
        for method, _ in ranked(summary, budget)[:1]:
            difference = compare(summary, method, run.unpruned)
            found = found or difference.high is not None
            if difference.high is not None and difference.high >= 0:
                return (
                    f"The smallest budget that is not clearly worse than no pruning {where}: keep {budget}, with "
                    f"{run.methods[method].label} ({summary.number(difference.mean or 0.0, signed=True)} "
                    f"{summary.interval(difference, signed=True)})."
                )
    return f"At every budget measured, the best method is clearly worse than no pruning {where}." if found else ""


def _tokens(summary: Summary, budget: str) -> list[float]:
    """The tokens that methods of a budget leave, infinite where that is not known."""
    counts = [summary.run.visual_tokens[i] for i, method in enumerate(summary.run.methods) if method.budget == budget]
    return [np.inf if np.isnan(count) else float(count) for count in counts] or [np.inf]
