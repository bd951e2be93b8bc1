"""The switches of ClustRS beyond the paper: against the reference, by hand, and off by default."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from method_cases import draw_image, rounded, tensors

import clustrs
from clustrs import ClustRS, Denoise, Layout, get_method
from clustrs.ops import fused
from clustrs.pruners.clustrs import SWITCHES

Places = list[tuple[int, int, int]]
ON: list[dict[str, Any]] = [
    {"representative": "medoid"},
    {"attention_power": 0.5},
    {"attention_power": 3.0, "salience": True},
    {"shrinkage": "adaptive"},
    {"clip": (0.0, 0.0)},
    {"spatial": 0.7},
    {"spatial": 2.0, "representative": "medoid", "attention_power": 0.5, "shrinkage": "adaptive", "centroid": "huber"},
]


def places_of(n: int, columns: int, tiles: int) -> Places:
    """The first n cells of a few tiles of five lines each."""
    cells = [(2 * tile, y, x) for tile in range(tiles) for y in range(n) for x in range(columns)]
    return sorted(cells, key=lambda cell: (cell[1] // 5, cell[0], cell))[:n]


def layout_of(places: Places) -> Layout:
    return Layout(*torch.tensor(places).unbind(-1))


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
    columns=st.integers(1, 7),
    tiles=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@example(1, 12, 3, 5, True, 1.0, 1.0, True, 4, 1, torch.float32)
@example(2, 30, 4, -1, True, 0.9, 0.5, True, 5, 2, torch.float32)
@example(0, 20, 11, 2, False, 0.0, 1.0, False, 1, 1, torch.float64)
@example(3, 9, 2, 9, False, 0.3, 0.0, True, 3, 1, torch.float16)
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
    columns: int,
    tiles: int,
    dtype: torch.dtype,
) -> None:
    method = ClustRS(keep=max(1, n - 1) if keep == -1 else keep, **switches)
    drawn = draw_image(seed, n, width, cls=cls, duplicates=duplicates, zero_attention=zero_attention, ties=ties)
    places = places_of(n, columns, tiles)
    image = replace(rounded(drawn, dtype), layout=places)
    tokens, attention, states = tensors([image], dtype)
    result = method.select(tokens, attention, states, layout=layout_of(places)).image(0)
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
def test_an_image_does_not_notice_its_neighbours(switches: dict[str, Any]) -> None:
    images = [draw_image(seed, 60, 9, duplicates=0.2, ties=True) for seed in range(4)]
    tokens, attention, states = tensors(images)
    layout = layout_of(places_of(60, 10, 1))
    method = ClustRS(keep=7, **switches)
    together = method.select(tokens, attention, states, layout=layout)
    for i in range(4):
        alone = method.select(tokens[i], attention[i], layout=layout)
        for field in dataclasses.fields(alone):
            one, other = getattr(alone, field.name), getattr(together.image(i), field.name)
            assert (one is None and other is None) or torch.equal(one, other), field.name


def test_off_by_default() -> None:
    """Said or unsaid, a switch that is off changes nothing, in the result or in what is stored."""
    tokens, attention, states = tensors([draw_image(seed, 50, 8, duplicates=0.1) for seed in range(3)])
    off = {"representative": "attention", "attention_power": 1, "shrinkage": "residual", "spatial": 0}
    assert set(off) == set(SWITCHES)
    plain, said = ClustRS(keep=9), get_method("clustrs", keep=9, **off)
    expected, result = (method.select(tokens, attention, states) for method in (plain, said))
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
    spec = clustrs.parse_method("clustrs representative=medoid attention_power=0.5 shrinkage=adaptive spatial=1")
    expected = ClustRS(keep=3, representative="medoid", attention_power=0.5, shrinkage="adaptive", spatial=1)
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
    inputs = tensors([draw_image(seed, 40, 6, duplicates=0.2, zero_attention=0.3) for seed in range(3)], dtype)
    result = method.select(*inputs)
    assert result.centroids is not None
    assert torch.equal(result.tokens, result.centroids)
    plain = ClustRS(keep=7).select(*inputs)
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


def test_adaptive_shrinkage_by_hand() -> None:
    """Squared distances to the nearest token: 16, 1, 1, 9, 9, 36. Their median is 9, so the noise is 4.5."""
    tokens = torch.tensor([[0.0], [4.0], [5.0], [100.0], [103.0], [109.0]])
    attention = torch.tensor([0.3, 0.1, 0.1, 0.25, 0.1, 0.1])
    result = ClustRS(keep=2, shrinkage="adaptive", clip=(0, 1), attention_power=1e-6).select(tokens, attention)
    assert result.labels is not None
    assert result.labels.tolist() == [0, 0, 0, 1, 1, 1]
    # Means 3 and 104; squared distances to them 9, 1, 4, 16, 1 and 25: 56 / 6 on average.
    torch.testing.assert_close(result.alpha, torch.full((2,), 1 - 4.5 * 6 / 56), rtol=1e-4, atol=1e-4)


def test_adaptive_shrinkage_follows_the_noise() -> None:
    """Clusters with some detail of their own: the noisier the tokens, the less of them stays; RRS does not notice."""
    generator = torch.Generator().manual_seed(0)
    kinds = 10 * torch.randn(8, 64, generator=generator)
    surfaces = kinds[:, None] + torch.randn(8, 6, 64, generator=generator)
    clean = surfaces[:, :, None].expand(8, 6, 10, 64).reshape(480, 64)
    noise, attention = torch.randn(480, 64, generator=generator), torch.rand(480, generator=generator)
    means: dict[str, list[float]] = {}
    for shrinkage in ("adaptive", "residual"):
        method = get_method("clustrs", keep=16, shrinkage=shrinkage, clip=[0.0, 1.0])
        for level in (0.1, 0.5, 1.0, 2.0):
            alpha = method.select(clean + level * noise, attention).alpha
            assert alpha is not None
            means.setdefault(shrinkage, []).append(float(alpha.mean()))
    assert means["adaptive"] == sorted(means["adaptive"], reverse=True)
    assert means["adaptive"][0] > 0.9
    assert means["adaptive"][-1] < 0.5
    assert max(means["residual"]) - min(means["residual"]) < 0.2


def test_the_spatial_term_by_hand() -> None:
    """Two surfaces, each at both ends of a line: features tell them apart, and with a large weight places do."""
    tokens = torch.tensor([[0.0], [4.0], [0.5], [4.5], [0.25], [4.25], [0.75], [4.75]])
    layout = layout_of([(0, 0, x) for x in (0, 1, 2, 3, 96, 97, 98, 99)])
    attention = torch.linspace(0.2, 0.1, 8)
    for weight, expected in ((0.0, [0, 1] * 4), (0.01, [0, 1] * 4), (20.0, [0] * 4 + [1] * 4)):
        result = ClustRS(keep=2, spatial=weight).select(tokens, attention, layout=layout)
        assert result.labels is not None
        assert result.labels.tolist() == expected


def test_the_spatial_term_needs_a_layout() -> None:
    tokens, attention = torch.rand(9, 4), torch.rand(9)
    message = r"layout is missing: {} needs it, give select\(..., layout=Layout\(...\)\)"
    with pytest.raises(ValueError, match=message.format("clustrs")):
        ClustRS(keep=3, spatial=0.5).select(tokens, attention)
    inner = ClustRS(keep=3, spatial=0.5, shrink=False)
    with pytest.raises(ValueError, match=message.format("denoise")):
        Denoise(inner).select(tokens, attention)


@pytest.mark.parametrize("switches", [one for one in ON if "shrinkage" not in one], ids=lambda one: "-".join(one))
def test_denoise_around_a_variant_is_the_variant(switches: dict[str, Any]) -> None:
    tokens, attention, states = tensors([draw_image(seed, 40, 7, duplicates=0.2) for seed in range(3)])
    layout = layout_of(places_of(40, 8, 1))
    expected = ClustRS(keep=9, **switches).select(tokens, attention, states, layout=layout)
    wrapped = Denoise(ClustRS(keep=9, shrink=False, **switches), clip=switches.get("clip", (0.10, 0.95)))
    result = wrapped.select(tokens, attention, states, layout=layout)
    for name, part in vars(expected).items():
        assert part is None or torch.equal(part, getattr(result, name)), name


@pytest.mark.parametrize("switches", [{"representative": "medoid"}, {"shrinkage": "adaptive"}])
def test_what_has_no_kernels_takes_the_plain_operations(switches: dict[str, Any]) -> None:
    tokens, attention, _ = tensors([draw_image(1, 40, 7)])
    method = get_method("clustrs", keep=6, **switches)
    expected = method.select(tokens, attention)
    with fused.switch("on"):
        result = method.select(tokens, attention)
    for name, part in vars(expected).items():
        assert part is None or torch.equal(part, getattr(result, name)), name


@pytest.mark.slow
def test_all_switches_compile() -> None:
    tokens, attention, _ = tensors([draw_image(i, 30, 8) for i in range(2)])
    layout = layout_of(places_of(30, 6, 1))
    method = ClustRS(keep=5, **ON[-1])
    torch.compiler.reset()
    expected = method.select(tokens, attention, layout=layout)
    result = method.compile().select(tokens, attention, layout=layout)
    assert torch.equal(expected.indices, result.indices)
    torch.testing.assert_close(expected.tokens, result.tokens)
