"""Every fast method against its slow reference."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from method_cases import METHODS, batch_inputs, draw_image, rounded, tensors

from clustrs import Selection, get_method

CASES = [(name, easy) for name, easy, _ in METHODS] + [(name, hard) for name, _, hard in METHODS if hard]


def assert_same(selection: Selection, expected: reference.Result, tolerance: float) -> None:
    assert selection.indices.tolist() == expected.indices
    np.testing.assert_allclose(selection.tokens.double().numpy(), expected.tokens, rtol=tolerance, atol=tolerance)
    # In a tight cluster alpha is a ratio of two small numbers; what it multiplies is as small.
    for name, slack in (("labels", 0.0), ("merged", 0.0), ("centroids", tolerance), ("alpha", 300 * tolerance)):
        ours, theirs = getattr(selection, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            np.testing.assert_allclose(ours.double().numpy(), theirs, rtol=slack, atol=slack, err_msg=name)


budgets = st.one_of(st.just(1), st.just(2), st.integers(1, 60), st.floats(0.01, 1.0), st.just(-1))


@pytest.mark.parametrize(("name", "parameters"), CASES)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    width=st.integers(1, 12),
    keep=budgets,
    cls=st.booleans(),
    duplicates=st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0]),
    zero_attention=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ties=st.booleans(),
    offset=st.sampled_from([0.0, 0.0, 100.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@example(1, 12, 3, 5, True, 1.0, 1.0, True, 0.0, torch.float32)
@example(2, 30, 4, -1, True, 0.9, 0.5, True, 0.0, torch.float32)
def test_same_as_reference(
    name: str,
    parameters: dict[str, Any],
    seed: int,
    n: int,
    width: int,
    keep: int | float,
    cls: bool,
    duplicates: float,
    zero_attention: float,
    ties: bool,
    offset: float,
    dtype: torch.dtype,
) -> None:
    method = get_method(name, keep=max(1, n - 1) if keep == -1 else keep, **parameters)
    image = draw_image(
        seed, n, width, cls=cls, duplicates=duplicates, zero_attention=zero_attention, ties=ties, offset=offset
    )
    image = rounded(image, dtype)
    tokens, attention, states = tensors([image], dtype)
    result = method.select(tokens, attention, **states)
    assert result.tokens.dtype == dtype
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 3 * torch.finfo(dtype).eps)
    if name == "prumerge-plus":  # all its rows are sums, rounded to the type before and after the projector
        tolerance *= 4
    assert_same(result.image(0), reference.run(method, image), tolerance * (1 + offset))


@pytest.mark.parametrize(("name", "parameters"), CASES)
@pytest.mark.parametrize(("n", "width", "keep"), [(576, 48, 16), (729, 40, 30)])
def test_same_as_reference_at_real_sizes(name: str, parameters: dict[str, Any], n: int, width: int, keep: int) -> None:
    method = get_method(name, keep=keep, **parameters)
    image = draw_image(3, n, width, cls=n == 576, duplicates=0.1)
    assert_same(method.select(batch_inputs([image])).image(0), reference.run(method, image), 1e-5)


def test_clustrs_at_full_width() -> None:
    method = get_method("clustrs", keep=50)
    image = draw_image(4, 576, 4096)
    assert_same(method.select(batch_inputs([image])).image(0), reference.run(method, image), 1e-5)
