"""Clustering in passes over the tokens against the slow reference, and against all distances."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import METHODS, batch_inputs, draw_image, rounded, tensors
from pruners.test_against_reference import assert_same

from clustrs import ClustRS, Denoise, DivPrune, Selection, get_method
from clustrs.ops import dispatch, linear
from clustrs.ops.dispatch import LINEAR, PLAIN

CASES = [
    (name, parameters)
    for name, *both in METHODS
    for parameters in both
    if name in ("clustrs", "clustermeans", "denoise")
]


@contextmanager
def forced(passes: bool = False, block: int = linear.BLOCK) -> Iterator[None]:
    """Every image is clustered in passes; with `passes`, also the seeding, as on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "MANY", 0)
        patch.setattr(dispatch, "FEW", 0)
        patch.setattr(linear, "BLOCK", block)
        patch.setattr(linear, "LEADERS", 2)
        if passes:
            patch.setattr(linear, "_draw_by_leaders", linear._draw_by_passes)
        yield


def assert_equal(one: Selection, other: Selection) -> None:
    """Check that two selections are the same to the last bit."""
    for name, part in vars(one).items():
        assert part is None or torch.equal(part, getattr(other, name)), name


def test_when_the_passes_are_used() -> None:
    def of(n: int, k: int) -> dispatch.Steps:
        return dispatch.steps(torch.zeros(1, n, 1), k)

    assert of(dispatch.MANY - 1, 1) is PLAIN
    assert of(dispatch.MANY, dispatch.MANY // dispatch.FEW) is LINEAR
    assert of(dispatch.MANY, dispatch.MANY // 2) is PLAIN
    assert of(dispatch.LARGEST + 1, dispatch.LARGEST) is LINEAR


@pytest.mark.parametrize("passes", [False, True], ids=["leaders", "passes"])
@pytest.mark.parametrize(("name", "parameters"), CASES)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 40),
    width=st.integers(1, 12),
    keep=st.one_of(st.just(1), st.integers(1, 39)),
    cls=st.booleans(),
    duplicates=st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0]),
    zero_attention=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ties=st.booleans(),
    offset=st.sampled_from([0.0, 0.0, 100.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_same_as_reference(
    passes: bool, name: str, parameters: dict[str, Any], dtype: torch.dtype, keep: int, offset: float, **drawn: Any
) -> None:
    image = rounded(draw_image(**drawn, offset=offset), dtype)
    method = get_method(name, keep=keep, **parameters)
    tokens, attention, states = tensors([image], dtype)
    with forced(passes, block=7):
        result = method.select(tokens, attention, **states)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 3 * torch.finfo(dtype).eps)
    assert_same(result.image(0), reference.run(method, image), tolerance * (1 + offset))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "keep"), [(2048, 32), (20000, 4)])
def test_same_as_reference_with_many_tokens(n: int, keep: int) -> None:
    method = ClustRS(keep=keep)
    image = draw_image(5, n, 12, duplicates=0.2, zero_attention=0.1)
    assert_same(method.select(batch_inputs([image])).image(0), reference.run(method, image), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_same_as_all_distances(dtype: torch.dtype) -> None:
    """Tokens of one size in clumps: no two costs are within rounding of each other."""
    images = [draw_image(seed, 2048, 48, duplicates=0.3) for seed in range(2)]
    tokens, attention, _ = tensors(images, dtype)
    for method in (ClustRS(keep=64), ClustRS(keep=16, representative="medoid"), Denoise(DivPrune(keep=16))):
        ours = method.select(tokens, attention)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "MANY", 4096)
            theirs = method.select(tokens, attention)
        assert torch.equal(ours.indices, theirs.indices)
        assert isinstance(ours.labels, torch.Tensor)
        assert isinstance(theirs.labels, torch.Tensor)
        assert torch.equal(ours.labels, theirs.labels)
        torch.testing.assert_close(ours.tokens, theirs.tokens, rtol=1e-5, atol=1e-5)
        alone = method.select(tokens[1], attention[1])
        assert all(
            torch.equal(part, getattr(ours.image(1), name)) for name, part in vars(alone).items() if part is not None
        )


@pytest.mark.parametrize(("n", "keep"), [(2048, 16), (2500, 144), (40000, 3)])
def test_bits_do_not_depend_on_the_threads(n: int, keep: int) -> None:
    width = 1200 if n < 3000 else 16
    generator = torch.Generator().manual_seed(n)
    tokens, attention = torch.randn(n, width, generator=generator), torch.rand(n, generator=generator)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ClustRS(keep=keep).select(tokens, attention))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(
            torch.equal(part, getattr(other, name)) for name, part in vars(results[0]).items() if part is not None
        )


@pytest.mark.slow
def test_compiled_and_with_gradients() -> None:
    images = [draw_image(seed, 30, 6, duplicates=0.2) for seed in (1, 2)]
    tokens, attention, _ = tensors(images)
    method = ClustRS(keep=5)

    def select(one: Any) -> tuple[Selection, torch.Tensor | None]:
        leaf = tokens.clone().requires_grad_()
        selection: Selection = one.select(leaf, attention)
        selection.tokens.square().sum().backward()
        return selection, leaf.grad

    torch._dynamo.reset()
    expected, gradient = select(method)
    with forced():
        ours, slope = select(method)
        compiled = method.compile(backend="aot_eager").select(tokens, attention)
    for selection in (ours, compiled):
        assert torch.equal(selection.indices, expected.indices)
        torch.testing.assert_close(selection.tokens, expected.tokens, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, gradient, rtol=1e-4, atol=1e-4)
