"""The evidence page (docs/evidence.md) from the stored results, and the places of tables in other pages."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from clustrs.evaluation.metrics import Estimate, Values, estimates
from clustrs.evaluation.results import Condition
from clustrs.pruners.registry import display_label
from clustrs_paper.evidence import clips, place_and_weight
from clustrs_paper.evidence.checks import HOLDS, MISSING, OPEN, SAME, TOO_SMALL, Check, Claim, Verdict, combine, judge
from clustrs_paper.evidence.claims import CLAIMS
from clustrs_paper.evidence.results import BLIND, IMAGENET_C, LABELS, UNPRUNED, Answers, Stored, load, table

PAGE = Path(__file__).parents[5] / "docs" / "evidence.md"
SMOL_PAGE = PAGE.parent / "smol-llava.md"
DETAILS_PAGE = PAGE.parent / "results" / "evidence" / "claims.md"
MODELS = {"smol-llava": "photos-sentences", "mini-llava": "scenes", "mini-onevision": "scenes", "photo-llava": "photos"}
"""The models that come with the package, or are built by it, and their tasks."""
BUDGETS = (8, 16, 32, 64, 144)
"""Budgets of the grid in both settings."""
GROUPS = {
    "clean": "Clean",
    "noise": "Gaussian and salt-and-pepper noise, mean of {} levels",
    "other": "Brightness, contrast, cutout, motion blur and JPEG, mean of {}",
    IMAGENET_C: "ImageNet-C's shot noise, defocus blur and fog, mean of {}",
}
"""Groups of conditions over which the tables of the grid in both settings take means."""
MEASURES = {
    "first_direction": "share of the variance in the first direction",
    "norm": "norm of a token",
    "norm_ratio": "norm at the 95th percentile, in medians",
    "nearest_distance": "distance of a token from the nearest other one",
    "distance": "median distance between two tokens",
    "residual": "distance from the centroid, 16 clusters",
    "beyond_tau": "share of tokens farther than tau = 1 from their centroid",
    "attention_ratio": "largest attention score, in medians",
    "salience_ratio": "the same with salience",
    "word_norm": "norm of a word embedding",
}
KEY_CLAIMS = (4,)
"""Numbers of the claims that the page itself shows in full."""
HEAD = f"""\
# Evidence

Every claim of the paper, and whether it holds on [smol-llava](smol-llava.md), a pretrained CLIP with a pretrained
language model, and on three models trained from scratch. The paper's numbers are those of LLaVA-1.5-7B and
LLaVA-OneVision-7B on MM-Vet. The models here are small, and results need not carry over to models of billions of
parameters. `make evidence` writes this page from `docs/results/evidence`; no verdict is set by hand.
[Another page](results/evidence/claims.md) has what the paper says in each claim, and all numbers.

## Rules

- Scores are compared on the same questions. A number is a difference in points (per cent of the questions) with a 95 %
  bootstrap interval over the questions, or over the images of a study; where no answer differs, the rule of three.
- A gain **holds** if its interval lies above 0. It **does not hold** if the interval lies below 0, or entirely within
  {TOO_SMALL:g} point of it. Otherwise it is inconclusive. "No difference" holds if the interval lies within
  {SAME:g} points of 0.
- A claim of several numbers holds if all of them do, and does not hold if one of them does not; the table says how many
  hold.
