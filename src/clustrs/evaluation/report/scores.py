"""The scores of a run: in words, in tables and curves, against rivals, under corruption, by kind, and as CSV."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from clustrs.corruptions import PAPER_LEVELS
from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report.document import Block, Curve, Figure, Lines, Point, Section, Text
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED
from clustrs.tables import NOTHING, Row, Table, Value, to_csv

OURS = "clustrs"
COLUMNS = (
    *("task", "model", "method", "keep", "corruption", "level", "seed"),
    *("n", "failed", "not_judged", "missing", "mean", "low", "high", "scale", "paper", "parameters"),
    *("visual_tokens", "average_tokens"),  # means over images; the second over the layers of the language model, too
)
NAMES = {"salt_pepper": "salt and pepper", "motion_blur": "motion blur", "jpeg": "JPEG", "gaussian": "Gaussian noise"}
SHOWN_KINDS = 100
Rows = list[tuple[str, list[float | None]]]  # heading of some rows, and a number for each method of the run


def words(corruption: str) -> str:
    return NAMES.get(corruption, corruption)


def judged_on(summary: Summary) -> tuple[str, list[int]]:
    """Return the conditions that methods are ranked by: all corrupted ones, or clean images if there are no others."""
    if summary.corrupted:
        many = len(summary.corrupted) > 1
        return "over all corrupted conditions" if many else f"under {summary.run.conditions[-1]}", summary.corrupted
    return "on clean images", list(range(len(summary.run.conditions)))


def ranked(summary: Summary, budget: str) -> list[tuple[int, float]]:
    """Return the pruning methods of a budget that have scores, the best first, with their means."""
    values = summary.together(judged_on(summary)[1])
    means = [
        (i, mean)
        for i, method in enumerate(summary.run.methods)
        if method.keep is not None and method.budget == budget and (mean := metrics.mean(values[i])) is not None
    ]
    return sorted(means, key=lambda entry: (-entry[1], entry[0]))


def conclusions(summary: Summary) -> Section | None:
    """Build a sentence for each budget, and one on the smallest that is as good as no pruning; None without a score."""
    run, unpruned = summary.run, summary.run.unpruned
    where, conditions = judged_on(summary)
    values, scores = summary.together(conditions), run.scores[:, conditions].mean(axis=1)
    lines = []

    def difference(first: int, second: int) -> tuple[metrics.Difference, str]:
        found = metrics.differences(scores[first], scores[second])[0]
        return found, f"{summary.number(found.mean or 0.0, signed=True)} {summary.interval(found, signed=True)}"

    def sure(first: int, second: int) -> str:
        found, numbers = difference(first, second)
        if found.mean is None or found.low is None:
            return " "
        names = f"{run.methods[first].label} minus {run.methods[second].label}"
        return f" {names}: {numbers}, {'more than chance' if found.clear else 'may be chance'}."

    if unpruned is not None:
        parts = [] if summary.clean is None else [(summary.values[unpruned, summary.clean], "on clean images")]
        parts += [(values[unpruned], where)] if summary.corrupted else []
        means = [f"{summary.number(mean)} {text}" for own, text in parts if (mean := metrics.mean(own)) is not None]
        lines += [f"Unpruned, the model scores {' and '.join(means)} ({summary.unit})."] if means else []
    for budget in run.budgets:
        order = ranked(summary, budget)
        if order:
            (best, mean), names = order[0], [run.methods[method].name for method, _ in order]
            text = f"Keep {budget}: {run.methods[best].label} has the highest mean {where}, {summary.number(mean)}"
            kept = None if unpruned is None else metrics.retention(values[best], values[unpruned])
            text += "." if kept is None else f", {100 * kept:.0f} % of the unpruned model's."
            text += sure(best, order[1][0]) if len(order) > 1 else ""
            place = names.index(OURS) if OURS in names else 0
            if place > 1:
                ours = order[place][0]
                text += f" {run.methods[ours].label} is in place {place + 1}.{sure(ours, best)}"
            lines.append(text)
    if unpruned is not None:
        tokens: dict[str, float] = {}
        for method, count in zip(run.methods, run.visual_tokens, strict=True):
            tokens[method.budget] = min(tokens.get(method.budget, np.inf), np.inf if np.isnan(count) else count)
        compared = False
        for budget in sorted(run.budgets, key=lambda budget: (tokens.get(budget, np.inf), budget)):
            best = next((method for method, _ in ranked(summary, budget)), unpruned)
            found, numbers = difference(best, unpruned)
            if best != unpruned and found.high is not None:
                compared = True
                if found.high >= 0:
                    text = f"keep {budget}, with {run.methods[best].label} ({numbers})"
                    lines.append(f"The smallest budget that is not clearly worse than no pruning {where}: {text}.")
                    break
        else:
            text = f"At every budget measured, the best method is clearly worse than no pruning {where}."
            lines += [text] if compared else []
    return Section("Summary", (Lines(tuple(lines)),)) if lines else None


def scores(summary: Summary) -> Section:
    """Build a table for each corruption, with published numbers where they are of the same cell."""
    run, config = summary.run, summary.run.config
    compared = run.unpruned is not None and run.labels
    retained = " Numbers with % are shares of the unpruned model's score." if compared else ""
    tables = []
    for name, conditions in run.families.items():
        groups = []
        for i in conditions:
            values = []
            for method, value in enumerate(_under(summary, i, summary.value)):
                whole = None if method == run.unpruned else run.unpruned
                kept = None if whole is None else metrics.retention(summary.values[method, i], summary.values[whole, i])
                notes = (value.note, "" if kept is None else f"{100 * kept:.0f} %")
                values.append(replace(value, note=", ".join(filter(None, notes))))
            groups.append((run.conditions[i].level_text or "clean", values))
        title = "Clean images" if name == "clean" else words(name)
        where = "on clean images" if name == "clean" else f"under {title}"
        caption = (
            f"Mean score ({summary.unit}) of {config['model']} on {config['task']} {where}, {config['items']} "
            f"questions, with 95 % bootstrap intervals.{retained} The highest mean of each row is bold."
        )
        tables.append(replace(summary.table(title[0].upper() + title[1:], "level", groups), caption=caption))
    tables += _means(summary)
    tables += [] if summary.reference is None else summary.reference.tables(summary)
    seeds = f", averaged over {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    texts = [
        f"Mean score ({summary.unit}){seeds}, with the 95 % interval "
        "of a bootstrap over questions. Failed answers are left out, never counted as 0; n is given where a mean is "
        "not over all questions. The highest mean of each row is bold, where methods differ; the unpruned model does "
        f"not take part in that.{retained} Whether a difference is more than chance, the paired comparisons say."
    ]
    if summary.reference and any(value.paper for table in tables for row in table.rows for value in row.values):
        texts.append(summary.reference.text)
    return Section("Scores", (*map(Text, texts), *tables))


def _under(summary: Summary, condition: int, value: Callable[[Estimate, float | None], Value]) -> list[Value]:
    """The value of each method under a condition, from its estimate and its published score."""
    one = summary.run.conditions[condition]
    return [
        value(estimates[condition], summary.paper_score(method, one.name, one.level))
        for method, estimates in enumerate(summary.estimates)
    ]


def _means(summary: Summary) -> list[Table]:
    """Means over the levels of each corruption, over brightness and contrast as in the paper, and over everything."""
    run = summary.run
    families = {name: conditions for name, conditions in run.families.items() if name != "clean"}
    whole = {  # corruptions of which the run has the paper's levels and no others
        name
        for name, conditions in families.items()
        if {run.conditions[i].level for i in conditions} == set(PAPER_LEVELS.get(name, ()))
    }
    several = {name: conditions for name, conditions in families.items() if len(conditions) > 1}
    requested = [(words(name), name if name in whole else "", several[name]) for name in several]
    if {"brightness", "contrast"} <= whole:
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
    return [summary.table("Means over levels", "corruption", groups)]


def mean_table(summary: Summary) -> Table:
    """Build one table of all means, each with half the width of its interval, and published numbers."""

    def value(estimate: Estimate, paper: float | None) -> Value:
        low, high = estimate.low, estimate.high
        margin = "" if low is None or high is None else f"\N{PLUS-MINUS SIGN}{summary.number((high - low) / 2)}"
        return replace(summary.value(estimate, paper), interval=margin, note="")

    groups = [(str(one), _under(summary, i, value)) for i, one in enumerate(summary.run.conditions)]
    return summary.table("", "corruption", groups)


def figures(summary: Summary) -> list[Figure]:
    """Build curves of the score against the level for each corruption, a panel per budget; clean comes first."""
    run, scale = summary.run, summary.run.scale

    def curve(method: int, conditions: Sequence[int]) -> Curve:
        points = []
        for x, condition in enumerate(conditions):
            e = summary.estimates[method][condition]
            if e.mean is not None:
                low, high = (None if bound is None else bound * scale for bound in (e.low, e.high))
                points.append(Point(x, e.mean * scale, low, high))
        return Curve(run.methods[method].name, summary.label(method), tuple(points))

    drawn: list[Figure] = []
    for name in (name for name in run.families if name != "clean"):
        conditions = [*([] if summary.clean is None else [summary.clean]), *run.families[name]]
        panels = []
        for budget in run.budgets:
            methods = [i for label in run.labels if (i := run.find(label, budget)) is not None]
            methods += [] if run.unpruned is None else [run.unpruned]
            panels.append((f"keep {budget}", tuple(curve(method, conditions) for method in methods)))
        figure = Figure(
            title=f"Score ({summary.unit}) under {words(name)}; bands are 95 % intervals.",
            x_label=f"{name} level",
            y_label=f"score ({summary.unit})",
            ticks=tuple(run.conditions[i].level_text or "clean" for i in conditions),
            panels=tuple(panels),
            decimals=summary.decimals,
            name=f"curves-{len(drawn) + 1}",
        )
        drawn.append(figure)
    return drawn


def paired(summary: Summary) -> Section | None:
    """Build a table per budget of ClustRS minus each other method, question by question."""
    run, tables = summary.run, []

    def value(found: metrics.Difference) -> Value:
        if found.mean is None:
            return NOTHING
        p = "" if found.p is None else "p < 0.001" if found.p < 0.001 else f"p {found.p:.3f}"
        few = "" if found.n == run.config["items"] else f"n {found.n}"
        text, note = summary.number(found.mean, signed=True) + "*" * found.clear, ", ".join(filter(None, (p, few)))
        return Value(text, summary.interval(found, signed=True), note, strong=found.clear)

    titles, values = [str(condition) for condition in run.conditions], run.scores
    if len(summary.corrupted) > 1:
        titles.append("all corruptions")
        values = np.concatenate([values, values[:, summary.corrupted].mean(1, keepdims=True)], axis=1)
    for budget in run.budgets:
        subset = [i for i, method in enumerate(run.methods) if method.keep is not None and method.budget == budget]
        ours = [i for i in subset if run.methods[i].name == OURS]
        pairs = [(a, b) for a in ours for b in subset if b not in ours] + [(ours[0], b) for b in ours[1:]]
        if pairs:
            first, second = (values[list(side)] for side in zip(*pairs, strict=True))
            columns = tuple(f"{run.methods[a].label} minus {run.methods[b].label}" for a, b in pairs)
            found = [value(difference) for difference in metrics.differences(first, second)]
            rows = tuple(Row((title,), tuple(found[i :: len(titles)])) for i, title in enumerate(titles))
            tables.append(Table(f"keep {budget}", ("corruption",), columns, rows))
    text = (
        f"Mean difference of the scores ({summary.unit}) on the same questions, with the 95 % interval and the "
        "two-sided p of a paired bootstrap over questions. Bold with a star: the interval excludes 0. Nothing is "
        "corrected for the number of comparisons: of twenty without any difference, about one gets a star."
    )
    return Section("ClustRS minus its rivals", (Text(text), *tables)) if tables else None


def robustness(summary: Summary) -> Section | None:
    """Build tables of retention, mCE, flips and overlap, as far as the run has them."""
    run, values, unpruned, clean = summary.run, summary.values, summary.run.unpruned, summary.clean
    methods = range(len(run.methods))
    blocks: list[Block] = []

    def show(text: str, title: str, rows: Rows, unpruned: bool = False, best: str | None = None) -> None:
        groups = [(head, [NOTHING if n is None else Value(f"{n:.1f}") for n in numbers]) for head, numbers in rows]
        blocks.extend([Text(text), summary.table(title, "corruption", groups, unpruned, best)])

    def each(conditions: Sequence[int], measure: Callable[[int, int], float | None]) -> Rows:
        """A row per condition: a fraction of each method, in per cent."""
        rows = [(str(run.conditions[i]), [measure(method, i) for method in methods]) for i in conditions]
        return [(head, [None if part is None else 100 * part for part in parts]) for head, parts in rows]

    if unpruned is not None and run.labels:
        text = "Retention: the share of the unpruned model's score, under the same corruption, in per cent."
        rows = each(range(len(run.conditions)), lambda m, i: metrics.retention(values[m, i], values[unpruned, i]))
        show(text, "Retention", rows, best="highest")
        if summary.corrupted:
            text = (
                "Corruption error: errors summed over the levels of a corruption, relative to the same sum of the "
                "unpruned model, in per cent; mCE is the mean over the corruptions. 100 is as good as the unpruned "
                "model, more is worse."
            )
            families = {name: list(conditions) for name, conditions in run.families.items() if name != "clean"}
            rows = []
            for title, names in [*((words(name), [name]) for name in families), ("mCE", list(families))]:
                own = [{name: values[method][families[name]] for name in names} for method in methods]
                rows.append((title, [metrics.mean_corruption_error(one, own[unpruned]) for one in own]))
            show(text, "Corruption error", rows, best="lowest")
    if clean is not None and summary.corrupted and not run.totals_only:
        text = (
            "Flip rate: the share of questions right on clean and wrong on corrupted images, or the other way "
            "round, in per cent. Right is a score of at least 0.5. No method is marked as the best: a method "
            "that is always wrong never flips."
        )
        rows = each(summary.corrupted, lambda m, i: metrics.flip_rate(run.scores[m, clean], run.scores[m, i]))
        show(text, "Flip rate", rows, unpruned=True)

        def overlap(method: int, condition: int) -> float | None:
            keys = [((method, clean, seed), (method, condition, seed)) for seed in range(len(run.seeds))]
            pairs = [(run.kept[a], run.kept[b]) for a, b in keys if a in run.kept and b in run.kept]
            return metrics.kept_overlap([a for a, _ in pairs], [b for _, b in pairs], len(run.items))

        known = not run.kept or any(len(tokens) for own in run.kept.values() for tokens in own.values())
        if run.labels and known:  # imported results do not say which tokens were kept
            text = (
                "Overlap: the share of the tokens kept in the clean image that are also kept in the corrupted "
                "one, in per cent. No method is marked as the best: random and grid keep the same positions by "
                "construction."
            )
            show(text, "Overlap of kept tokens", each(summary.corrupted, overlap))
    return Section("Robustness", tuple(blocks)) if blocks else None


def kinds(summary: Summary) -> Section | None:
    """Build tables of means for each kind of question, on clean images and over all corruptions."""
    run = summary.run
    sizes = Counter(kind for own in run.kinds for kind in own)
    if not sizes:
        return None
    shown = dict(sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0]))[:SHOWN_KINDS])
    over = {} if summary.clean is None else {"Clean images": [summary.clean]}
    over |= {"Corrupted images, mean over all corruptions": summary.corrupted} if summary.corrupted else {}
    tables = []
    for title, conditions in over.items():
        groups = [
            (f"{kind} (n {shown[kind]})", [summary.value(estimate, whole=shown[kind]) for estimate in estimates])
            for kind, estimates in metrics.kind_estimates(summary.together(conditions), run.kinds, shown).items()
        ]
        tables.append(summary.table(title, "kind", groups))
    text = "A question counts under each of its kinds; n is how many questions of a kind have answers."
    if len(shown) < len(sizes):
        text += f" Of {len(sizes)} kinds the {len(shown)} with the most questions are shown."
    return Section("Kinds of questions", (Text(text), *tables))


def csv_table(summary: Summary) -> str:
    """Render all cells as tidy CSV: one record per method, budget, condition and seed, then one for all seeds."""
    run = summary.run
    groups: list[tuple[int | str, list[int]]] = [(seed, [i]) for i, seed in enumerate(run.seeds)]
    if len(run.seeds) > 1:
        groups.append(("all", list(range(len(run.seeds)))))
    rows: list[Sequence[object]] = [COLUMNS]
    for i, method in enumerate(run.methods):
        values = np.stack([metrics.question_means(run.scores[i][:, seeds]) for _, seeds in groups], axis=1)
        estimates = iter(metrics.estimates(values))
        named, parameters = (run.config["task"], run.config["model"], method.label, method.budget), method.parameters
        tokens = ["" if np.isnan(x) else f"{x:g}" for x in (run.visual_tokens[i], run.average_tokens[i])]
        for j, condition in enumerate(run.conditions):
            paper = summary.paper_score(i, condition.name, condition.level)
            for seed, indices in groups:
                e, states = next(estimates), run.states[i, j, indices]
                missing = len(indices) * run.config["items"] - (states != MISSING).sum()
                counts = (e.n, (states == FAILED).sum(), (states == UNJUDGED).sum(), missing)
                numbers = ["" if x is None else f"{x * run.scale:.6f}" for x in (e.mean, e.low, e.high, paper)]
                cell = (condition.name, condition.level_text, seed, *counts, *numbers[:3])
                rows.append((*named, *cell, f"{run.scale:g}", numbers[3], json.dumps(parameters), *tokens))
    return to_csv(rows)
