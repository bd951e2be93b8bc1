"""Rules by which a claim holds here, does not hold, or is inconclusive: from intervals alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clustrs.evaluation.metrics import Estimate

Verdict = Literal["holds", "does not hold", "inconclusive", "not measured"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold"
OPEN: Verdict = "inconclusive"
MISSING: Verdict = "not measured"
TOO_SMALL = 1.0
"""Points: a gain whose whole interval is nearer to nothing than this is no gain."""


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
