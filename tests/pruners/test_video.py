"""Methods on videos, whose tokens lie in frames, against their references."""

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from method_cases import draw_image

from clustrs import ClusterMeans, Layout, Pruner, get_method
from clustrs.pruners.inputs import count_frames


def video(seed: int, frames: int, height: int, width: int, still: float, first: int = 0) -> tuple[Any, Layout]:
    """Frames in which a share of the tokens is that of the frame before, in any order."""
    n = frames * height * width
    image = draw_image(seed, n, 6)
    generator = torch.Generator().manual_seed(seed)
    copied = (torch.rand(n, generator=generator) < still).tolist()
    for i in range(height * width, n):
        if copied[i]:
            image.tokens[i] = image.tokens[i - height * width]
    cell = torch.arange(n)
    frame = first + 3 * (cell // (height * width))
    order = torch.randperm(n, generator=generator)
    layout = Layout(*(part[order] for part in (frame, cell // width % height, cell % width, frame)))
    places = list(zip(*(part.tolist() for part in (layout.tile, layout.y, layout.x)), strict=True))
    moved = replace(image, tokens=image.tokens[order.numpy()], layout=places, frames=frame[order].tolist())
    return moved, layout


@pytest.mark.parametrize(
    "method", [get_method("evs", keep=1), get_method("vidcom2", keep=1), ClusterMeans(keep=1, across_frames=True)]
)
@given(
    seed=st.integers(0, 99),
    frames=st.integers(1, 5),
    height=st.integers(1, 3),
    width=st.integers(1, 4),
    keep=st.integers(1, 30),
    still=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_same_as_reference(
    method: Pruner, seed: int, frames: int, height: int, width: int, keep: int, still: float
) -> None:
    image, layout = video(seed, frames, height, width, still, first=seed)
    method = replace(method, keep=keep)
    result = method.select(torch.from_numpy(image.tokens), torch.from_numpy(image.attention), layout=layout)
    assert result.indices.tolist() == reference.run(method, image).indices


def test_a_still_video_keeps_its_first_frame() -> None:
    image, layout = video(3, 4, 3, 3, still=1.0)
    kept = get_method("evs", keep=9).select(torch.from_numpy(image.tokens), layout=layout).indices
    assert layout.frame is not None
    assert layout.frame[kept].eq(0).all()


def test_frames_count_from_zero() -> None:
    frame = torch.tensor([[7, 7, 2, 9]])
    layout = Layout(frame, frame, frame, frame)
    assert count_frames(layout, torch.zeros(1, 4, 2)).tolist() == [[1, 1, 0, 2]]
    assert count_frames(None, torch.zeros(2, 3, 1)).tolist() == [[0, 0, 0]] * 2


def test_a_cluster_across_frames_lies_in_the_middle_of_its_time() -> None:
    frame = torch.arange(5)
    layout = Layout(frame, torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long), frame)
    tokens, scores = torch.ones(5, 2), torch.ones(5)
    assert ClusterMeans(keep=1, across_frames=True).select(tokens, scores, layout=layout).indices.tolist() == [2]
    assert ClusterMeans(keep=1).select(tokens, scores, layout=layout).indices.tolist() == [0]


def test_the_frame_must_fit_the_tokens() -> None:
    four = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"layout\.frame must have shape"):
        get_method("evs", keep=1).select(torch.rand(4, 2), layout=Layout(four, four, four, four[:3]))
