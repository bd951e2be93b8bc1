"""Methods that look at places, on images of several tiles, against their references."""

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import draw_image

from clustrs import ClusterMeans, Downsample, Grid, HiPrune, Layout, VScan
from clustrs.pruners.inputs import FURTHER

Places = list[tuple[int, int, int]]


def rectangle(tile: int, height: int, width: int, y: int = 0, x: int = 0) -> Places:
    return [(tile, y + i, x + j) for i in range(height) for j in range(width)]


def layout_of(places: Places) -> Layout:
    return Layout(*torch.tensor(places).unbind(-1))


sides = st.integers(1, 7)
tiles = st.lists(st.tuples(sides, sides, st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5)


@given(tiles=tiles, keep=st.integers(1, 80), first=st.integers(0, 200), seed=st.integers(0, 99), ragged=st.booleans())
def test_same_as_reference(
    tiles: list[tuple[int, int, int, int]], keep: int, first: int, seed: int, ragged: bool
) -> None:
    places = [place for i, tile in enumerate(tiles) for place in rectangle(first + 2 * i, *tile)]
    places = places[:-1] if ragged and len(places) > 1 else places
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    places = [places[i] for i in order]
    image = replace(draw_image(seed, len(places), 3), layout=places)
    tokens = torch.from_numpy(image.tokens)
    result = Grid(keep=keep).select(tokens, layout=layout_of(places))
    assert result.indices.tolist() == reference.run(Grid(keep=keep), image).indices
    assert len(set(result.indices.tolist())) == min(keep, len(places))
    more: dict[str, Any] = {name: torch.from_numpy(getattr(image, name)) for name in FURTHER}
    for method in (ClusterMeans(keep=keep), HiPrune(keep=keep, objects=0.5), VScan(keep=keep), Downsample(keep=keep)):
        result = method.select(tokens, torch.from_numpy(image.attention), layout=layout_of(places), **more)
        expected = reference.run(method, image)
        assert result.indices.tolist() == expected.indices
        if expected.labels is not None and method.name != "clustermeans":
            assert result.labels is not None
            assert result.labels.tolist() == expected.labels


def test_an_anyres_image_is_a_real_grid() -> None:
    """A base of 4 x 4 and two tiles of 4 x 4, the right one cut to 4 x 2: each gets its part, in two dimensions."""
    places = rectangle(0, 4, 4) + rectangle(1, 4, 4) + rectangle(2, 4, 2)
    kept = Grid(keep=10).select(torch.rand(40, 3), layout=layout_of(places)).indices.tolist()
    assert [places[i] for i in kept] == [
        *[(0, 1, 1), (0, 1, 3), (0, 3, 1), (0, 3, 3)],
        *[(1, 1, 1), (1, 1, 3), (1, 3, 1), (1, 3, 3)],
        *[(2, 1, 1), (2, 3, 1)],
    ]


@pytest.mark.parametrize("side", [5, 24])
def test_one_square_tile_is_the_image_without_a_layout(side: int) -> None:
    tokens = torch.rand(2, side * side, 3)
    layout = layout_of(rectangle(0, side, side))
    for keep in (1, 7, 16, side * side - 1):
        assert torch.equal(
            Grid(keep=keep).select(tokens, layout=layout).indices, Grid(keep=keep).select(tokens).indices
        )


def test_every_image_of_a_batch_has_its_own_layout() -> None:
    wide, tall = rectangle(0, 2, 8), rectangle(0, 8, 2)
    both = Layout(*torch.tensor([wide, tall]).unbind(-1))
    result = Grid(keep=4).select(torch.rand(2, 16, 3), layout=both).indices
    for row, places in zip(result, (wide, tall), strict=True):
        assert torch.equal(row, Grid(keep=4).select(torch.rand(16, 3), layout=layout_of(places)).indices)
    assert torch.equal(
        Grid(keep=4, columns=4).select(torch.rand(16, 3), layout=layout_of(wide)).indices, torch.tensor([5, 7, 13, 15])
    )
