"""The switches of ClustRS beyond the paper: against the reference, by hand, and off by default."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from method_cases import batch_inputs, draw_image, rounded, tensors

import clustrs
from clustrs import ClustRS, Denoise, get_method
from clustrs.ops import dispatch
from clustrs.pruners.clustrs import SWITCHES

ON: list[dict[str, Any]] = [
    {"representative": "medoid"},
    {"attention_power": 0.5},
    {"attention_power": 3.0, "salience": True},
    {"clip": (0.0, 0.0)},
    {"attention_power": 0.5, "clip": (0.0, 0.0)},
    {"representative": "medoid", "attention_power": 0.5, "centroid": "huber"},
]


@pytest.mark.parametrize("switches", ON, ids=lambda switches: "-".join(switches))
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    width=st.integers(1, 12),
    keep=st.one_of(st.just(1), st.just(2), st.integers(1, 60), st.just(-1)),
    cls=st.booleans(),
    duplicates=st.sampled_from([0.0, 0.0, 0.3, 0.9, 1.0]),
    zero_attention=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@example(1, 12, 3, 5, True, 1.0, 1.0, True, torch.float32)
@example(2, 30, 4, -1, True, 0.9, 0.5, True, torch.float32)
@example(0, 20, 11, 2, False, 0.0, 1.0, False, torch.float64)
@example(3, 9, 2, 9, False, 0.3, 0.0, True, torch.float16)
def test_same_as_reference(
    switches: dict[str, Any],
    seed: int,
    n: int,
    width: int,
    keep: int,
    cls: bool,
    duplicates: float,
    zero_attention: float,
    ties: bool,
    dtype: torch.dtype,
) -> None:
    method = ClustRS(keep=max(1, n - 1) if keep == -1 else keep, **switches)
    drawn = draw_image(seed, n, width, cls=cls, duplicates=duplicates, zero_attention=zero_attention, ties=ties)
    image = rounded(drawn, dtype)
    tokens, attention, states = tensors([image], dtype)
    result = method.select(tokens, attention, **states).image(0)
    expected = reference.run(method, image)
    assert result.indices.tolist() == expected.indices
    assert result.labels is not None
    assert result.labels.tolist() == expected.labels
    assert torch.isfinite(result.tokens).all()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 3 * torch.finfo(dtype).eps)
    np.testing.assert_allclose(result.tokens.double().numpy(), expected.tokens, rtol=tolerance, atol=tolerance)
    assert result.centroids is not None
    assert expected.centroids is not None
    np.testing.assert_allclose(result.centroids.double().numpy(), expected.centroids, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("switches", ON, ids=lambda switches: "-".join(switches))
def test_an_image_does_not_notice_its_neighbors(switches: dict[str, Any]) -> None:
    images = [draw_image(seed, 60, 9, duplicates=0.2, ties=True) for seed in range(4)]
    tokens, attention, states = tensors(images)
    method = ClustRS(keep=7, **switches)
    together = method.select(tokens, attention, **states)
    for i in range(4):
        alone = method.select(tokens[i], attention[i])
        for field in dataclasses.fields(alone):
            one, other = getattr(alone, field.name), getattr(together.image(i), field.name)
            assert (one is None and other is None) or torch.equal(one, other), field.name


def test_off_by_default() -> None:
    """Said or unsaid, a switch that is off changes nothing, in the result or in what is stored."""
    tokens, attention, states = tensors([draw_image(seed, 50, 8, duplicates=0.1) for seed in range(3)])
    off = {"representative": "attention", "attention_power": 1}
    assert set(off) == set(SWITCHES)
    plain, said = ClustRS(keep=9), get_method("clustrs", keep=9, **off)
    expected, result = (method.select(tokens, attention, **states) for method in (plain, said))
    for name, part in vars(expected).items():
        assert part is None or torch.equal(part, getattr(result, name)), name
    assert said.to_dict() == plain.to_dict()
    assert not set(SWITCHES) & set(plain.to_dict())
    assert "salience" in plain.to_dict()


@pytest.mark.parametrize("switches", ON, ids=lambda switches: "-".join(switches))
def test_a_switch_survives_json(switches: dict[str, Any]) -> None:
    method = ClustRS(keep=9, **switches)
    assert clustrs.from_dict(method.to_dict()) == method
    assert set(switches) <= set(method.to_dict())


def test_the_words_of_the_command_line() -> None:
    spec = clustrs.parse_method("clustrs representative=medoid attention_power=0.5")
    expected = ClustRS(keep=3, representative="medoid", attention_power=0.5)
    assert clustrs.from_dict({**spec, "keep": 3}) == expected


def test_the_medoid_by_hand() -> None:
    """Weighted means 1.1 and 101: token 1 is nearest to one, 4 and 5 are as near to the other as each other."""
    tokens = torch.tensor([[0.0], [1.0], [3.0], [-100.0], [100.0], [102.0]])
    attention = torch.tensor([0.5, 0.2, 0.3, 0.9, 0.1, 0.1])
    method = ClustRS(keep=3, representative="medoid", shrink=False)
    result = method.select(tokens, attention)
    assert result.indices.tolist() == [1, 3, 4]
    assert result.tokens.flatten().tolist() == [1.0, -100.0, 100.0]
    assert ClustRS(keep=3, shrink=False).select(tokens, attention).indices.tolist() == [0, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("method", [ClustRS(keep=7, clip=(0, 0)), Denoise("divprune", keep=7, clip=(0, 0))])  # type: ignore[arg-type]
def test_clip_0_0_gives_the_centroids(method: clustrs.Pruner, dtype: torch.dtype) -> None:
    inputs = batch_inputs([draw_image(seed, 40, 6, duplicates=0.2, zero_attention=0.3) for seed in range(3)], dtype)
    result = method.select(inputs)
    assert result.centroids is not None
    assert torch.equal(result.tokens, result.centroids)
    plain = ClustRS(keep=7).select(inputs)
    if isinstance(method, ClustRS):
        assert torch.equal(result.indices, plain.indices)
    assert not torch.equal(result.tokens, plain.tokens)


def test_the_power_by_hand() -> None:
    tokens = torch.tensor([[0.0], [1.0], [100.0]])
    attention = torch.tensor([0.16, 0.04, 0.01])
    for power, share in ((1.0, 0.2), (0.5, 1 / 3), (2.0, 1 / 17)):
        centroids = ClustRS(keep=2, attention_power=power).select(tokens, attention).centroids
        assert centroids is not None
        torch.testing.assert_close(centroids[0], torch.tensor([share]))


@pytest.mark.parametrize("power", [1e-3, 40.0, 1e30])
@pytest.mark.parametrize("attention", [torch.rand(30), torch.zeros(30), 1e-30 * torch.rand(30), torch.eye(30)[3]])
def test_extreme_powers(power: float, attention: torch.Tensor) -> None:
    tokens = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    result = ClustRS(keep=5, attention_power=power).select(tokens, attention)
    assert torch.isfinite(result.tokens).all()
    assert int(attention.argmax()) in result.indices


@pytest.mark.parametrize("switches", ON, ids=lambda switches: "-".join(switches))
def test_denoise_around_a_variant_is_the_variant(switches: dict[str, Any]) -> None:
    tokens, attention, states = tensors([draw_image(seed, 40, 7, duplicates=0.2) for seed in range(3)])
    expected = ClustRS(keep=9, **switches).select(tokens, attention, **states)
    wrapped = Denoise(ClustRS(keep=9, shrink=False, **switches), clip=switches.get("clip", (0.10, 0.95)))
    result = wrapped.select(tokens, attention, **states)
    for name, part in vars(expected).items():
        assert part is None or torch.equal(part, getattr(result, name)), name


def test_what_has_no_kernels_takes_the_plain_operations() -> None:
    tokens, attention, _ = tensors([draw_image(1, 40, 7)])
    method = ClustRS(keep=6, representative="medoid")
    expected = method.select(tokens, attention)
    with dispatch.switch("on"):
        result = method.select(tokens, attention)
    for name, part in vars(expected).items():
        assert part is None or torch.equal(part, getattr(result, name)), name


@pytest.mark.graphs
def test_all_switches_compile() -> None:
    tokens, attention, _ = tensors([draw_image(i, 30, 8) for i in range(2)])
    method = ClustRS(keep=4, **ON[-1])
    torch.compiler.reset()
    expected = method.select(tokens, attention)
    result = method.compile().select(tokens, attention)
    assert torch.equal(expected.indices, result.indices)
    torch.testing.assert_close(expected.tokens, result.tokens)