- "Gaussian noise" and "salt and pepper" are means over levels at which the unpruned model loses 10, 35 and 50 % of its
  clean score ([details](evaluation.md#levels-by-what-they-cost)). Corruptions under which it keeps less than
  {BLIND:.0%} of it are excluded.
- {sum(len(claim.checks) for claim in CLAIMS)} numbers are judged one by one; a few of their 95 % intervals miss by
  chance.
"""
DETAILS = """\
# Claims in numbers

All numbers behind the [evidence page](../../evidence.md), written by `make evidence`. Differences are in points, with
95 % bootstrap intervals.
"""


def build(models: Sequence[Stored]) -> str:
    """Build docs/evidence.md: the rules, every verdict, and the key claims in full."""
    key = [section(CLAIMS[number - 1], models) for number in KEY_CLAIMS]
    parts = [HEAD, overview(models), changed_verdicts(models), *key, clips.section(), questions(models), again()]
    return "\n".join(part for part in parts if part)


def build_details(models: Sequence[Stored]) -> str:
    """Build the page with every number of every claim, the geometry of the models, and the scores by corruption."""
    return "\n".join(
        [DETAILS, *(section(claim, models) for claim in CLAIMS), geometry(models), conditions(models), by_group(models)]
    )


def claim_verdict(claim: Claim, stored: Stored) -> Verdict | None:
    """The verdict on a claim for one model; None if it is not about that model."""
    if not claim.about(stored.model):
        return None
    if not claim.checks:
        return OPEN
    return combine([judge(check.rule, check.measure(stored)) for check in claim.checks])


def verdict_text(claim: Claim, stored: Stored) -> str:
    """Return the verdict on a claim for one model and how many of its numbers hold; empty if not about the model."""
    verdict = claim_verdict(claim, stored)
    if verdict is None:
        return ""
    if verdict == MISSING or not claim.checks:
        return "not measured yet" if claim.checks else "not measured here"
    parts = [judge(check.rule, check.measure(stored)) for check in claim.checks]
    share = f" {parts.count(HOLDS)}/{len(parts)}" if len(parts) > 1 else ""
    return (verdict if verdict == OPEN else f"**{verdict}**") + share


def overview(models: Sequence[Stored]) -> str:
    rows = [
        [
            f"[{number}](results/evidence/claims.md#{anchor(number, claim)}) {claim.title}",
            *(verdict_text(claim, m) for m in models),
        ]
        for number, claim in enumerate(CLAIMS, start=1)
    ]
    return "## Verdicts\n\n" + table(["claim", *(m.model for m in models)], rows)


def changed_verdicts(models: Sequence[Stored]) -> str:
    """Build the table of the claims that place and weight change: the verdict without and with them."""
    grids: dict[str, place_and_weight.Settings] = {m.model: place_and_weight.load(m.model) for m in models}
    for m in models:
        if m.grid is not None and m.both is not None:
            grids[m.model] = {place_and_weight.PUBLISHED: m.grid, place_and_weight.BOTH: m.both}
    rows = []
    for number, claim in enumerate(CLAIMS, start=1):
        cells = []
        for model, settings in grids.items():
            pair = [Stored(model, settings.get(s)) for s in (place_and_weight.PUBLISHED, place_and_weight.BOTH)]
            measured = claim.checks and all(check.measure(one) is not None for check in claim.checks for one in pair)
            before, after = (verdict_text(claim, one) if measured else "" for one in pair)
            cells.append(f"{before}; with both: {after}" if before != after else "")
        if any(cells):
            rows.append([f"{number} {claim.title}", *cells])
    text = """\
## With place and weight

The verdicts above are those of the paper's setting: positions run on without gaps, and every token is one key. Where
[original positions and proportional attention](place-and-weight.md) change one, both are here, on its questions:

"""
    return text + table(["claim", *grids], rows)


def anchor(number: int, claim: Claim) -> str:
    """As Markdown makes it from the heading."""
    kept = "".join(c for c in f"{number}. {claim.title}".lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def section(claim: Claim, models: Sequence[Stored]) -> str:
    """One claim: what the paper says, and every number with its verdict."""
    number = CLAIMS.index(claim) + 1
    lines = [f"## {number}. {claim.title}\n", f"{claim.says}\n"]
    if not claim.checks:
        return "\n".join([*lines, f"Not measured here: {claim.note}.\n"])
    about = [m for m in models if claim.about(m.model)]
    rows = [
        [check.label, check.rule.words, paper_text(check), *(measured_text(check, m) for m in about)]
        for check in claim.checks
    ]
    head = ["", "claimed", "paper", *(m.model for m in about)]
    return "\n".join([*lines, table(head, rows, numbers=1 + len(about))])


def paper_text(check: Check) -> str:
    return "" if check.paper is None else f"{signed(check.paper, check)}{suffix(check)}"


def measured_text(check: Check, stored: Stored) -> str:
    """A number with its interval and its verdict."""
    estimate = check.measure(stored)
    verdict = judge(check.rule, estimate)
    if estimate is None or estimate.mean is None:
        return "not measured yet"
    return f"{signed(estimate.mean, check)}{suffix(check)}{interval(estimate, check)}: {verdict}"


def interval(estimate: Estimate, check: Check) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" ({signed(estimate.low, check)} to {signed(estimate.high, check)})"


def signed(value: float, check: Check) -> str:
    """Points with a sign, other units without."""
    if check.unit.startswith("times"):
        return f"{value:.2f}"
    return f"{value:+.1f}" if check.unit == "points" or check.rule.words == "below 0" else f"{value:.1f}"


def suffix(check: Check) -> str:
    return {"points": "", "%": " %"}.get(check.unit, " x")


def geometry(models: Sequence[Stored]) -> str:
    """Write the section on the geometry of each model's tokens."""
    rows = []
    for name, words in MEASURES.items():
        rows.append([words, *(geometry_text(m, name) for m in models)])
    text = (
        "## Geometry of the models\n\nMeans over images of projected tokens as `clustrs study geometry` measures them. "
        "tau = 1 is a distance between tokens: where\nall of them are farther from their centroid, the Huber distance "
        "is nowhere quadratic.\n\n"
    )
    return text + table(["", *(m.model for m in models)], rows, numbers=len(models))


def geometry_text(stored: Stored, name: str) -> str:
    found = [row for row in stored.table("geometry") if row["measure"] == name]
    if not found:
        return "not measured yet"
    values = [float(found[0][column]) for column in ("mean", "low", "high") if found[0][column]]
    return f"{values[0]:.3g}" + (f" ({values[1]:.3g} to {values[2]:.3g})" if len(values) == 3 else "")


def questions(models: Sequence[Stored]) -> str:
    """List how many questions each model was asked."""
    lines = ["## Measurements\n"]
    for stored in models:
        if stored.grid is None:
            lines.append(f"- **{stored.model}**, task {MODELS.get(stored.model, '')}: not measured yet.")
            continue
        grid = stored.grid
        left_out = [str(c) for c in grid.conditions if c not in grid.seeing]
        parameters = "" if stored.parameters is None else f", {asked(stored.parameters)} for the parameters"
        report = f" [Full report](results/evidence/{stored.report})." if stored.report else ""
        lines.append(
            f"- **{stored.model}**, task {grid.task}: {asked(grid)} questions in {len(grid.right)} cells"
            f"{parameters}. Excluded corruptions: {', '.join(left_out) or 'none'}.{report}{coverage(stored)}"
        )
    return "\n".join(lines) + "\n"


def asked(answers: Answers) -> str:
    few, many = answers.fewest, answers.questions
    return f"{few} to {many}" if few < many else f"{few}"


def coverage(stored: Stored) -> str:
    """Say what a grid in both settings has, and how many of its cells were not run."""
    if stored.grid is None or stored.both is None:
        return ""
    parts = []
    for name, own in (("as published", stored.grid), ("with place and weight", stored.both)):
        methods = {method for method, keep, _ in own.right if keep}
        planned = [*product(methods, BUDGETS, own.conditions)]
        left = sum(cell not in own.right for cell in planned)
        parts.append(
            f"{len(methods)} methods {name} ({f'{left} of {len(planned)} cells not run' if left else 'all cells'})"
        )
    return f" Grid: k = {', '.join(map(str, BUDGETS))}, {len(stored.grid.conditions)} conditions; {', '.join(parts)}."


def conditions(models: Sequence[Stored]) -> str:
    """Build the tables of scores by corruption, with every method of a run."""
    lines = ["## Scores by corruption\n"]
    for stored in models:
        if stored.grid is None:
            continue
        grid = stored.grid
        rows = []
        shown = shown_methods(grid)
        for condition in grid.conditions:
            keys = [(method, None if method == UNPRUNED else 16, condition) for method in shown]
            cells = [grid.right.get(key) for key in keys]
            rows.append([str(condition), *("" if cell is None else f"{100 * cell.mean():.1f}" for cell in cells)])
        lines.append(f"**{stored.model}**, right answers in per cent, k = 16:\n")
        lines.append(table(["", *shown.values()], rows, numbers=len(shown)))
    return "\n".join(lines)


def shown_methods(grid: Answers, keep: int = 16) -> dict[str, str]:
    """Return every method that a run measured at a budget, the unpruned model first, with its name for tables."""
    measured = dict.fromkeys(method for method, budget, _ in grid.right if budget in (None, keep))
    known = {method: label for method, label in LABELS.items() if method in measured}
    return known | {method: display_label(method) for method in measured if method not in known}


def pruned(stored: Stored) -> str:
    """Build the table of a grid in both settings over all conditions, and that of the methods that were asked more
    questions; `by_group` has the rest."""
    grid, both = stored.grid, stored.both
    if grid is None or both is None:
        return "Not measured yet.\n"
    shared = min(grid.fewest, both.fewest)
    parts = [settings_table(grid, both, grid.conditions, shared, "random")]
    return "\n".join([*parts, *most_questions(grid, both, shared)])


def by_group(models: Sequence[Stored]) -> str:
    """Build a table for each group of conditions of the grids in both settings."""
    parts = []
    for stored in models:
        grid, both = stored.grid, stored.both
        if grid is None or both is None:
            continue
        shared = min(grid.fewest, both.fewest)
        text = "Right answers in per cent, as published / with place and weight, best first at k = 16"
        parts.append(f"## Pruned {stored.model}\n\n{text}: {shared} questions in each condition.\n")
        for name, title in GROUPS.items():
            group = [c for c in grid.conditions if c.name.startswith(name)] if name == IMAGENET_C else grid.group(name)
            if group:
                parts.append(f"{title.format(len(group))}:\n\n{settings_table(grid, both, group, shared)}")
    return "\n".join(parts)


def settings_table(
    grid: Answers, both: Answers, group: Sequence[Condition], shared: int, baseline: str | None = None, keep: int = 16
) -> str:
    """Build a table of means over conditions: every method as published / with place and weight, by budget, best first
    at `keep`; the last column is the difference to a baseline there, on all questions that both were asked."""

    def values(own: Answers, method: str, budget: int | None, n: int = shared) -> Values:
        cells = [own.right.get((method, budget, condition)) for condition in group]
        found = [cell[:n] for cell in cells if cell is not None]
        return 100 * np.mean(found, axis=0) if len(found) == len(cells) else np.full(n, np.nan)

    def count(own: Answers, method: str) -> int:
        return min(len(own.right.get((method, keep, condition), ())) for condition in group)

    most = count(both, baseline) if baseline else 0
    whole, rows, gains, order = [""], [], [], []
    for method, label in shown_methods(grid).items():
        if method == UNPRUNED:
            whole = [label, *[rounded(values(grid, method, None).mean())] * len(BUDGETS)]
            continue
        settings = [own for own in (grid, both) if any(m == method for m, *_ in own.right)]
        pairs = [[values(own, method, budget).mean() for own in settings] for budget in BUDGETS]
        row, rank = [label, *(" / ".join(map(rounded, pair)) for pair in pairs)], pairs[BUDGETS.index(keep)][-1]
        if len(settings) == 2:
            gains.append(np.diff(pairs)[:, 0])
        if baseline:
            n = min(count(settings[-1], method), most)
            difference = values(settings[-1], method, keep, n) - values(both, baseline, keep, n)
            found = estimates(difference[None])[0]
            rank = np.nan if found.mean is None else found.mean
            fewer = f", {n} questions" if n < most else ""
            row.append("-" if found.mean is None or method == baseline else f"{rank:+.1f}{span(found)}{fewer}")
        rows.append(row)
        order.append(-rank)
    ranked = [rows[i] for i in np.argsort(order, kind="stable")]
    last = ["mean gain by place and weight", *(rounded(gain, "+") for gain in np.mean(gains, axis=0))]
    compared = [f"k = {keep}, minus {baseline}"] if baseline else []
    head = ["", *(f"k = {budget}" for budget in BUDGETS), *compared]
    full = [[*row, *[""] * (len(head) - len(row))] for row in (whole, *ranked, last)]
    return table(head, full, numbers=len(head) - 1)


def span(found: Estimate) -> str:
    return "" if found.low is None or found.high is None else f" ({found.low:+.1f} to {found.high:+.1f})"


def rounded(value: float, sign: str = "") -> str:
    return "-" if np.isnan(value) else f"{value:{sign}.0f}"


def most_questions(grid: Answers, both: Answers, shared: int, keep: int = 16) -> list[str]:
    """Build the table of the methods that were asked more than the `shared` questions at a budget, with intervals."""
    groups = [grid.group(name) for name in ("clean", "noise", "other")]
    n = min((len(both.right.get(("clustrs", keep, c), ())) for group in groups for c in group), default=0)
    if n <= shared:
        return []

    def scores(own: Answers, method: str) -> list[str]:
        budget = None if method == UNPRUNED else keep
        found = [[own.right.get((method, budget, c), np.empty(0, bool))[:n] for c in group] for group in groups]
        if any(len(cell) < n for cells in found for cell in cells):
            return ["-"] * len(groups)
        return [place_and_weight.short(100 * np.mean(cells, axis=0)) for cells in found]

    rows = []
    for method, label in shown_methods(grid, keep).items():
        settings = (grid,) if method == UNPRUNED else (grid, both)
        pairs = [" / ".join(pair) for pair in zip(*(scores(own, method) for own in settings), strict=True)]
        if any(text.strip("- /") for text in pairs):
            rows.append([label, *pairs])
    head = ["", "clean", "noise", "other corruptions"]
    return [f"More questions, {n}, with 95 % intervals, k = {keep}:\n\n{table(head, rows, numbers=len(groups))}"]


def again() -> str:
    return """\
## Reproducing it

    python -m clustrs_paper.evidence run mini-llava      # stopped, the same command resumes
    python -m clustrs_paper.evidence store mini-llava
    make evidence                                        # writes this page
"""


def stored_models() -> list[Stored]:
    return [load(model) for model in MODELS]


def filled(text: str, block: str, name: str = "evidence") -> str:
    """Return a page with the block between the comments `<!-- name -->` and `<!-- end -->` replaced."""
    begin, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, rest = text.split(begin, 1)
    return f"{before}{begin}{block}{end}{rest.split(end, 1)[1]}"
