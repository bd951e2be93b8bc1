"""The stored leaderboard: answers of all methods on the embedded models, one bit each, and the pages made of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.evaluation.config import read_settings
from clustrs.evaluation.metrics import estimates
from clustrs.evaluation.report import document
from clustrs.evaluation.report.document import Section, Text
from clustrs.evaluation.report.leaderboard import BOTH, COSTS, PUBLISHED, TEXT, Entry, model_section, overview, rank
from clustrs.pruners import method_class
from clustrs.tables import NOTHING, Row, Table, Value
from clustrs_paper.evidence import place_and_weight, results
from clustrs_paper.evidence.results import UNPRUNED, read_answers, read_rows, write_rows

STORED = results.STORED.parent / "leaderboard"
PAGE = STORED.parents[1] / "leaderboard.md"
REPEATS = 4
MODELS = ("photo-llava", "mini-llava", "mini-onevision")


def run_folder(model: str, setting: str) -> str:
    return f"{model}-{place_and_weight.run_folder(setting)}"


def eval_options(model: str, setting: str, questions: int) -> list[str]:
    """Return the options of `clustrs eval` for a model in a setting, "as published" or "both"."""
    positions, attention = place_and_weight.SETTINGS[setting]
    options = ["--config", "leaderboard", "--model", model, "--limit", str(questions)]
    options += ["--corrupt", "clean", *place_and_weight.NOISE[model][:2]]
    options += ["--crops", place_and_weight.CROPS[model]] if model in place_and_weight.CROPS else []
    if setting == place_and_weight.BOTH:  # nothing to place or weigh where all tokens enter the language model
        listed = read_settings(Path("leaderboard"))["methods"]
        options += ["--methods", *(name for name in listed if method_class(name).where == "encoder")]
    return [*options, "--positions", positions, "--attention", attention]


def store(entries: Sequence[Entry], folder: Path = STORED) -> None:
    """Write a table per model: a row per entry and condition, with right answers as bits, and costs."""
    for model in dict.fromkeys(entry.model for entry in entries):
        rows: list[dict[str, Any]] = []
        for one in (entry for entry in entries if entry.model == model):
            if not np.isin(one.scores, (0, 1)).all():
                raise ValueError(f"scores of {model} must be 0 or 1 to be stored")
            costs = {name: f"{one.costs[name]:.6g}" if name in one.costs else "" for name in COSTS}
            for condition, scores, found in zip(one.conditions, one.scores, estimates(100 * one.scores), strict=True):
                numbers = zip(("mean", "low", "high"), (found.mean, found.low, found.high), strict=True)
                rows.append(
                    {
                        "task": one.task,
                        "model": model,
                        "setting": one.setting,
                        "method": one.method,
                        "keep": "" if one.keep is None else one.keep,
                        "corruption": condition.name,
                        "level": condition.level_text,
                        "questions": found.n,
                        **{name: f"{value:.3f}" for name, value in numbers if value is not None},
                        **costs,
                        "machine": one.machine,
                        "right": np.packbits(scores.astype(bool)).tobytes().hex(),
                    }
                )
        write_rows(folder / f"{model}.csv", rows)


def load(folder: Path = STORED) -> list[Entry]:
    """Load what is stored, as `read_entries` returned it."""
    entries = []
    for model in MODELS:
        rows = read_rows(folder / f"{model}.csv")
        for setting in (PUBLISHED, BOTH):
            own = [row for row in rows if row["setting"] == setting]
            grid = read_answers(own)
            whole = read_answers([row for row in rows if row["method"] == UNPRUNED])
            if grid is None or whole is None:
                continue
            unpruned = np.stack([whole.right[UNPRUNED, None, condition] for condition in whole.conditions])
            for method, keep in dict.fromkeys((method, keep) for method, keep, _ in grid.right):
                scores = np.stack([grid.right[method, keep, condition] for condition in whole.conditions])
                row = next(r for r in own if (r["method"], r["keep"]) == (method, "" if keep is None else str(keep)))
                costs = {name: float(row[name]) for name in COSTS if row[name]}
                values = (scores.astype(np.float64), unpruned.astype(np.float64))
                place = (grid.model, grid.task, method, keep, setting, whole.conditions)
                entries.append(Entry(*place, *values, costs, row["machine"]))
    return entries


def with_costs(entries: Sequence[Entry], timed: Sequence[Entry]) -> list[Entry]:
    """Give entries the times and bytes that short runs of the same methods measured."""
    known = {(one.model, one.method, one.budget, one.setting): one for one in timed}
    found = [known.get((one.model, one.method, one.budget, one.setting), one) for one in entries]
    return [
        replace(one, costs={**own.costs, **one.costs}, machine=own.machine or one.machine)
        for one, own in zip(entries, found, strict=True)
    ]


def pages(entries: Sequence[Entry], folder: Path = STORED) -> dict[Path, str]:
    """Build the sortable page, and a report per model with the commands that repeat it."""
    ranked = rank(entries)
    sections = [Section("Overview", (Text(TEXT), overview(ranked))), *(model_section(*own) for own in ranked.items())]
    built = {folder / "leaderboard.html": document.page("Leaderboard", sections)}
    for (title, own), section in zip(ranked.items(), sections[1:], strict=True):
        model, runs, lines = own[0].model, [], []
        for setting in (place_and_weight.PUBLISHED, place_and_weight.BOTH):
            runs.append(f"out/{run_folder(model, setting)}")
            lines.append(
                f"    clustrs eval {' '.join(eval_options(model, setting, own[0].scores.shape[1]))} --output {runs[-1]}"
            )
        lines += [f"    clustrs report {run} --latency {REPEATS}" for run in runs]
        lines.append(f"    clustrs leaderboard {' '.join(runs)} --output out/leaderboard")
        text = document.markdown(f"Leaderboard: {title}", [Section("Methods", (Text(TEXT), *section.blocks))])
        built[folder / f"{model}.md"] = text + "\n## Repeating it\n\n" + "\n".join(lines) + "\n"
    return built


def block(entries: Sequence[Entry]) -> str:
    """Build the table of the docs: methods in their better setting, means in the other, costs on one model."""
    whole = overview(rank(entries))
    model, keep = MODELS[0], 64
    costs = {(one.method, one.setting): one.costs for one in entries if (one.model, one.keep) == (model, keep)}
    timed = [name for name in COSTS if name != "tokens" and any(name in own for own in costs.values())]
    means = {row.heads: Value(row.values[0].text) for row in whole.rows}
    best = {row.heads[0]: row for row in reversed(whole.rows)}  # the best rows come first
    shown = [name for name in whole.columns if name == "tokens" or name.startswith("keep ")]
    rows = []
    for method, row in sorted(best.items(), key=lambda item: whole.rows.index(item[1])):
        values = dict(zip(whole.columns, row.values, strict=True))
        other = next((means[heads] for heads in means if heads[0] == method and heads != row.heads), NOTHING)
        own = costs.get((row.heads[0], row.heads[1]), {})
        measured = [Value(f"{own[k] / COSTS[k][1]:.{COSTS[k][2]}f}") if k in own else NOTHING for k in timed]
        rows.append(Row(row.heads, (values["mean"], other, *(Value(values[name].text) for name in shown), *measured)))
    columns = ("mean", "other setting", *shown, *(COSTS[name][0] for name in timed))
    return f"{Table('', whole.heads, columns, tuple(rows)).markdown()}\n"
