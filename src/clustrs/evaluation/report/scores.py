"""The scores: a table and curves for each corruption, means over levels, kinds of questions, and all cells as CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from clustrs.corruptions import PAPER_LEVELS
from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report.charts import Curve, Figure, Panel, Point
from clustrs.evaluation.report.document import Block, Section, Text
from clustrs.evaluation.report.summary import UNPRUNED, Summary, budget_table
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED
from clustrs.tables import NOTHING, Table, Value, for_spreadsheet

COLUMNS = (
    *("task", "model", "method", "keep", "corruption", "level", "seed"),
    *("n", "failed", "not_judged", "missing", "mean", "low", "high", "scale", "paper", "parameters"),
)
NAMES = {"salt_pepper": "salt and pepper", "motion_blur": "motion blur", "jpeg": "JPEG", "gaussian": "Gaussian noise"}


SHOWN_KINDS = 100


def words(corruption: str) -> str:
    """Return the name of a corruption as sentences have it."""
    return NAMES.get(corruption, corruption)


def scores(summary: Summary) -> Section:
    """Build a table for each corruption, with published numbers where they are of the same cell."""
    further = [] if summary.reference is None else summary.reference.tables(summary)
    tables = [*_tables(summary), *_means(summary), *further]
    blocks: list[Block] = [Text(_legend(summary))]
    if summary.reference and any(value.paper for table in tables for row in table.rows for value in row.values):
        blocks.append(Text(summary.reference.text))
    return Section("Scores", (*blocks, *tables))


def mean_table(summary: Summary) -> Table:
    """Build one table of all means, each with half the width of its interval, and published numbers."""

    def value(estimate: Estimate, paper: float | None) -> Value:
        mean, low, high = estimate.mean, estimate.low, estimate.high
        margin = "" if low is None or high is None else f"\N{PLUS-MINUS SIGN}{summary.number((high - low) / 2)}"
        printed = "" if paper is None else summary.number(paper)
        return Value(NOTHING.text if mean is None else summary.number(mean), margin, paper=printed)

    groups = [(str(one), _under(summary, i, value)) for i, one in enumerate(summary.run.conditions)]
    return budget_table(summary.run, "", "corruption", groups)


def _under(summary: Summary, condition: int, value: Callable[[Estimate, float | None], Value]) -> list[Value]:
    """Return the value of each method under a condition, from its estimate and its published score."""
    one = summary.run.conditions[condition]
    return [
        value(estimates[condition], summary.paper_score(method, one.name, one.level))
        for method, estimates in enumerate(summary.estimates)
    ]


def figures(summary: Summary) -> Section | None:
    """Build curves of the score against the level, where a corruption was measured."""
    names = [name for name in summary.run.families if name != "clean"]
    drawn = [_figure(summary, name, number) for number, name in enumerate(names, start=1)]
    return Section("Curves", tuple(drawn)) if drawn else None


def _figure(summary: Summary, name: str, number: int) -> Figure:
    """A panel per budget; clean images are the first level."""
    run = summary.run
    conditions = ([] if summary.clean is None else [summary.clean]) + list(run.families[name])
    panels = []
    for budget in run.budgets:
        methods = [i for label in run.labels if (i := run.find(label, budget)) is not None]
        methods += [] if run.unpruned is None else [run.unpruned]
        panels.append(Panel(f"keep {budget}", tuple(_curve(summary, method, conditions) for method in methods)))
    return Figure(
        title=f"Score ({summary.unit}) under {words(name)}; bands are 95 % intervals.",
        x_label=f"{name} level",
        y_label=f"score ({summary.unit})",
        ticks=tuple(run.conditions[i].level_text or "clean" for i in conditions),
        panels=tuple(panels),
        decimals=summary.decimals,
        name=f"curves-{number}",
    )


def _curve(summary: Summary, index: int, conditions: Sequence[int]) -> Curve:
    run, scale = summary.run, summary.run.scale
    points = []
    for x, condition in enumerate(conditions):
        e = summary.estimates[index][condition]
        if e.mean is not None:
            low, high = (None if bound is None else bound * scale for bound in (e.low, e.high))
            points.append(Point(x, e.mean * scale, low, high))
    method = run.methods[index]
    return Curve(method.name, UNPRUNED if method.keep is None else method.label, tuple(points))


def kinds(summary: Summary) -> Section | None:
    """Build tables of means for each kind of question, on clean images and over all corruptions."""
    sizes = Counter(kind for own in summary.run.kinds for kind in own)
    if not sizes:
        return None
    shown = dict(sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0]))[:SHOWN_KINDS])
    tables = []
    if summary.clean is not None:
        tables.append(_kind_table(summary, "Clean images", [summary.clean], shown))
    if summary.corrupted:
        title = "Corrupted images, mean over all corruptions"
        tables.append(_kind_table(summary, title, summary.corrupted, shown))
    text = "A question counts under each of its kinds; n is how many questions of a kind have answers."
    if len(shown) < len(sizes):
        text += f" Of {len(sizes)} kinds the {len(shown)} with the most questions are shown."
    return Section("Kinds of questions", (Text(text), *tables))


def _kind_table(summary: Summary, title: str, conditions: Sequence[int], sizes: Mapping[str, int]) -> Table:
    """A group of rows per kind; `sizes` are the kinds to show and how many questions each has."""
    estimated = metrics.kind_estimates(summary.together(conditions), summary.run.kinds, sizes)
    groups = [
        (f"{kind} (n {sizes[kind]})", [summary.value(estimate, whole=sizes[kind]) for estimate in estimates])
        for kind, estimates in estimated.items()
    ]
    return budget_table(summary.run, title, "kind", groups)


def _legend(summary: Summary) -> str:
    seeds = len(summary.run.seeds)
    return (
        f"Mean score ({summary.unit}){f', averaged over {seeds} seeds' if seeds > 1 else ''}, with the 95 % interval "
        "of a bootstrap over questions. Failed answers are left out, never counted as 0; n is given where a mean is "
        "not over all questions. The highest mean of each row is bold, where methods differ; the unpruned model does "
        "not take part in that. Whether a difference is more than chance, the paired comparisons say."
    )


def _tables(summary: Summary) -> list[Table]:
    run, config = summary.run, summary.run.config
    tables = []
    for name, conditions in run.families.items():
        groups = [(run.conditions[i].level_text or "clean", _under(summary, i, summary.value)) for i in conditions]
        title = "Clean images" if name == "clean" else words(name)
        where = "on clean images" if name == "clean" else f"under {title}"
        caption = (
            f"Mean score ({summary.unit}) of {config['model']} on {config['task']} {where}, {config['items']} "
            "questions, with 95 % bootstrap intervals. The highest mean of each row is bold."
        )
        tables.append(replace(budget_table(run, title[0].upper() + title[1:], "level", groups), caption=caption))
    return tables


def _means(summary: Summary) -> list[Table]:
    """Means over the levels of each corruption, over brightness and contrast as in the paper, and over everything."""
    run = summary.run
    families = {name: conditions for name, conditions in run.families.items() if name != "clean"}
    requested: list[tuple[str, str, tuple[int, ...]]] = [
        (words(name), name if _all_levels(summary, name) else "", conditions)
        for name, conditions in families.items()
        if len(conditions) > 1
    ]
    if _all_levels(summary, "brightness") and _all_levels(summary, "contrast"):
        both = families["brightness"] + families["contrast"]
        requested.append(("brightness and contrast", "brightness_contrast", both))
    if len(families) > 1:
        requested.append(("all corruptions", "", tuple(summary.corrupted)))
    if not requested:
        return []
    flat = iter(metrics.estimates(np.stack([summary.together(conditions) for *_, conditions in requested])))
    groups = [
        (title, [summary.value(next(flat), summary.paper_score(i, known, None)) for i in range(len(run.methods))])
        for title, known, _ in requested
    ]
    return [budget_table(run, "Means over levels", "corruption", groups)]


def _all_levels(summary: Summary, name: str) -> bool:
    """Return whether the run has the paper's levels of a corruption and no others."""
    levels = {summary.run.conditions[i].level for i in summary.run.families.get(name, ())}
    return name in PAPER_LEVELS and levels == set(PAPER_LEVELS[name])


