"""Checks of the paper's claims: comparisons of scores and of studies' numbers, and the rules of a verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clustrs.evaluation.metrics import Estimate
from clustrs_paper.evidence import paper
from clustrs_paper.evidence.results import Stored, Term, lead

Verdict = Literal["holds", "does not hold", "inconclusive", "not measured"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "inconclusive"
MISSING: Verdict = "not measured"
TOO_SMALL = 1.0
"""Points: a gain whose whole interval is within this of 0 does not count as a gain."""


@dataclass(frozen=True)
class Above:
    """The claim is that a number is above `threshold`. It does not hold where the interval is below, or where all of it
    is within `negligible` of the threshold."""

    threshold: float = 0.0
    negligible: float = TOO_SMALL

    def judge(self, low: float, high: float) -> Verdict:
        near = self.threshold - self.negligible < low and high < self.threshold + self.negligible
        if high < self.threshold or (self.negligible and near):
            return FAILS
        return HOLDS if low > self.threshold else OPEN

    @property
    def words(self) -> str:
        return f"above {self.threshold:g}"


@dataclass(frozen=True)
class Within:
    """The claim is that a number is between -margin and +margin."""

    margin: float

    def judge(self, low: float, high: float) -> Verdict:
        if low > self.margin or high < -self.margin:
            return FAILS
        return HOLDS if -self.margin < low and high < self.margin else OPEN

    @property
    def words(self) -> str:
        return f"within {self.margin:g} of 0"


@dataclass(frozen=True)
class Below:
    """The claim is that a number is below `threshold`."""

    threshold: float

    def judge(self, low: float, high: float) -> Verdict:
        return HOLDS if high < self.threshold else FAILS if low > self.threshold else OPEN

    @property
    def words(self) -> str:
        return f"below {self.threshold:g}"


Rule = Above | Within | Below


def judge(rule: Rule, estimate: Estimate | None) -> Verdict:
    """The verdict on one number; without one it was not measured, without an interval it is inconclusive."""
    if estimate is None or estimate.mean is None:
        return MISSING
    if estimate.low is None or estimate.high is None:
        return OPEN
    return rule.judge(estimate.low, estimate.high)


def combine(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim of several parts: it holds if all do, and does not if one does not.

    Parts that were not measured leave it open, unless none was.
    """
    known = [verdict for verdict in verdicts if verdict != MISSING]
    if not known:
        return MISSING
    if FAILS in known:
        return FAILS
    return HOLDS if len(known) == len(verdicts) and {*known} == {HOLDS} else OPEN


RIVALS = {"fastervlm": "FasterVLM", "divprune": "DivPrune", "visionzip": "VisionZip"}
C_H, CLUSTERING = "clustrs shrink=false", "clustrs distance=euclidean shrink=false"
SIGLIP = "mini-onevision"
ABLATION, TAU, CLIP = ("ablation",), ("sensitivity_tau",), ("sensitivity_clip",)
SAME = 2.0
"""Points: what counts as the same score where the paper says that something makes no difference."""
BUDGETS = (16, 50, 144)
MAIN_GROUPS = {"clean": "clean images", "gaussian": "Gaussian noise", "salt_pepper": "salt and pepper"}


@dataclass(frozen=True)
class Check:
    """One number of a claim: how it is called, measured and judged, and what the paper has for it."""

    label: str
    rule: Rule
    measure: Callable[[Stored], Estimate | None]
    paper: float | None = None
    unit: str = "points"


@dataclass(frozen=True)
class Claim:
    """Claim of the paper, paraphrased, and its checks. `models` are those that it is about (empty: all); without a
    check nothing can be said here, and `note` says why."""

    title: str
    says: str
    checks: tuple[Check, ...] = ()
    models: tuple[str, ...] = ()
    note: str = ""

    def about(self, model: str) -> bool:
        return not self.models or model in self.models


def compared(
    label: str,
    terms: Sequence[Term],
    rule: Rule | None = None,
    tables: Sequence[str] = paper.MAIN,
    model: str = paper.LLAVA,
    part: Literal["grid", "parameters"] = "grid",
) -> Check:
    """A comparison of scores on the same questions, in the grid or in the run that varies ClustRS's parameters."""

    def measure(stored: Stored) -> Estimate | None:
        answers = stored.grid if part == "grid" else stored.parameters
        return None if answers is None else answers.contrast(terms)

    return Check(label, rule or Above(), measure, paper.contrast(terms, tables, model))


def varied(label: str, terms: Sequence[Term], rule: Rule, tables: Sequence[str]) -> Check:
    """A comparison in the run that varies the parameters of ClustRS."""
    return compared(label, terms, rule, tables, part="parameters")


def over_budgets(first: str, second: str) -> tuple[Term, ...]:
    """By how much one variant is better than another, mean over budgets and conditions."""
    share = 1 / len(BUDGETS)
    return tuple(term for keep in BUDGETS for term in lead(first, second, keep, "all", share))


def changed(terms: Iterable[Term], minus: Iterable[Term]) -> tuple[Term, ...]:
    """The difference of two comparisons."""
    return (*terms, *(replace(term, weight=-term.weight) for term in minus))


