"""The quick ways of choosing against the plain ones: max-min diversity and thinning."""

import pytest
import torch
from torch import Tensor

from clustrs.ops import maxmin, thinning
from clustrs.ops.cosines import cosines


def tokens(kind: str, n: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + width)
    rows = torch.randn(n, width, generator=generator)
    clumps = torch.randn(9, width, generator=generator)[torch.randint(9, (n,), generator=generator)]
    return {"noise": rows, "clumps": clumps + 0.05 * rows, "tight": clumps + 1e-4 * rows, "duplicates": clumps}[kind]


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
@pytest.mark.parametrize(("n", "width"), [(300, 700), (576, 64)])
def test_diversity_with_bounds_is_diversity_by_exact_cosines(kind: str, n: int, width: int) -> None:
    rows = tokens(kind, n, width)[None]
    assert rows[0].numel() > maxmin.SMALL
    expected = maxmin.max_min(cosines(rows), 60)
    assert torch.equal(maxmin.most_diverse(rows, 60), expected)
    assert expected.unique().numel() == 60


@pytest.mark.parametrize("kind", ["noise", "clumps", "tight", "duplicates"])
def test_rough_cosines_keep_their_bound(kind: str) -> None:
    rows = tokens(kind, 200, 1500)
    rough, error = maxmin.rough_cosines(rows)
    assert (rough - cosines(rows[None])[0]).abs().max() <= error


def test_most_choices_need_no_exact_cosines_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Tensor) -> Tensor:
        raise AssertionError("all cosines were computed exactly")

    monkeypatch.setattr(maxmin, "cosines", refuse)
    assert maxmin.most_diverse(tokens("clumps", 576, 256)[None], 50).unique().numel() == 50


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("n", [30, 400])
def test_diversity_never_repeats_a_token(value: float, n: int) -> None:
    rows = torch.randn(1, n, 100, generator=torch.Generator().manual_seed(0))
    rows[0, [3, 5, 6], 2] = value
    assert maxmin.most_diverse(rows, n - 2).unique().numel() == n - 2
    assert maxmin.most_diverse(torch.full_like(rows, value), n - 2).unique().numel() == n - 2


@pytest.mark.parametrize("kind", ["noise", "tight", "duplicates"])
@pytest.mark.parametrize("window", [3, thinning.WINDOW])
def test_thinning_by_neighbours_is_thinning(kind: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    similarity = cosines(tokens(kind, 201, 20)[None])
    order = torch.randperm(201, generator=torch.Generator().manual_seed(1))[None, 4:]
    expected = thinning.thin(similarity, order, 9)
    monkeypatch.setattr(thinning, "DIRECT", 10)
    monkeypatch.setattr(thinning, "WINDOW", window)
    assert torch.equal(thinning.thin(similarity, order, 9), expected)
