"""The paper's numbers beside a run's: which table the run reproduces, and the rows that only this table has."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.report.summary import Reference, Summary
from clustrs.evaluation.results import Method, Run
from clustrs.tables import Row, Table, Value
from clustrs_paper.tables import MAIN, MODELS, TASKS, TITLE, PaperReference, find_reference, paper_model, variant

WITHOUT_RRS = {"shrink": False}
"""C+H, what the ablation's gain is measured against."""


def paper_reference(run: Run, compare_with: str | None = None) -> Reference | None:
    """Return what the paper has on a run's cells; `compare_with` names another of its models than the run's."""
    if compare_with is not None and paper_model(compare_with) is None:
        raise ValueError(f"compare_with={compare_with!r}: the paper has numbers for {', '.join(MODELS)}")
    if re.sub(r"[^a-z]", "", run.config["task"].lower()) not in TASKS:
        return None
    model = run.config["model"] if compare_with is None else compare_with
    cells = [(described(m), m.keep, c.name, c.level) for m in run.methods for c in run.conditions]
    found = find_reference(run.config["task"], model, cells, run.config.get("reproduces"))
    if found is None:
        return None
    return Reference(
        text=about_reference(run.config, found),
        score=lambda method, corruption, level: found.score(described(method), method.keep, corruption, level),
        tables=lambda summary: reference_tables(summary, found),
    )


def described(method: Method) -> dict[str, Any]:
    """Return a method of a run as the paper's look-up takes it."""
    return {**method.parameters, "name": method.name}


def about_reference(config: Mapping[str, Any], reference: PaperReference) -> str:
    """Say where the numbers marked "paper" come from, and how the run differs."""
    main = reference.tables == MAIN
    where = "its main tables" if main else f"its table {reference.tables[0].replace('_', ' ')} and no other"
    text = f'Numbers marked "paper" are those that "{TITLE}" prints for {reference.model} in {where}.'
    if paper_model(config["model"]) != reference.model:
        text += f" This run is of another model, {config['model']}."
    if config.get("limit") is not None:
        text += f" The paper asked all questions, this run {config['items']}."
    return text


def reference_tables(summary: Summary, reference: PaperReference) -> list[Table]:
    """Build what the reproduced table has besides cells: the ablation's gain column, the sensitivity's mean row."""
    tables = (gain_table(summary, reference), mean_table(summary, reference))
    return [table for table in tables if table is not None]


def gain_table(summary: Summary, reference: PaperReference) -> Table | None:
    """Build the ablation's gain column: ClustRS minus C+H on the same questions, and the paper's."""
    run = summary.run
    if reference.tables != ("ablation",):
        return None
    rows = []
    for budget in run.budgets:
        pair = [_find_variant(summary, reference, budget, changed) for changed in ({}, WITHOUT_RRS)]
        if pair[0] is None or pair[1] is None:
            continue
        method = run.methods[pair[0]]
        differences = metrics.differences(run.scores[pair[0]], run.scores[pair[1]])
        first = True
        for condition, difference in zip(run.conditions, differences, strict=True):
            gain = reference.gain(described(method), method.keep, condition.name, condition.level)
            if gain is not None:
                rows.append(Row((budget, str(condition)), (_signed(summary, difference, gain),), opens=first))
                first = False
    return Table("Gain of RRS: ClustRS minus C+H", ("keep", "condition"), ("gain",), tuple(rows)) if rows else None


def mean_table(summary: Summary, reference: PaperReference) -> Table | None:
    """Build the mean row of a sensitivity table, if the run has the table's budgets and conditions and no others."""
    run = summary.run
    pruning = [method for method in run.methods if method.keep is not None]
    grid = {(method.keep, condition.name, condition.level) for method in pruning for condition in run.conditions}
    if grid != reference.grid:
        return None
    columns, values = [], []
    for label in run.labels:
        methods = [i for i, method in enumerate(run.methods) if method.label == label]
        mean = reference.mean(described(run.methods[methods[0]]))
        if mean is not None and len(methods) == len(run.budgets):
            (estimate,) = metrics.estimates(np.mean(summary.values[methods], axis=(0, 1))[None])
            columns.append(label)
            values.append(summary.value(estimate, mean))
    if not columns:
        return None
    return Table("Mean over budgets and conditions", ("",), tuple(columns), (Row(("mean",), tuple(values)),))


def _find_variant(summary: Summary, reference: PaperReference, budget: str, changed: Mapping[str, Any]) -> int | None:
    """Find ClustRS at a budget with just these parameters changed."""
    matches = (
        i
        for i, method in enumerate(summary.run.methods)
        if (method.name, method.budget) == ("clustrs", budget)
        and variant(described(method), reference.model) == changed
    )
    return next(matches, None)


def _signed(summary: Summary, difference: metrics.Difference, paper: float) -> Value:
    printed = summary.number(paper, signed=True)
    if difference.mean is None:
        return Value("\N{EN DASH}", paper=printed)
    text, interval = summary.number(difference.mean, signed=True), summary.interval(difference, signed=True)
    note = f"n {difference.n}" if difference.n != summary.run.config["items"] else ""
    return Value(text, interval, note, printed, difference.clear)