def table_check(
    label: str,
    rule: Rule,
    where: tuple[str, str, dict[str, str]],
    factor: float = 1.0,
    number: float | None = None,
    unit: str = "%",
) -> Check:
    """A number of a study's table, with its interval: `where` is the table, the column, and the fields of the row."""
    table, column, fields = where

    def measure(stored: Stored) -> Estimate | None:
        rows = [row for row in stored.table(table) if all(row[name] == value for name, value in fields.items())]
        if len(rows) != 1 or not rows[0][column]:
            return None
        ends = ("low", "high") if column == "mean" else (f"{column}_low", f"{column}_high")
        low, high = (factor * float(rows[0][end]) if rows[0][end] else None for end in ends)
        return Estimate(int(rows[0].get("images") or 0), factor * float(rows[0][column]), low, high)

    return Check(label, rule, measure, number, unit)


def ranking(level: str, rule: Rule) -> Check:
    where = {"measure": "top_overlap", "method": "ranking", "corruption": "gaussian", "level": level}
    number = paper.table_value("rank_instability", "overlap", level=float(level))
    label = f"of the 15 most attended tokens still there at sigma {level}"
    return table_check(label, rule, ("stability", "mean", where), 100, number)


def kept_again(level: str) -> Check:
    """Difference in the share of positions kept again, ClustRS minus FasterVLM; both intervals are added."""

    def measure(stored: Stored) -> Estimate | None:
        found = {
            row["method"]: row
            for row in stored.table("stability")
            if (row["measure"], row["corruption"], row["level"]) == ("kept_overlap", "gaussian", level)
        }
        if not {"clustrs", "fastervlm"} <= set(found):
            return None
        ours, theirs = ([100 * float(found[m][c]) for c in ("mean", "low", "high")] for m in ("clustrs", "fastervlm"))
        n = int(found["clustrs"]["images"])
        return Estimate(n, ours[0] - theirs[0], ours[1] - theirs[2], ours[2] - theirs[1])

    return Check(f"positions kept again at sigma {level}, ClustRS minus FasterVLM", Above(), measure)


def nearer(level: str) -> Check:
    where = {"keep": "16", "corruption": "gaussian", "level": level}
    label = f"change of the distance from the clean token at sigma {level}, k = 16"
    return table_check(label, Below(0.0), ("denoising", "after_change", where), 100)


def geometry(label: str, measure: str, rule: Rule, number: float) -> Check:
    return table_check(label, rule, ("geometry", "mean", {"measure": measure}), 1.0, number, "times the median")


def cost(label: str, rule: Rule, keep: str, number: float, of_answer: bool) -> Check:
    """The visual overhead of ClustRS, in that of FasterVLM or in per cent of an answer of 64 tokens. The bounds are
    quartiles of the runs instead of an interval."""
    ends = ("overhead_ms", "overhead_quartile_1_ms", "overhead_quartile_3_ms")

    def measure(stored: Stored) -> Estimate | None:
        rows = {(row["method"], row["keep"]): row for row in stored.table("overhead")}
        if not {("clustrs", keep), ("fastervlm", keep)} <= set(rows):
            return None
        ours, theirs = ([float(rows[name, keep][end]) for end in ends] for name in ("clustrs", "fastervlm"))
        runs = int(rows["clustrs", keep]["runs"])
        if of_answer:
            whole = float(rows["clustrs", keep]["answer_64_ms"]) / 100
            return Estimate(runs, *(value / whole for value in ours))
        return Estimate(runs, ours[0] / theirs[0], ours[1] / theirs[2], ours[2] / theirs[1])

    return Check(label, rule, measure, number, "%" if of_answer else "times FasterVLM's")


def leads(
    keep: int, groups: dict[str, str], rivals: Iterable[str] = tuple(RIVALS), model: str = paper.LLAVA
) -> tuple[Check, ...]:
    return tuple(
        compared(f"{text}, k = {keep}, ClustRS minus {RIVALS[rival]}", lead("clustrs", rival, keep, group), model=model)
        for group, text in groups.items()
        for rival in rivals
    )


def falls_more(reference: str, keep: int | None, name: str, group: str, text: str) -> Check:
    """By how much more FasterVLM loses under noise, at k = 16, than a reference does."""

    def loss(method: str, kept: int | None) -> tuple[Term, ...]:
        return Term(1, method, kept, "clean"), Term(-1, method, kept, group)

    terms = changed(loss("fastervlm", 16), loss(reference, keep))
    return compared(f"loss from clean to {text}, FasterVLM minus {name}", terms)


def shrinkage(keep: int, group: str) -> tuple[Term, ...]:
    return lead("clustrs", C_H, keep, group)


def matched(rival: str) -> Check:
    """ClustRS with 50 tokens against a rival with a quarter of all: 144 here, 180 in the paper."""
    mildest = "gaussian 1"
    terms = (Term(1, "clustrs", 50, mildest), Term(-1, rival, 144, mildest))
    label = f"mildest Gaussian noise, ClustRS with 50 tokens minus {RIVALS[rival]} with 144 (paper: 180, sigma 0.5)"
    printed = (Term(1, "clustrs", 50, "gaussian"), Term(-1, rival, 180, "gaussian"))
    number = paper.difference_at(printed, paper.ONEVISION, 0.5)
    return replace(compared(label, terms, Above(-SAME, negligible=0)), paper=number)
