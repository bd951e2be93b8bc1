"""The leaderboard of finished runs: methods by the share of the unpruned model's score that they keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate, Values
from clustrs.evaluation.report import document, replace_files
from clustrs.evaluation.report.document import Section, Text
from clustrs.evaluation.report.summary import LATENCY_FILE, UNPRUNED, Latency, read_stored
from clustrs.evaluation.results import SCORED, Condition, Run, load_run
from clustrs.evaluation.store import identity
from clustrs.pruners import variant_labels
from clustrs.tables import NOTHING, Row, Table, Value, to_csv

PUBLISHED, BOTH = "as published", "place and weight"
SETTINGS = {"compact, plain": PUBLISHED, "original, proportional": BOTH}  # others have the names of their parts
COSTS = {"tokens": ("tokens", 1, 1), "selection": ("selection ms", 1, 1), "prefill": ("prefill ms", 1, 1)}
COSTS["kv_bytes"] = ("KV MiB", 2**20, 2)
"""What `measure_latency` measures of a method: heading, unit, decimals."""
SAME = ("model_files", "seeds", "scope", "crops", "prompt_template", "image_padding", "max_new_tokens", "dtype")
"""What runs of a model have to agree on."""
TEXT = (
    "Per cent of the unpruned model's score under the same corruption. Means are over conditions (in the overview also "
    "over budgets and models); \N{PLUS-MINUS SIGN} is half of the 95 % interval of a bootstrap over questions, paired "
    "with the unpruned model. The order of methods whose intervals overlap may be chance."
)


@dataclass(frozen=True)
class Entry:
    """A method with a budget in a setting on a model: its scores and the unpruned ones [conditions, questions]."""

    model: str
    task: str
    method: str
    keep: int | float | None
    setting: str
    conditions: tuple[Condition, ...]
    scores: Values
    unpruned: Values
    costs: Mapping[str, float]
    machine: str = ""

    @property
    def budget(self) -> str:
        return "all" if self.keep is None else str(self.keep)

    @cached_property
    def shares(self) -> Values:
        """Per cent of the unpruned score that is kept, then those of bootstraps [1 + draws, conditions]."""
        both = np.concatenate([self.scores, self.unpruned])
        own, whole = np.split(np.concatenate([both.mean(1)[None], metrics.bootstrap(both)]), 2, axis=1)
        return np.divide(100 * own, whole, out=np.full_like(own, np.nan), where=whole > 0)


def share(entries: Sequence[Entry], part: slice) -> Estimate:
    """Average over entries and some conditions. Entries with equally many questions see the same draws of them."""
    mean, *drawn = np.mean([one.shares[:, part].mean(1) for one in entries], 0)
    n = min(one.scores.shape[1] for one in entries)
    low, high = np.nanpercentile(drawn, (metrics.LOW, metrics.HIGH))
    return Estimate(n, float(mean), *((float(low), float(high)) if n > 1 else (None, None)))


def read_entries(folders: Sequence[Path]) -> list[Entry]:
    """Read complete runs; those of one model and task are joined on the questions and conditions that all have."""
    groups: dict[tuple[str, str], list[tuple[Path, Run]]] = {}
    for folder in folders:
        run = load_run(folder)
        if run.totals_only or run.count(SCORED) < run.expected:
            raise ValueError(f"run {str(folder)!r} is incomplete: a leaderboard needs the score of every answer")
        groups.setdefault((run.config["model"], run.config["task"]), []).append((folder, run))
    return [entry for (model, task), runs in groups.items() for entry in _join(model, task, runs)]


def _join(model: str, task: str, runs: Sequence[tuple[Path, Run]]) -> list[Entry]:
    (first, reference), *others = runs
    for folder, run in others:
        for name in SAME:
            if run.config.get(name) != reference.config.get(name):
                raise ValueError(f"{name} of run {str(folder)!r} must be that of run {str(first)!r}")
    items = [one for one in reference.items if all(one in run.items for _, run in others)]
    conditions = tuple(one for one in reference.conditions if all(one in run.conditions for _, run in others))
    if not items or not conditions:
        raise ValueError(f"runs of {model} on {task} must share questions and conditions")
    methods = [method for _, run in runs for method in run.methods]
    labels = iter(variant_labels([{**method.parameters, "name": method.name} for method in methods]))
    found: dict[tuple[str, str, str], Entry] = {}
    for folder, run in runs:
        latency: Latency | None = read_stored(folder / LATENCY_FILE, Latency)
        known = latency.by_method if latency else {}
        cells = np.ix_([*map(run.conditions.index, conditions)], [*map(run.items.index, items)])
        setting = f"{run.settings.get('positions')}, {run.settings['attention']}"
        setting = SETTINGS.get(setting, setting)
        for i, method in enumerate(run.methods):
            scores = metrics.question_means(run.scores[i])[cells]
            read = {} if np.isnan(run.average_tokens[i]) else {"tokens": float(run.average_tokens[i])}
            costs = {**known.get(identity(run.config["methods"][i]), {}), **read}
            machine = latency.machine if latency else ""
            entry = Entry(model, task, next(labels), method.keep, setting, conditions, scores, scores, costs, machine)
            key = (entry.method, entry.budget, setting)
            if key in found:
                raise ValueError(f"run {str(folder)!r}: {' '.join(key)} is in another run of {model}, too")
            found[key] = entry
    unpruned = sorted((e for e in found.values() if e.keep is None), key=lambda e: e.setting != PUBLISHED)
    if not unpruned:
        raise ValueError(f"no run of {model} on {task} has the unpruned model (--methods none ...)")
    whole = unpruned[0].scores
    if not whole.mean(1).all():
        raise ValueError(f"the unpruned {model} scores 0 on {task} under a condition: no share of it can be kept")
    return [unpruned[0], *(replace(one, unpruned=whole) for one in found.values() if one.keep is not None)]


def rank(entries: Sequence[Entry], sort: str = "retention") -> dict[str, list[Entry]]:
    """Sort the entries of each model and task: small budgets first, and the best (or cheapest) of a budget."""

    def order(one: Entry) -> tuple[float | str, ...]:
        keep = np.inf if one.keep is None else one.keep
        merit = -one.shares[0].mean() if sort == "retention" else one.costs.get(sort, np.inf)
        return isinstance(one.keep, float), keep, merit, one.method, one.setting

    groups: dict[str, list[Entry]] = {}
    for one in entries:
        groups.setdefault(f"{one.model} on {one.task}", []).append(one)
    return {title: sorted(group, key=order) for title, group in groups.items()}


def overview(ranked: Mapping[str, Sequence[Entry]]) -> Table:
    """Build a row per method and setting: the mean over everything, by budget and by condition; the best come first.

    A cell is empty unless every model has it. Levels of a corruption count by rank where models have different ones.
    """
    given = dict.fromkeys(group[0].conditions for group in ranked.values())
    first, *others = (_by_rank(one) if len(given) > 1 else [*map(str, one)] for one in given)
    if any(names != first for names in others):
        raise ValueError("runs must have the same corruptions, and as many levels of each, for all models")
    flat = [one for group in ranked.values() for one in group if one.keep is not None]
    budgets = dict.fromkeys(one.budget for one in flat)
    rows = []
    for place in dict.fromkeys((one.method, one.setting) for one in flat):
        own = [one for one in flat if (one.method, one.setting) == place]
        cells = [[one for one in own if one.budget == budget] for budget in budgets]
        values = [_value(cell, slice(None)) if len(cell) == len(ranked) else NOTHING for cell in cells]
        mean, *rest = [NOTHING if NOTHING in values else _value(own, part) for part in _parts(first)]
        tokens = [one.costs["tokens"] for one in own if "tokens" in one.costs]
        read = Value(f"{np.mean(tokens):.1f}") if len(tokens) == len(own) else NOTHING
        rows.append(Row(place, (mean, *values, *rest, read)))
    rows.sort(key=lambda row: -1.0 if row.values[0] == NOTHING else float(row.values[0].text), reverse=True)
    columns = ("mean", *(f"keep {budget}" for budget in budgets), *first, "tokens")
    return Table("", ("method", "setting"), columns, tuple(rows))


def _by_rank(conditions: Sequence[Condition]) -> list[str]:
    names = [one.name for one in conditions]
    return [f"{n} {names[:i].count(n) + 1}" if names.count(n) > 1 else n for i, n in enumerate(names)]


def _parts(conditions: Sequence[object]) -> list[slice]:
    """All conditions together, then each."""
    return [slice(None), *(slice(i, i + 1) for i in range(len(conditions)))]


def _value(entries: Sequence[Entry], part: slice) -> Value:
    found = share(entries, part)
    half = "" if found.low is None or found.high is None else f"\N{PLUS-MINUS SIGN}{(found.high - found.low) / 2:.1f}"
    return Value(f"{found.mean:.1f}", half)


def model_section(title: str, entries: Sequence[Entry]) -> Section:
    """Build a row per budget, method and setting of a model, with its costs as far as they are known."""
    conditions, unpruned = entries[0].conditions, 100 * entries[0].unpruned.mean(1)
    scores = ", ".join(f"{mean:.1f} {one}" for one, mean in zip(conditions, unpruned, strict=True))
    text = f"{entries[0].scores.shape[1]} questions; unpruned scores in per cent: {scores}."
    machines = ", ".join(dict.fromkeys(one.machine for one in entries if one.machine))
    text += f" Milliseconds: medians of single answers, {machines}; KV cache of the visual tokens." if machines else ""
    shown = {name: how for name, how in COSTS.items() if any(name in one.costs for one in entries)}
    rows = []
    for one in entries:
        heads = (one.budget, *((UNPRUNED, "") if one.keep is None else (one.method, one.setting)))
        costs = [Value(f"{one.costs[k] / u:.{d}f}") if k in one.costs else NOTHING for k, (_, u, d) in shown.items()]
        rows.append(Row(heads, (*(_value([one], part) for part in _parts(conditions)), *costs)))
    columns = ("mean", *map(str, conditions), *(head for head, *_ in shown.values()))
    return Section(title, (Text(text), Table("", ("keep", "method", "setting"), columns, tuple(rows))))


def csv_table(ranked: Mapping[str, Sequence[Entry]]) -> str:
    """Build a row per entry and condition, and one for the mean over conditions; scores and shares from 0 to 1."""
    head = ("task", "model", "method", "setting", "keep", "condition", "questions", "score", "retention", "low", "high")
    rows: list[Sequence[object]] = [(*head, *COSTS)]
    for one in (one for group in ranked.values() for one in group):
        costs = [f"{one.costs[name]:.6g}" if name in one.costs else "" for name in COSTS]
        for name, part in zip(("mean", *map(str, one.conditions)), _parts(one.conditions), strict=True):
            found = share([one], part)
            shares = ["" if x is None else f"{x / 100:.6f}" for x in (found.mean, found.low, found.high)]
            texts = (one.task, one.model, one.method, one.setting, one.budget, name)
            rows.append((*texts, found.n, f"{one.scores[part].mean():.6f}", *shares, *costs))
    return to_csv(rows)


def write_leaderboard(folders: Sequence[Path], output: Path, sort: str = "retention") -> Table:
    """Write leaderboard.md, .csv and .html, a page with columns that sort, into a folder; return a short overview."""
    ranked = rank(read_entries(folders), sort)
    table = overview(ranked)
    sections = [Section("Overview", (Text(TEXT), table)), *(model_section(*group) for group in ranked.items())]
    contents = {
        "leaderboard.csv": csv_table(ranked),
        "leaderboard.md": document.markdown("Leaderboard", sections),
        "leaderboard.html": document.page("Leaderboard", sections),
    }
    output.mkdir(parents=True, exist_ok=True)
    replace_files(output, contents)
    count = sum(column.startswith("keep ") for column in table.columns) + 1
    bare = [(row.values[0], *(replace(value, interval="") for value in row.values[1:count])) for row in table.rows]
    rows = tuple(replace(row, values=values) for row, values in zip(table.rows, bare, strict=True))
    return replace(table, columns=table.columns[:count], rows=rows)
