"""The scores of a run: headline, chart and tiles, tables and curves, rivals, corruption, kinds, and CSV."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from clustrs.corruptions import PAPER_LEVELS
from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report.document import Block, Curve, Figure, Point, Section, Text, Tiles
from clustrs.evaluation.report.summary import PARTS, Conditions, Latency, Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED
from clustrs.evaluation.store import identity
from clustrs.pruners.registry import display_label
from clustrs.tables import NOTHING, Row, Table, Value, to_csv

OURS = "clustrs"
COLUMNS = (
    *("task", "model", "method", "keep", "corruption", "level", "seed"),
    *("n", "failed", "not_judged", "missing", "mean", "low", "high", "scale", "paper", "parameters"),
    *("visual_tokens", "average_tokens"),  # means over images; the second over the layers of the language model, too
)
NAMES = {"salt_pepper": "salt and pepper", "motion_blur": "motion blur", "jpeg": "JPEG", "gaussian": "Gaussian noise"}
SHOWN_KINDS = 100
ENOUGH = 0.95  # share of the unpruned score that the budget of the headline keeps, if one does
NO_TIMES = "Times are not part of a run: clustrs report RUN --latency 10 measures them."
BOLD = "Bold: the 95 % intervals of the paired differences to every other pruning method of the row lie above 0."
Rows = list[tuple[str, list[float | None]]]  # heading of some rows, and a number for each method of the run


def words(corruption: str) -> str:
    return NAMES.get(corruption, corruption)


def judged_on(summary: Summary) -> tuple[str, list[int]]:
    """Return the conditions that methods are ranked by: all corrupted ones, or clean images if there are no others."""
    if summary.corrupted:
        many = len(summary.corrupted) > 1
        return "over all corrupted conditions" if many else f"under {summary.run.conditions[-1]}", summary.corrupted
    return "on clean images", list(range(len(summary.run.conditions)))


def opening(summary: Summary, latency: Latency | None = None) -> Section:
    """Build what the page shows before anything is unfolded: a sentence, a chart and three tiles."""
    blocks: list[Block] = [*headline(summary), *([chart] if (chart := tokens_figure(summary)) else [])]
    return Section("Summary", (*blocks, *([tiles(summary, latency)] if summary.run.labels else [])))


def headline(summary: Summary) -> list[Text]:
    """Say what pruning keeps, by a method and a budget that are chosen on half of the questions; the others count."""
    run, whole = summary.run, summary.run.unpruned
    if not run.labels:
        return []
    if whole is None:
        return [Text("The unpruned model is not part of this run, so no share of its score is known.")]
    values = summary.together(range(len(run.conditions)))
    shares = [metrics.retention(own[::2], values[whole, ::2]) or 0.0 for own in values]
    known = [i for i, one in enumerate(run.methods) if one.keep is not None and run.average_tokens[i] > 0]
    enough = [i for i in known if shares[i] >= ENOUGH]
    order = sorted(enough or known, key=lambda i: (round(float(run.average_tokens[i])) if enough else 0, -shares[i], i))
    parts = [] if summary.clean is None else [("of the unpruned score on clean images", [summary.clean])]
    if summary.corrupted:
        parts.append(("on corrupted ones" if parts else "of the unpruned score on corrupted images", summary.corrupted))
    held = [summary.together(own)[:, 1::2] for _, own in parts]
    found = [metrics.retention_estimate(own[order[0]], own[whole]) for own in held] if order else []
    if not found or any(one.low is None for one in found):
        return [Text("There are too few answers for a headline.")]
    best, tokens, whole_tokens = order[0], run.average_tokens[order[0]], run.unpruned_tokens[order[0]]
    kept = " and ".join(f"{e.mean:.0%} {text}".replace("%", " %", 1) for e, (text, _) in zip(found, parts, strict=True))
    bounds = " and ".join(f"[{e.low:.0%}, {e.high:.0%}]".replace("%", "") for e in found)
    rule = f"the fewest tokens that keep {100 * ENOUGH:.0f} %" if enough else "the highest share"
    text = f"{summary.label(best)} keeps {kept}, with {100 * tokens / whole_tokens:.2g} % of the visual tokens."
    note = (
        f"{tokens:.4g} of {whole_tokens:.4g} tokens an image. Method and budget were chosen on every second question "
        f"({rule} over all conditions), the shares measured on the {found[0].n} others: 95 % intervals {bounds}."
    )
    return [Text(text, "headline"), Text(note)]


def tokens_figure(summary: Summary) -> Figure | None:
    """Build curves of the score against the tokens, a panel for clean and one for corrupted images.

    With a single budget, each method has a place of its own.
    """
    run = summary.run
    if not run.labels:
        return None
    tokens = {budget: np.mean([run.average_tokens[i] for i in summary.of_budget(budget)]) for budget in run.budgets}
    budgets = sorted(run.budgets, key=lambda budget: np.nan_to_num(tokens[budget]))
    rows = [[run.find(label, budget) for budget in budgets] for label in run.labels]
    single, places = len(budgets) == 1, tuple(float(np.log(tokens[budget])) for budget in budgets)
    counts = tuple(b if np.isnan(tokens[b]) else f"{tokens[b]:.4g}" for b in budgets)
    ticks = tuple(map(display_label, run.labels)) if single else counts
    if single:
        rows = [[i if x == y else None for x in range(len(rows))] for y, (i,) in enumerate(rows)]
    rows += [] if run.unpruned is None else [[run.unpruned] * len(ticks)]
    parts = [] if summary.clean is None else [("Clean images", [summary.clean])]
    parts += [("Corrupted images", summary.corrupted)] if summary.corrupted else []
    panels = []
    for title, conditions in parts:
        found, drawn = metrics.estimates(summary.together(conditions)), []
        for row in rows:
            known = [(x, i) for x, i in enumerate(row) if i is not None]
            points = [_point(x, found[i], run.scale) for x, i in known if found[i].mean is not None]
            drawn.append(Curve(run.methods[known[0][1]].name, summary.label(known[0][1]), tuple(points)))
        panels.append((title, tuple(drawn)))
    over = f" Corrupted: mean over {len(summary.corrupted)} conditions." if len(summary.corrupted) > 1 else ""
    return Figure(
        title=f"Score ({summary.unit}) {'with keep ' + budgets[0] if single else 'against visual tokens'}; "
        f"bands and bars are 95 % intervals.{over}",
        x_label="" if single else "visual tokens an image (log scale)",
        y_label=f"score ({summary.unit})",
        ticks=ticks,
        panels=tuple(panels),
        decimals=summary.decimals,
        name="tokens",
        places=() if single or not len(set(places)) == len(budgets) == np.isfinite(places).sum() else places,
    )


def _point(x: int, estimate: Estimate, scale: float) -> Point:
    low, high = (None if bound is None else bound * scale for bound in (estimate.low, estimate.high))
    return Point(x, (estimate.mean or 0.0) * scale, low, high)


def tiles(summary: Summary, latency: Latency | None) -> Tiles:
    """Name the best, the fastest and the most robust method at each budget."""
    run, times = summary.run, {} if latency is None else latency.by_method
    note = "Highest mean over all questions. * paired 95 % intervals against every other method lie above 0."

    def highest(conditions: Conditions) -> tuple[str, ...]:
        lines = []
        for budget in run.budgets:
            if order := summary.ranked(budget, conditions):
                star = "*" * (summary.clearly_best(budget, conditions) is not None)
                top = [summary.label(i) for i, mean in order if summary.number(mean) == summary.number(order[0][1])]
                names = " and ".join(top) if len(top) < 3 else f"{len(top)} methods alike"
                lines.append(f"keep {budget}: {names} {summary.number(order[0][1])}{star}")
        return tuple(lines)

    def spent(method: int) -> float:
        """Milliseconds to the first token."""
        own = times.get(identity(run.config["methods"][method]), {})
        return sum(own.get(part, np.nan if part == "prefill" else 0.0) for part in PARTS[:-1])

    fastest = []
    for budget in run.budgets:
        timed = sorted((ms, i) for i in summary.of_budget(budget) if (ms := spent(i)) > 0)
        if timed:
            whole = np.nan if run.unpruned is None else spent(run.unpruned)
            faster = "" if np.isnan(whole) else f" (unpruned {whole:.0f} ms, {whole / timed[0][0]:.1f} x)"
            fastest.append(f"keep {budget}: {summary.label(timed[0][1])} {timed[0][0]:.0f} ms{faster}")
    repeats = 0 if latency is None else latency.repeats
    unknown = "Times are not part of these results." if "lmms_eval" in run.config else NO_TIMES
    measured = f"Medians of {repeats} answers to the first token, one at a time; no intervals, so close ones may swap."
    everywhere = judged_on(summary)[1] if summary.clean is None else [summary.clean]
    shown = [
        (f"Best at each budget{'' if summary.clean is None else ', clean images'}", highest(everywhere), note),
        ("Fastest at each budget", tuple(fastest) or ("not measured",), measured if fastest else unknown),
    ]
    if summary.corrupted:
        shown.append(("Most robust: corrupted images", highest(summary.corrupted), note))
    else:
        shown.append(("Most robust", ("not measured",), "The run has no corrupted images (--corruptions)."))
    return Tiles(tuple(shown))


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
            f"questions, with 95 % bootstrap intervals.{retained} {BOLD}"
        )
        table = summary.table(title[0].upper() + title[1:], "level", groups, judged_on=[[i] for i in conditions])
        tables.append(replace(table, caption=caption))
    tables += _means(summary)
    tables += [] if summary.reference is None else summary.reference.tables(summary)
    seeds = f", averaged over {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    texts = [
        f"Mean score ({summary.unit}){seeds}, with the 95 % interval "
        "of a bootstrap over questions. Failed answers are left out, never counted as 0; n is given where a mean is "
        f"not over all questions. {BOLD}{retained}"
    ]
    if summary.reference and any(value.paper for table in tables for row in table.rows for value in row.values):
        texts.append(summary.reference.text)
    return Section("Scores", (*map(Text, texts), *tables), folded=True)


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
    return [summary.table("Means over levels", "corruption", groups, judged_on=[own for *_, own in requested])]


def mean_table(summary: Summary) -> Table:
    """Build one table of all means, each with half the width of its interval, and published numbers."""

    def value(estimate: Estimate, paper: float | None) -> Value:
        low, high = estimate.low, estimate.high
        margin = "" if low is None or high is None else f"\N{PLUS-MINUS SIGN}{summary.number((high - low) / 2)}"
        return replace(summary.value(estimate, paper), interval=margin, note="")

    groups = [(str(one), _under(summary, i, value)) for i, one in enumerate(summary.run.conditions)]
    table = summary.table("", "corruption", groups, judged_on=[[i] for i in range(len(groups))])
    return replace(table, columns=table.columns[: -len(summary.run.labels)] + summary.run.labels)


def figures(summary: Summary) -> list[Figure]:
    """Build curves of the score against the level for each corruption, a panel per budget; clean comes first."""
    run = summary.run

    def curve(method: int, conditions: Sequence[int]) -> Curve:
        found = [summary.estimates[method][condition] for condition in conditions]
        points = [_point(x, e, run.scale) for x, e in enumerate(found) if e.mean is not None]
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
        subset = summary.of_budget(budget)
        ours = [i for i in subset if run.methods[i].name == OURS]
        pairs = [(a, b) for a in ours for b in subset if b not in ours] + [(ours[0], b) for b in ours[1:]]
        if pairs:
            first, second = (values[list(side)] for side in zip(*pairs, strict=True))
            columns = tuple(f"{summary.label(a)} minus {summary.label(b)}" for a, b in pairs)
            found = [value(difference) for difference in metrics.differences(first, second)]
            rows = tuple(Row((title,), tuple(found[i :: len(titles)])) for i, title in enumerate(titles))
            tables.append(Table(f"keep {budget}", ("corruption",), columns, rows))
    text = (
        f"Mean difference of the scores ({summary.unit}) on the same questions, with the 95 % interval and the "
        "two-sided p of a paired bootstrap over questions. Bold with a star: the interval excludes 0. Nothing is "
        "corrected for the number of comparisons: of twenty without any difference, about one gets a star."
    )
    return Section("ClustRS minus its rivals", (Text(text), *tables), folded=True) if tables else None


def robustness(summary: Summary) -> Section | None:
    """Build tables of retention, mCE, flips and overlap, as far as the run has them."""
    run, values, unpruned, clean = summary.run, summary.values, summary.run.unpruned, summary.clean
    methods = range(len(run.methods))
    blocks: list[Block] = []

    def show(text: str, title: str, rows: Rows, unpruned: bool = False) -> None:
        groups = [(head, [NOTHING if n is None else Value(f"{n:.1f}") for n in numbers]) for head, numbers in rows]
        blocks.extend([Text(text), summary.table(title, "corruption", groups, unpruned)])

    def each(conditions: Sequence[int], measure: Callable[[int, int], float | None]) -> Rows:
        """A row per condition: a fraction of each method, in per cent."""
        rows = [(str(run.conditions[i]), [measure(method, i) for method in methods]) for i in conditions]
        return [(head, [None if part is None else 100 * part for part in parts]) for head, parts in rows]

    if unpruned is not None and run.labels:
        text = "Retention: the share of the unpruned model's score, under the same corruption, in per cent."
        rows = each(range(len(run.conditions)), lambda m, i: metrics.retention(values[m, i], values[unpruned, i]))
        show(text, "Retention", rows)
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
            show(text, "Corruption error", rows)
    if clean is not None and summary.corrupted and not run.totals_only:
        text = (
            "Flip rate: the share of questions right on clean and wrong on corrupted images, or the other way "
            "round, in per cent. Right is a score of at least 0.5. A method that is always "
            "wrong never flips."
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
                "one, in per cent. Random and Grid keep the same positions by construction."
            )
            show(text, "Overlap of kept tokens", each(summary.corrupted, overlap))
    return Section("Robustness", tuple(blocks), folded=True) if blocks else None


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
    return Section("Kinds of questions", (Text(text), *tables), folded=True)


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
