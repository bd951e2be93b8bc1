"""Means with intervals, paired differences, and robustness to corruption.

Scores are from 0 to 1. NaN is an answer without a score: it is left out, never counted as 0. Scores of a method under
one corruption are [seeds, items]; `question_means` averages them over the seeds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from clustrs.evaluation.results import KeptTokens

Values = NDArray[np.float64]

RESAMPLES = 2000
LOW, HIGH = 2.5, 97.5  # percentiles that bound an interval of 95 %
CORRECT = 0.5  # lowest score of an answer that counts as correct
CHUNK = 2_000_000  # number of drawn questions that are held at a time


@dataclass(frozen=True)
class Estimate:
    """Mean over n questions and its 95 % interval; None where there are too few questions."""

    n: int
    mean: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference(Estimate):
    """Mean difference over n questions, its 95 % interval, and the two-sided p of no difference."""

    p: float | None = None

    @property
    def clear(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def question_means(scores: Values) -> Values:
    """Average over seeds: [..., seeds, items] to [..., items]; NaN where no seed has a score."""
    return _mean(scores, -2)


def mean(values: Values) -> float | None:
    """Average over the questions [items] that have a score; None if none has.

    >>> mean(np.array([1.0, 0.0, np.nan]))
    0.5
    """
    average = _mean(values, -1)
    return None if np.isnan(average) else float(average)


def estimates(values: Values, resamples: int = RESAMPLES, seed: int = 0) -> list[Estimate]:
    """Average each row of [..., items], with a 95 % interval from a percentile bootstrap over the questions.

    All rows see the same draws.

    >>> [estimate] = estimates(np.array([[1.0, 0.0, 1.0, 1.0]]))
    >>> estimate.n, estimate.mean
    (4, 0.75)
    """
    rows = values.reshape(prod(values.shape[:-1]), values.shape[-1])
    return _summaries(rows, bootstrap(rows, resamples, seed))


def differences(first: Values, second: Values, resamples: int = RESAMPLES, seed: int = 0) -> list[Difference]:
    """Estimate first minus second, each [..., seeds, items], on the answers that both have; questions are drawn."""
    values = question_means(first - second)
    values = values.reshape(prod(values.shape[:-1]), values.shape[-1])
    drawn = bootstrap(values, resamples, seed)
    below, above = (drawn <= 0).sum(0), (drawn >= 0).sum(0)
    shares = 2 * (1 + np.minimum(below, above)) / (1 + (~np.isnan(drawn)).sum(0))
    return [
        Difference(e.n, e.mean, e.low, e.high, min(1.0, float(share)) if e.n > 1 else None)
        for e, share in zip(_summaries(values, drawn), shares, strict=True)
    ]


def bootstrap(values: Values, resamples: int = RESAMPLES, seed: int = 0) -> Values:
    """Average the rows [rows, items] over questions drawn with replacement: [resamples, rows]; NaN without a score."""
    cells, items = values.shape
    used = ~np.isnan(values).all(0)  # questions without any score change nothing but the number of those drawn
    values = values[:, used]
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)
    complete = bool(used.all() and known.all())
    generator = np.random.default_rng(seed)
    means = np.full((resamples, cells), np.nan)
    step = max(1, CHUNK // max(1, items))
    for start in range(0, resamples if items else 0, step):
        size = min(step, resamples - start)
        picks = generator.integers(0, items, (size, items)) + items * np.arange(size)[:, None]
        counts = np.bincount(picks.ravel(), minlength=size * items).reshape(size, items)[:, used].astype(np.float64)
        sizes = np.full((size, cells), float(items)) if complete else counts @ known.T.astype(np.float64)
        means[start : start + size] = _ratio(counts @ filled.T, sizes)
    return means.round(12)  # a difference of 0 must be 0 in whatever order it was summed


def _summaries(values: Values, drawn: Values) -> list[Estimate]:
    summaries = []
    bounds, some = np.full((2, len(values)), np.nan), ~np.isnan(drawn).all(0)
    bounds[:, some] = np.nanpercentile(drawn[:, some], (LOW, HIGH), axis=0)
    for n, average, low, high in zip((~np.isnan(values)).sum(-1), _mean(values, -1), *bounds, strict=True):
        interval = (float(low), float(high)) if n > 1 else (None, None)
        summaries.append(Estimate(int(n), float(average) if n else None, *interval))
    return summaries


def retention(values: Values, unpruned: Values) -> float | None:
    """Compute the fraction of the unpruned model's score that a method keeps; both are [items], same corruption.

    Only questions with both scores count; None if there are none, or the unpruned model scores 0.

    >>> retention(np.array([1.0, 0.0]), np.array([1.0, 1.0]))
    0.5
    """
    own, reference = _paired_means(values, unpruned)
    return own / reference if own is not None and reference else None


def retention_estimate(values: Values, unpruned: Values) -> Estimate:
    """Estimate `retention` with its 95 % interval, from a bootstrap over the questions that have both scores."""
    both = np.stack([values, unpruned])[:, ~np.isnan(values + unpruned)]
    share, n = retention(values, unpruned), both.shape[1]
    if share is None or n < 2:
        return Estimate(n, share)
    drawn = bootstrap(both)
    low, high = np.nanpercentile(_ratio(drawn[:, 0], drawn[:, 1]), (LOW, HIGH))
    return Estimate(n, share, float(low), float(high))


def mean_corruption_error(values: Mapping[str, Values], unpruned: Mapping[str, Values]) -> float | None:
    """Compute mCE in percent, relative to the unpruned model: 100 is as good as it, more is worse.

    For each corruption, whose scores are [levels, items], the errors 1 - mean are summed over the levels and divided by
    the same sum of the unpruned model; the result is averaged over the corruptions. Only questions with both scores
    count. None if there is no corruption, a level has no question, or the unpruned model makes no error.
    """
    ratios = []
    for name, rows in values.items():
        pairs = [_paired_means(own, reference) for own, reference in zip(rows, unpruned[name], strict=True)]
        errors = [(1 - own, 1 - other) for own, other in pairs if own is not None and other is not None]
        total = sum(other for _, other in errors)
        if len(errors) < len(pairs) or total <= 0:
            return None
        ratios.append(sum(own for own, _ in errors) / total)
    return 100 * sum(ratios) / len(ratios) if ratios else None


def flip_rate(clean: Values, corrupted: Values) -> float | None:
    """Compute the fraction of questions that are right on clean and wrong on corrupted images, or vice versa."""
    flips = np.where(np.isnan(clean + corrupted), np.nan, (clean >= CORRECT) != (corrupted >= CORRECT))
    return mean(question_means(flips))


def kept_overlap(clean: Sequence[KeptTokens], corrupted: Sequence[KeptTokens], items: int) -> float | None:
    """Compute the fraction of tokens kept in a clean image that are kept in the corrupted one, one mapping per seed."""
    shares = np.full((len(clean), items), np.nan)
    for row, first, again in zip(shares, clean, corrupted, strict=True):
        for item in first.keys() & again.keys():
            tokens = set(first[item].tolist())
            row[item] = len(tokens & set(again[item].tolist())) / len(tokens) if tokens else np.nan
    return mean(question_means(shares)) if clean else None


def kind_estimates(
    values: Values, kinds: Sequence[Sequence[str]], names: Collection[str] | None = None
) -> dict[str, list[Estimate]]:
    """Compute `estimates` of the rows [rows, items] for each kind of question (or those in `names`), sorted by name."""
    shown = {kind for own in kinds for kind in own if names is None or kind in names}
    members = {kind: np.array([kind in own for own in kinds]) for kind in sorted(shown)}
    return {kind: estimates(np.where(own, values, np.nan)) for kind, own in members.items()}


def _paired_means(first: Values, second: Values) -> tuple[float | None, float | None]:
    both = ~np.isnan(first + second)
    return (float(first[both].mean()), float(second[both].mean())) if both.any() else (None, None)


def _mean(values: Values, axis: int) -> Values:
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0).sum(axis), known.sum(axis).astype(np.float64))


def _ratio(top: Values, bottom: Values) -> Values:
    """Divide; NaN where 0 is divided by 0."""
    return np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom > 0)