def csv_table(summary: Summary) -> str:
    """Render all cells as tidy CSV: one record per method, budget, condition and seed, then one for all seeds.

    Means and bounds are in the scale of the run; n is the number of questions with a score.
    """
    run = summary.run
    groups: list[tuple[int | None, list[int]]] = [(seed, [i]) for i, seed in enumerate(run.seeds)]
    if len(run.seeds) > 1:
        groups.append((None, list(range(len(run.seeds)))))
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(COLUMNS)
    for i, method in enumerate(run.methods):
        values = np.stack([metrics.question_means(run.scores[i][:, seeds]) for _, seeds in groups], axis=1)
        estimates = iter(metrics.estimates(values))
        named = [
            for_spreadsheet(text) for text in (run.config["task"], run.config["model"], method.label, method.budget)
        ]
        for condition in run.conditions:
            paper = summary.paper_score(i, condition.name, condition.level)
            for seed, indices in groups:
                estimate, states = next(estimates), run.states[i, run.conditions.index(condition), indices]
                failed, not_judged = int((states == FAILED).sum()), int((states == UNJUDGED).sum())
                missing = len(indices) * run.config["items"] - int((states != MISSING).sum())
                record: list[str | int] = [*named, for_spreadsheet(condition.name), condition.level_text]
                record += ["all" if seed is None else seed, estimate.n, failed, not_judged, missing]
                record += [_number(value, run.scale) for value in (estimate.mean, estimate.low, estimate.high)]
                record += [f"{run.scale:g}", _number(paper, run.scale), for_spreadsheet(json.dumps(method.parameters))]
                writer.writerow(record)
    return content.getvalue()


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6f}"
