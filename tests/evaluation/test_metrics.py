"""Metrics against slow, obvious versions of themselves."""

import math
from itertools import product

import numpy as np
import pytest
from numpy.random import default_rng

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Values
from clustrs.evaluation.results import KeptTokens

NAN = math.nan


def some_scores(*shape: int, seed: int = 0, gaps: float = 0.2) -> Values:
    """Scores from 0 to 1 in tenths, some of them missing."""
    generator = default_rng(seed)
    scores = generator.integers(0, 11, shape) / 10
    return np.where(generator.random(shape) < gaps, NAN, scores)


def slow_mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else NAN


def slow_question_means(scores: Values) -> list[float]:
    return [slow_mean([float(scores[s, i]) for s in range(len(scores))]) for i in range(scores.shape[1])]


def slow_percentile(values: list[float], percent: float) -> float:
    """Linear between the two neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def slow_draws(values: list[float], resamples: int, seed: int) -> list[float]:
    """The mean of each draw of as many questions as there are; draws without any score are left out."""
    picks = default_rng(seed).integers(0, len(values), (resamples, len(values)))
    means = [slow_mean([values[i] for i in row]) for row in picks]
    return [mean for mean in means if not math.isnan(mean)]


@pytest.mark.parametrize(("items", "gaps"), [(2, 0.0), (5, 0.5), (40, 0.0), (40, 0.3)])
def test_estimates(items: int, gaps: float) -> None:
    values = some_scores(4, items, gaps=gaps)
    for row, estimate in zip(values, metrics.estimates(values, 300, seed=5), strict=True):
        known = [float(value) for value in row if not math.isnan(value)]
        assert estimate.n == len(known)
        if known:
            assert estimate.mean == pytest.approx(sum(known) / len(known))
        if len(known) > 1:
            drawn = slow_draws(list(map(float, row)), 300, 5)
            assert estimate.low == pytest.approx(slow_percentile(drawn, 2.5))
            assert estimate.high == pytest.approx(slow_percentile(drawn, 97.5))


def test_estimates_of_many_questions_come_close_to_the_normal_distribution() -> None:
    values = default_rng(1).random((20, 1500))
    for row, estimate in zip(values, metrics.estimates(values), strict=True):
        half = 1.96 * row.std() / math.sqrt(1500)
        assert estimate.mean is not None
        assert estimate.low == pytest.approx(estimate.mean - half, abs=0.1 * half)
        assert estimate.high == pytest.approx(estimate.mean + half, abs=0.1 * half)


def test_how_many_draws_are_held_at_a_time_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = some_scores(3, 7)
    before = metrics.bootstrap(values)
    monkeypatch.setattr(metrics, "CHUNK", 7 * 13)
    np.testing.assert_allclose(metrics.bootstrap(values), before)


def test_one_question_has_no_interval_and_none_has_nothing() -> None:
    one, nothing = metrics.estimates(np.array([[NAN, 0.4, NAN], [NAN, NAN, NAN]]))
    assert (one.n, one.mean, one.low, one.high) == (1, 0.4, None, None)
    assert (nothing.n, nothing.mean, nothing.low, nothing.high) == (0, None, None, None)
    assert metrics.estimates(np.empty((2, 0)))[1].mean is None
    assert metrics.mean(np.array([NAN, NAN])) is None


def test_seeds_are_averaged_and_questions_drawn() -> None:
    scores = some_scores(3, 20)
    means = slow_question_means(scores)
    np.testing.assert_allclose(metrics.question_means(scores), means)
    (estimate,) = metrics.estimates(metrics.question_means(scores[None]), 200)
    drawn = slow_draws(means, 200, 0)
    assert estimate.mean == pytest.approx(slow_mean(means))
    assert (estimate.low, estimate.high) == pytest.approx((slow_percentile(drawn, 2.5), slow_percentile(drawn, 97.5)))


@pytest.mark.parametrize("seeds", [1, 3])
def test_differences(seeds: int) -> None:
    first, second = some_scores(5, seeds, 30, seed=1), some_scores(5, seeds, 30, seed=2)
    for a, b, found in zip(first, second, metrics.differences(first, second, 400, seed=3), strict=True):
        both = np.array([[float(a[s, i]) - float(b[s, i]) for i in range(30)] for s in range(seeds)])
        values = slow_question_means(both)
        drawn = slow_draws(values, 400, 3)
        below, above = sum(d < 1e-9 for d in drawn), sum(d > -1e-9 for d in drawn)
        assert found.n == sum(not math.isnan(value) for value in values)
        assert found.mean == pytest.approx(slow_mean(values))
        assert found.low == pytest.approx(slow_percentile(drawn, 2.5))
        assert found.high == pytest.approx(slow_percentile(drawn, 97.5))
        assert found.p == pytest.approx(min(1, 2 * (1 + min(below, above)) / (1 + len(drawn))))


def test_differences_that_are_clear_and_that_are_not() -> None:
    scores = some_scores(1, 1, 50, gaps=0.0) / 2
    (same,) = metrics.differences(scores, scores)
    assert (same.mean, same.low, same.high, same.p, same.clear) == (0, 0, 0, 1, False)
    (better,) = metrics.differences(scores + 0.1, scores)
    assert better.mean == pytest.approx(0.1)
    assert better.p == pytest.approx(2 / 2001)
    assert better.clear
    (worse,) = metrics.differences(scores, scores + 0.1)
    assert worse.clear
    (cancelled,) = metrics.differences(np.array([[0.3, 0.6]]), np.array([[0.1, 0.8]]), 50)  # means of 0.2 and -0.2
    assert cancelled.mean == pytest.approx(0)
    assert cancelled.p == 1
    (alone,) = metrics.differences(scores[..., :1] + 0.1, scores[..., :1])
    assert (alone.low, alone.p, alone.clear) == (None, None, False)


def test_retention_counts_questions_with_both_scores() -> None:
    own, unpruned = some_scores(25, seed=1), some_scores(25, seed=2)
    pairs = [(a, b) for a, b in zip(own, unpruned, strict=True) if not (math.isnan(a) or math.isnan(b))]
    expected = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    assert metrics.retention(own, unpruned) == pytest.approx(expected)
    assert metrics.retention(own, np.zeros(25)) is None
    assert metrics.retention(own, np.full(25, NAN)) is None


def test_mean_corruption_error() -> None:
    levels = {"gaussian": 3, "jpeg": 2}
    own = {name: some_scores(n, 25, seed=n) for name, n in levels.items()}
    unpruned = {name: some_scores(n, 25, seed=10 + n) for name, n in levels.items()}
    ratios = []
    for name, n in levels.items():
        sums = [0.0, 0.0]
        for level in range(n):
            pairs = list(zip(own[name][level].tolist(), unpruned[name][level].tolist(), strict=True))
            pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
            for side in (0, 1):
                sums[side] += 1 - sum(pair[side] for pair in pairs) / len(pairs)
        ratios.append(sums[0] / sums[1])
    assert metrics.mean_corruption_error(own, unpruned) == pytest.approx(100 * sum(ratios) / 2)
    assert metrics.mean_corruption_error(unpruned, unpruned) == pytest.approx(100)


def test_mean_corruption_error_where_it_is_undefined() -> None:
    row = np.array([[0.5, 0.5]])
    assert metrics.mean_corruption_error({}, {}) is None
    assert metrics.mean_corruption_error({"jpeg": row}, {"jpeg": np.ones((1, 2))}) is None
    gap = np.array([[NAN, NAN]])
    half = {"jpeg": np.concatenate([row, gap])}
    assert metrics.mean_corruption_error(half, {"jpeg": np.concatenate([row, row])}) is None


def test_flip_rate() -> None:
    clean, corrupted = some_scores(2, 40, seed=1), some_scores(2, 40, seed=2)
    shares = []
    for i in range(40):
        flips = []
        for a, b in ((clean[s, i], corrupted[s, i]) for s in range(2)):
            if not (math.isnan(a) or math.isnan(b)):
                flips.append((a >= 0.5) != (b >= 0.5))
        if flips:
            shares.append(sum(flips) / len(flips))
    assert metrics.flip_rate(clean, corrupted) == pytest.approx(sum(shares) / len(shares))
    assert metrics.flip_rate(np.array([[0.5, 0.4]]), np.array([[1.0, 0.5]])) == 0.5
    assert metrics.flip_rate(np.array([[NAN]]), np.array([[1.0]])) is None


def kept(tokens: dict[int, list[int]]) -> KeptTokens:
    """Out of order, as answers come in."""
    return {item: np.array(tokens[item], dtype=np.int32) for item in sorted(tokens, reverse=True)}


def test_kept_overlap() -> None:
    generator = default_rng(0)
    seeds = []
    for _, corrupted in product(range(2), (False, True)):
        answers = {i: generator.choice(np.arange(-1, 30), 8, replace=False).tolist() for i in range(12)}
        del answers[3 + corrupted]
        seeds.append(answers)
    shares: dict[int, list[float]] = {}
    for a, b in (seeds[:2], seeds[2:]):
        for i in a.keys() & b.keys():
            shares.setdefault(i, []).append(len({*a[i]} & {*b[i]}) / len(a[i]))
    expected = sum(sum(own) / len(own) for own in shares.values()) / len(shares)
    clean, corrupted_ = [kept(seeds[0]), kept(seeds[2])], [kept(seeds[1]), kept(seeds[3])]
    assert metrics.kept_overlap(clean, corrupted_, 12) == pytest.approx(expected)
    assert metrics.kept_overlap(clean, clean, 12) == 1
    assert metrics.kept_overlap([kept({0: []})], [kept({0: []})], 1) is None
    assert metrics.kept_overlap([kept({0: [1]})], [kept({1: [1]})], 2) is None
    assert metrics.kept_overlap([], [], 2) is None


def test_how_much_is_held_at_a_time_changes_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    values, generator = some_scores(3, 30), default_rng(1)
    kinds = [tuple(f"kind {k}" for k in generator.choice(9, i % 4, replace=False)) for i in range(30)]
    whole = metrics.kind_estimates(values, kinds)
    monkeypatch.setattr(metrics, "CHUNK", 20)
    parts = metrics.kind_estimates(values, kinds)
    assert list(parts) == list(whole)
    for name, estimates in parts.items():
        assert [vars(e) for e in estimates] == [pytest.approx(vars(e)) for e in whole[name]]
    two = metrics.kind_estimates(values, kinds, {"kind 1", "kind 2"})
    assert two == {name: parts[name] for name in ("kind 1", "kind 2")}


def test_a_question_counts_under_each_of_its_kinds() -> None:
    values = some_scores(2, 30)
    kinds = [("ocr", "math")[: i % 3] for i in range(30)]
    found = metrics.kind_estimates(values, kinds)
    assert list(found) == ["math", "ocr"]
    for (kind, estimates), cell in product(found.items(), range(2)):
        own = [float(values[cell, i]) for i in range(30) if kind in kinds[i] and not math.isnan(values[cell, i])]
        assert estimates[cell].n == len(own)
        assert estimates[cell].mean == pytest.approx(sum(own) / len(own))
        assert estimates[cell].low is not None
    assert metrics.kind_estimates(values, [()] * 30) == {}
