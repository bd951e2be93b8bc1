"""Exact cosines, max-min diversity and thinning."""

import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clustrs.ops import diversity
from clustrs.ops.diversity import cosines, fixed_point, paired_cosines
from clustrs.pruners import scope, vispruner

sizes = st.integers(1, 30)


@given(n=sizes, width=st.integers(1, 600), seed=st.integers(0, 1000), exponent=st.integers(-60, 40))
@settings(max_examples=40)
def test_no_rounding_is_left_in_sums_of_float32(n: int, width: int, seed: int, exponent: int) -> None:
    """Against exact integers: what is off is float64's own rounding."""
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    result = cosines(rows[None])[0]
    assert torch.equal(result, result.T)
    assert torch.equal(result.diagonal(), torch.ones(n, dtype=torch.float64))
    exact = [[Fraction(x) for x in row] for row in rows.double().tolist()]
    i, j = 0, n - 1
    dot, left, right = (
        sum((a * b for a, b in zip(exact[x], exact[y], strict=True)), Fraction(0)) for x, y in ((i, j), (i, i), (j, j))
    )
    squared = Fraction(result[i, j].item()) ** 2
    assert abs(squared - dot**2 / (left * right)) < Fraction(2) ** -49


def test_products_of_the_parts_stay_below_what_float64_adds_exactly() -> None:
    for rows in (torch.ones(2, 16384), torch.eye(3, 4096), torch.randn(4, 4096), torch.rand(4, 7) * 1e15):
        high, low = fixed_point(rows)
        assert torch.equal(high, high.round())
        assert torch.equal(low, low.round())
        assert (high.abs() @ high.abs().T).max() <= 2**53
        assert 2 * (high.abs() @ low.abs().T).max() <= 2**53


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_duplicates_and_multiples_are_equal_everywhere(dtype: torch.dtype) -> None:
    rows = torch.randn(300, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[299] = rows[7]
    rows[150] = 4 * rows[7]
    rows[20] = 0
    result = cosines(rows[None])[0]
    assert torch.equal(result[299], result[7])
    assert torch.equal(result[150], result[7])
    assert result[7, 150] == 1
    assert not result[20].any()


def test_pairs_and_blocks_have_the_same_bits() -> None:
    rows = torch.randn(250, 700, generator=torch.Generator().manual_seed(1))
    everything = cosines(rows[None])[0]
    left, right = torch.randint(250, (2, 400), generator=torch.Generator().manual_seed(2))
    assert torch.equal(paired_cosines(rows[left], rows[right]), everything[left, right])
    assert torch.equal(cosines(rows[None, :9], rows[None, 100:])[0], everything[:9, 100:])
    strided = rows.T.contiguous().T
    assert torch.equal(cosines(strided[None])[0], everything)
    assert torch.equal(cosines(torch.stack([rows.flip(0), rows]))[1], everything)


THREADS = """
import hashlib, torch
from clustrs.ops.diversity import cosines
generator = torch.Generator().manual_seed(0)
inputs = [torch.randn(1, *size, generator=generator) for size in ((37, 1000), (100, 64), (333, 777), (5, 3000))]
for threads in (1, 2, 3, 5):
    torch.set_num_threads(threads)
    print(hashlib.sha256(b"".join(cosines(rows).numpy().tobytes() for rows in inputs)).hexdigest())
"""


@pytest.mark.parametrize("kernels", ["as found", "avx2"])
def test_the_same_bits_with_any_threads_and_kernels(kernels: str) -> None:
    smaller = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"} if kernels == "avx2" else {}
    run = subprocess.run(
        [sys.executable, "-c", THREADS], env={**os.environ, **smaller}, capture_output=True, text=True, check=True
    )
    assert len(run.stdout.split()) == 4
    assert len(set(run.stdout.split())) == 1


def tokens(kind: str, n: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + width)
    rows = torch.randn(n, width, generator=generator)
    clumps = torch.randn(9, width, generator=generator)[torch.randint(9, (n,), generator=generator)]
    return {"noise": rows, "clumps": clumps + 0.05 * rows, "tight": clumps + 1e-4 * rows, "duplicates": clumps}[kind]


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize(("n", "width"), [(300, 700), (576, 64)])
def test_diversity_with_bounds_is_diversity_by_exact_cosines(kind: str, n: int, width: int) -> None:
    rows = tokens(kind, n, width)[None]
    assert rows[0].numel() > diversity.SMALL
    expected = diversity.max_min(cosines(rows), 60)
    assert torch.equal(diversity.most_diverse(rows, 60), expected)
    assert expected.unique().numel() == 60


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_a_bonus_with_bounds_is_the_bonus_with_exact_cosines(kind: str, weight: float) -> None:
    rows = tokens(kind, 300, 700)[None]
    bonus = torch.rand(1, 300, generator=torch.Generator().manual_seed(0)).mul(20).round().div(20).double() * (
        1 - weight
    )
    expected = diversity.max_min(cosines(rows), 60, bonus, weight)
    assert torch.equal(diversity.most_diverse(rows, 60, bonus, weight), expected)
    assert expected.unique().numel() == 60


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize("attended", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("k", [300 // scope.FEW, 80])
def test_coverage_with_bounds_is_coverage_by_exact_cosines(
    kind: str, attended: float, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tokens(kind, 300, 200)
    rows = torch.stack([rows, rows.flip(0)])
    weight = torch.rand(2, 300, generator=torch.Generator().manual_seed(3)).double() * (
        torch.arange(300) < 300 * attended
    )
    assert rows[0].numel() > diversity.SMALL
    if kind == "noise" and attended:
        assert len(scope._certain_coverage(rows[0], weight[0], k)) == k
    result = scope.best_covering(rows, weight, k)
    monkeypatch.setattr(scope, "SMALL", 10**9)
    assert torch.equal(result, scope.best_covering(rows, weight, k))
    assert all(image.unique().numel() == k for image in result)


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shortest", [0, 1e-18, None])
def test_nearest_by_bounds_is_nearest_by_exact_cosines(kind: str, dtype: torch.dtype, shortest: float | None) -> None:
    rows = tokens(kind, 300, 700).to(dtype)
    if shortest is not None:
        rows[7] *= shortest
        rows[170] *= shortest
    rows = torch.stack([rows, rows.flip(0)])
    left, right = rows[:, :200], rows[:, 150:]
    assert right[0].numel() > diversity.SMALL
    exact = cosines(left, right)
    assert torch.equal(diversity.nearest_cosines(left, right)[..., 0], exact.argmax(-1))
    skip = torch.arange(200).sub(150).clamp(min=0).expand(2, -1)
    exact = exact.scatter(-1, skip[..., None], -torch.inf)
    expected = exact.sort(dim=-1, descending=True, stable=True).indices[..., :20]
    result = diversity.nearest_cosines(left, right, 20, skip)
    assert torch.equal(result.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
def test_rough_cosines_keep_their_bound(kind: str) -> None:
    rows = tokens(kind, 200, 1500)
    rough, error = diversity.rough_cosines(rows)
    assert (rough - cosines(rows[None])[0]).abs().max() <= error


def test_most_choices_need_no_exact_cosines_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Tensor) -> Tensor:
        raise AssertionError("all cosines were computed exactly")

    monkeypatch.setattr(diversity, "cosines", refuse)
    assert diversity.most_diverse(tokens("clumps", 576, 256)[None], 50).unique().numel() == 50


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [30, 400])
def test_diversity_never_repeats_a_token(value: float, n: int) -> None:
    rows = torch.randn(1, n, 100, generator=torch.Generator().manual_seed(0))
    rows[0, [3, 5, 6], 2] = value
    assert diversity.most_diverse(rows, n - 2).unique().numel() == n - 2
    assert diversity.most_diverse(torch.full_like(rows, value), n - 2).unique().numel() == n - 2


@pytest.mark.parametrize("kind", ["noise", "tight", "duplicates"])
@pytest.mark.parametrize("window", [3, vispruner.WINDOW])
def test_thinning_by_neighbors_is_thinning(kind: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features = tokens(kind, 201, 20)[None]
    order = torch.randperm(201, generator=torch.Generator().manual_seed(1))[None, 4:]
    expected = vispruner.thin(features, order, 9)
    monkeypatch.setattr(vispruner, "DIRECT", 10)
    monkeypatch.setattr(vispruner, "WINDOW", window)
    monkeypatch.setattr(vispruner, "STRIP", 64)
    assert torch.equal(vispruner.thin(features, order, 9), expected)
    monkeypatch.setattr(vispruner, "HELD", 10)
    assert torch.equal(vispruner.thin(features, order, 9), expected)
    if (kind, window) == ("noise", 48):  # rough cosines and few exact ones are enough
        monkeypatch.setattr(vispruner, "ExactCosines", None)
        assert torch.equal(vispruner.thin(features, order, 9), expected)


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize("weight", [None, 0.1, 0.9])
def test_diversity_of_many_tokens_is_diversity_by_exact_cosines(
    kind: str, weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tokens(kind, 300, 200)[None]
    bonus = None
    if weight is not None:
        draws = torch.rand(1, 300, generator=torch.Generator().manual_seed(0))
        bonus = draws.mul(20).round().div(20).double() * (1 - weight)
    expected = diversity.max_min(cosines(rows), 60, bonus, weight or 1.0)
    monkeypatch.setattr(diversity, "MANY", 10)
    monkeypatch.setattr(diversity, "STRIP", 64)
    monkeypatch.setattr(diversity, "LEADERS", 2)
    assert torch.equal(diversity.most_diverse(rows, 60, bonus, weight or 1.0), expected)


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize("attended", [1.0, 0.5, 0.0])
def test_coverage_of_many_tokens_is_coverage_by_exact_cosines(
    kind: str, attended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tokens(kind, 300, 200)[None]
    weight = torch.rand(1, 300, generator=torch.Generator().manual_seed(3)).double()
    weight = weight * (torch.arange(300) < 300 * attended)
    expected = scope.best_covering(rows, weight, 80)
    monkeypatch.setattr(scope, "MANY", 10)
    monkeypatch.setattr(scope, "STRIP", 64)
    monkeypatch.setattr(scope, "LARGE", 128)
    monkeypatch.setattr(diversity, "STORED", 0 if attended < 1 else 10**9)
    assert torch.equal(scope.best_covering(rows, weight, 80), expected)


def test_most_diverse_of_many_tokens_without_exact_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Tensor) -> Tensor:
        raise AssertionError("all cosines were computed exactly")

    rows = tokens("noise", 2100, 40)[None]
    expected = diversity.max_min(cosines(rows), 50)
    monkeypatch.setattr(diversity, "ExactCosines", refuse)
    assert torch.equal(diversity.most_diverse(rows, 50), expected)


def test_nearest_cosines_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.cat([tokens("noise", 200, 300), tokens("duplicates", 100, 300)])[None]
    expected = diversity.nearest_cosines(rows[:, ::2], rows[:, 1::2])
    monkeypatch.setattr(diversity, "STRIP", 16)
    monkeypatch.setattr(diversity, "DIRECT", 16)
    assert torch.equal(diversity.nearest_cosines(rows[:, ::2], rows[:, 1::2]), expected)
