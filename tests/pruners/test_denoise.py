"""Residual shrinkage around other methods."""

import pytest
import torch
from method_cases import batch_inputs, draw_image

from clustrs import ClustRS, Denoise, DivPrune, FasterVLM, NoPruning, ToMe, VisionZip, get_method


@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("parameters", [{}, {"salience": True}, {"centroid": "huber", "tau": 2.0}, {"keep": 40}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_clustrs_without_shrinkage_it_is_clustrs(
    cls: bool, parameters: dict[str, float], dtype: torch.dtype
) -> None:
    inputs = batch_inputs([draw_image(seed, 40, 7, cls=cls, duplicates=0.2) for seed in range(3)], dtype)
    expected = get_method("clustrs", **{"keep": 16, **parameters}).select(inputs)
    inner = get_method("clustrs", **{"keep": 16, **parameters, "shrink": False})
    result = Denoise(inner).select(inputs)
    for name, part in vars(expected).items():
        assert (part is None) == (getattr(result, name) is None), name
        assert part is None or torch.equal(part, getattr(result, name)), name


def test_the_budget_follows_the_inner_method() -> None:
    assert Denoise(DivPrune(keep=0.25)).keep == 0.25
    assert Denoise(DivPrune(keep=3), keep=5).inner == DivPrune(keep=5)
    assert Denoise("divprune", keep=5) == Denoise(DivPrune(keep=5))  # type: ignore[arg-type]
    assert get_method("denoise", keep=5).inner == FasterVLM(keep=5)  # type: ignore[attr-defined]
    assert Denoise(NoPruning()).select(torch.rand(9, 4), torch.rand(9)).indices.tolist() == list(range(9))


def test_it_asks_for_what_the_inner_method_needs() -> None:
    with pytest.raises(ValueError, match="scores is missing: denoise needs it"):
        Denoise(DivPrune(keep=3)).select(torch.rand(9, 4))
    with pytest.raises(ValueError, match="hidden is missing: denoise needs it"):
        get_method("denoise", keep=3, inner="vispruner").select(torch.rand(9, 4), torch.rand(9))


@pytest.mark.parametrize("inner", [VisionZip(keep=3), ToMe(keep=3)])
def test_methods_that_merge_are_refused(inner: VisionZip | ToMe) -> None:
    with pytest.raises(ValueError, match=f"inner must be a method .*, got '{inner.name}', which merges tokens"):
        Denoise(inner)


def test_by_hand() -> None:
    """Tokens 1 and 2 belong to the nearest kept ones, 0 and 3."""
    tokens = torch.tensor([[0.0], [1.0], [9.0], [10.0]])
    attention = torch.tensor([0.4, 0.1, 0.1, 0.4])
    result = Denoise(FasterVLM(keep=2)).select(tokens, attention)
    assert result.labels is not None
    assert result.labels.tolist() == [0, 0, 1, 1]
    # center 0.2, residuals 0.2 and 0.8, their median 0.5: alpha = 0.25 / (0.04 + 0.25)
    alpha = 0.25 / 0.29
    torch.testing.assert_close(result.alpha, torch.tensor([alpha, alpha]))
    torch.testing.assert_close(result.tokens[:, 0], torch.tensor([(1 - alpha) * 0.2, 10 - (1 - alpha) * 0.2]))


def test_around_clustrs_with_shrinkage_nothing_is_shrunk_twice() -> None:
    inputs = batch_inputs([draw_image(0, 30, 5)])
    assert torch.equal(Denoise(ClustRS(keep=6)).select(inputs).tokens, ClustRS(keep=6).select(inputs).tokens)
