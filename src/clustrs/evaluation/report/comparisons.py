"""The run in words, ClustRS against its rivals, and how well each method withstands corruption."""

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Difference
from clustrs.evaluation.report.document import Block, Bullets, Section, Text
from clustrs.evaluation.report.scores import words
from clustrs.evaluation.report.summary import Group, Summary, budget_table
from clustrs.evaluation.results import Run
from clustrs.tables import NOTHING, Row, Table, Value

OURS = "clustrs"


def conclusions(summary: Summary) -> Section | None:
    """Build a sentence for each budget, and one on the smallest that is as good as no pruning; None without a score."""
    run = summary.run
    first = [_unpruned(summary)] if run.unpruned is not None else []
    lines = [*first, *(_best_at(summary, budget) for budget in run.budgets), _smallest(summary)]
    known = tuple(line for line in lines if line)
    return Section("Summary", (Bullets(known),)) if known else None


def judged_on(summary: Summary) -> tuple[str, list[int]]:
    """Return the conditions that methods are ranked by: all corrupted ones, or clean images if there are no others."""
    if summary.corrupted:
        many = len(summary.corrupted) > 1
        return "over all corrupted conditions" if many else f"under {summary.run.conditions[-1]}", summary.corrupted
    return "on clean images", list(range(len(summary.run.conditions)))


def ranked(summary: Summary, budget: str) -> list[tuple[int, float]]:
    """Return the pruning methods of a budget that have scores, the best first, with their means."""
    _, conditions = judged_on(summary)
    values = summary.together(conditions)
    means = [
        (i, mean)
        for i, method in enumerate(summary.run.methods)
        if method.keep is not None and method.budget == budget and (mean := metrics.mean(values[i])) is not None
    ]
    return sorted(means, key=lambda entry: (-entry[1], entry[0]))


def compare(summary: Summary, first: int, second: int) -> Difference:
    """Return the paired difference, first minus second, under the conditions that methods are ranked by."""
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


def paired(summary: Summary) -> Section | None:
    """Build tables of ClustRS minus each other method of the same budget, question by question."""
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
    """Build tables of retention, mCE, flips and overlap, as far as the run has them."""
    run = summary.run
    blocks: list[Block] = []

    def show(text: str, title: str, groups: list[Group], unpruned: bool = False, best: str | None = None) -> None:
        blocks.extend([Text(text), budget_table(run, title, "corruption", groups, unpruned, best)])

    if run.unpruned is not None and run.labels:
        text = "Retention: the share of the unpruned model's score, under the same corruption, in per cent."
        show(text, "Retention", _retention(summary, run.unpruned), best="highest")
        if summary.corrupted:
            text = (
                "Corruption error: errors summed over the levels of a corruption, relative to the same sum of the "
                "unpruned model, in per cent; mCE is the mean over the corruptions. 100 is as good as the unpruned "
                "model, more is worse."
            )
            show(text, "Corruption error", _errors(summary, run.unpruned), best="lowest")
    if summary.clean is not None and summary.corrupted and not run.totals_only:
        text = (
            "Flip rate: the share of questions right on clean and wrong on corrupted images, or the other way "
            "round, in per cent. Right is a score of at least 0.5. No method is marked as the best: a method "
            "that is always wrong never flips."
        )
        show(text, "Flip rate", _flips(summary, summary.clean), unpruned=True)
        if run.labels and _knows_tokens(run):
            text = (
                "Overlap: the share of the tokens kept in the clean image that are also kept in the corrupted "
                "one, in per cent. No method is marked as the best: random and grid keep the same positions by "
                "construction."
            )
            show(text, "Overlap of kept tokens", _overlap(summary, summary.clean))
    return Section("Robustness", tuple(blocks)) if blocks else None


def _knows_tokens(run: Run) -> bool:
    """Return whether the run says which tokens were kept; imported results do not."""
    return not run.kept or any(len(tokens) for own in run.kept.values() for tokens in own.values())


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


def _retention(summary: Summary, unpruned: int) -> list[Group]:
    groups: list[Group] = []
    for i, condition in enumerate(summary.run.conditions):
        whole = summary.values[unpruned, i]
        groups.append((str(condition), [_percent(metrics.retention(own[i], whole), 100) for own in summary.values]))
    return groups


def _flips(summary: Summary, clean: int) -> list[Group]:
    run = summary.run
    return [
        (str(run.conditions[i]), [_percent(metrics.flip_rate(own[clean], own[i]), 100) for own in run.scores])
        for i in summary.corrupted
    ]


def _overlap(summary: Summary, clean: int) -> list[Group]:
    """Values are of the seeds that have answers under both conditions."""
    run = summary.run

    def value(method: int, condition: int) -> Value:
        keys = [((method, clean, seed), (method, condition, seed)) for seed in range(len(run.seeds))]
        pairs = [(run.kept[a], run.kept[b]) for a, b in keys if a in run.kept and b in run.kept]
        return _percent(metrics.kept_overlap([a for a, _ in pairs], [b for _, b in pairs], len(run.items)), 100)

    return [(str(run.conditions[i]), [value(m, i) for m in range(len(run.methods))]) for i in summary.corrupted]


def _errors(summary: Summary, unpruned: int) -> list[Group]:
    """A group for each corruption, and the mean of all."""
    families = {name: list(conditions) for name, conditions in summary.run.families.items() if name != "clean"}
    groups: list[Group] = []
    for title, shown in [*((words(name), [name]) for name in families), ("mCE", list(families))]:
        scores = [{name: own[families[name]] for name in shown} for own in summary.values]
        groups.append((title, [_percent(metrics.mean_corruption_error(own, scores[unpruned])) for own in scores]))
    return groups


def _percent(value: float | None, factor: float = 1) -> Value:
    return NOTHING if value is None else Value(f"{factor * value:.1f}")
