"""docs/evidence.md, from what is stored."""

from collections.abc import Sequence
from pathlib import Path

from clustrs.evaluation.metrics import Estimate
from clustrs_paper.evidence.checks import SAME, Check, Claim
from clustrs_paper.evidence.claims import CLAIMS
from clustrs_paper.evidence.results import BLIND, UNPRUNED, Answers, Stored, load
from clustrs_paper.evidence.verdicts import MISSING, OPEN, TOO_SMALL, Verdict, combine, judge

PAGE = Path(__file__).parents[5] / "docs" / "evidence.md"
MODELS = {"mini-llava": "scenes", "mini-onevision": "scenes", "photo-llava": "photos"}
"""The embedded models and their tasks."""
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
HEAD = f"""\
# Does it hold?

Every claim of the paper, its numbers (LLaVA-1.5-7B and LLaVA-OneVision-7B on MM-Vet), and what the embedded models say
about it. They are small, and what is true of them need not be true of models of billions of parameters; but they can be
asked many questions, so that chance can be told from effect. `make evidence` writes this page from the results in
`docs/results/evidence`; no verdict is set by hand.

## How a verdict is found

- Scores are compared on the same questions. A number is a difference in points (per cent of the questions), with a 95 %
  bootstrap interval over the questions; of a study of images, over the images. Questions are drawn one by one, though
  several are about the same image.
- A gain **holds** if its interval lies above 0. It **does not hold** if the interval lies below 0, or wholly within
  {TOO_SMALL:g} point of it: then it is too small to matter. Otherwise it **cannot be told** from these questions.
- "No difference" holds if the interval lies within {SAME:g} points of 0, and does not hold if it lies outside. Where a
  claim is about a threshold, the threshold stands in the table.
- A claim of several numbers holds if all of them do, and does not hold if one of them does not.
- "Gaussian noise" and "salt and pepper" are means over levels at which the unpruned model loses 10, 35 and 50 % of its
  clean score ([how](evaluation.md#levels-by-what-they-cost)): where it is blind, all methods look alike. Which of them
  were measured [stands below](#what-was-measured). For the same reason corruptions under which it keeps less than
  {BLIND:.0%} of its clean score are left out.
- {sum(len(claim.checks) for claim in CLAIMS)} numbers are judged one by one; of so many intervals of 95 % a few miss by
  chance.
"""


def build(models: Sequence[Stored]) -> str:
    """The whole page."""
    parts = [HEAD, overview(models)]
    parts += [section(claim, models) for claim in CLAIMS]
    parts += [geometry(models), conditions(models), again()]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A Markdown table; the last `numbers` columns are aligned to the right."""
    marks = "|" + ":--|" * (len(head) - numbers) + "--:|" * numbers
    first, *others = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, marks, *others]) + "\n"


def claim_verdict(claim: Claim, stored: Stored) -> Verdict | None:
    """The verdict on a claim for one model; None if it is not about that model."""
    if not claim.about(stored.model):
        return None
    if not claim.checks:
        return OPEN
    return combine([judge(check.rule, check.measure(stored)) for check in claim.checks])


def verdict_text(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return "not measured yet" if verdict == MISSING else f"**{verdict}**" if verdict != OPEN else verdict


def overview(models: Sequence[Stored]) -> str:
    rows = [
        [
            f"{number}. [{claim.title}](#{anchor(number, claim)})",
            *(verdict_text(claim_verdict(claim, m)) for m in models),
        ]
        for number, claim in enumerate(CLAIMS, start=1)
    ]
    return "## Verdicts\n\n" + table(["claim", *(m.model for m in models)], rows)


def anchor(number: int, claim: Claim) -> str:
    """As Markdown makes it from the heading."""
    kept = "".join(c for c in f"{number}. {claim.title}".lower() if c.isalnum() or c in " -_")
    return "-".join(kept.split())


def section(claim: Claim, models: Sequence[Stored]) -> str:
    """One claim: what the paper says, and every number with its verdict."""
    number = CLAIMS.index(claim) + 1
    lines = [f"## {number}. {claim.title}\n", f"{claim.says}\n"]
    if not claim.checks:
        return "\n".join([*lines, f"Cannot be told here: {claim.note}.\n"])
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
    """How the tokens of each model lie."""
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


def conditions(models: Sequence[Stored]) -> str:
    """Under which corruptions each model was measured, and what the unpruned model scores there."""
    lines = ["## What was measured\n"]
    for stored in models:
        if stored.grid is None:
            lines.append(f"**{stored.model}**, task {MODELS.get(stored.model, '')}: not measured yet.\n")
            continue
        grid = stored.grid
        left_out = [str(c) for c in grid.conditions if c not in grid.seeing]
        rows = []
        shown = shown_methods(grid)
        for condition in grid.conditions:
            keys = [(method, None if method == UNPRUNED else 16, condition) for method in shown]
            scores = [100 * float(grid.right[key].mean()) for key in keys]
            rows.append([str(condition), *(f"{score:.1f}" for score in scores)])
        report = f" [The whole report](results/evidence/{stored.report})." if stored.report else ""
        parameters = "" if stored.parameters is None else f" Parameters: {stored.parameters.questions} questions."
        lines.append(
            f"**{stored.model}**, task {grid.task}: {grid.questions} questions, {len(grid.right)} cells.{report}"
            f"{parameters} Left out, the model being blind: {', '.join(left_out) or 'nothing'}. Right answers in per "
            "cent, k = 16:\n"
        )
        lines.append(table(["", *shown.values()], rows, numbers=len(shown)))
    return "\n".join(lines)


LABELS = {
    "none": "all tokens",
    "clustrs": "ClustRS",
    "clustrs shrink=false": "ClustRS without shrinkage",
    "clustrs distance=euclidean shrink=false": "Euclidean clustering alone",
    "divprune": "DivPrune",
    "visionzip": "VisionZip",
    "vispruner": "VisPruner",
    "fastervlm": "FasterVLM",
    "denoise inner={'name': 'fastervlm', 'keep': 16}": "FasterVLM with shrinkage",
    "tome": "ToMe",
    "grid": "grid",
    "random": "random",
}
"""Names of methods in tables, in the order in which they stand there; others follow under their own names."""


def shown_methods(grid: Answers, keep: int = 16) -> dict[str, str]:
    """Return every method that a run measured at a budget, the unpruned model first, with its name for tables."""
    measured = dict.fromkeys(method for method, budget, _ in grid.right if budget in (None, keep))
    known = {method: label for method, label in LABELS.items() if method in measured}
    return known | {method: method for method in measured if method not in known}


def again() -> str:
    return """\
## Again

    python -m clustrs_paper.evidence run mini-llava      # stopped, the same command resumes
    python -m clustrs_paper.evidence store mini-llava
    make evidence                                # writes this page
"""


def stored_models() -> list[Stored]:
    return [load(model) for model in MODELS]
