"""The positions of a pruned prompt where tokens have three of them (M-RoPE): time, height and width.

A survivor keeps the positions that it had in the whole prompt, and so does the text. The text's follow from the sizes
of the images and are known when a request arrives; which tokens survive is known only when these are encoded. So
every placeholder first gets the position at which its image starts, and each survivor's features carry its y and x, in
channels of their own, to the step of the engine that feeds them to the language model.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BASE = 256
"""Every whole number up to this one is exact in bfloat16 and float16, so y and x travel as two digits each."""
CHANNELS = 4
"""How many channels the y and the x of a token take."""


class ImageSpan(NamedTuple):
    """Where an image stands in a pruned prompt: its first placeholder, how many it has left, and its size in tokens
    before pruning."""

    start: int
    kept: int
    height: int
    width: int


def starting_positions(length: int, images: Iterable[ImageSpan]) -> tuple[Tensor, int]:
    """Positions [3, length] with every placeholder at the start of its image; and what to add to the length of the
    sequence for the position of the next token."""
    steps = torch.ones(length, dtype=torch.long)
    for image in images:
        end = image.start + image.kept
        steps[image.start : end] = 0
        steps[end - 1] = max(image.height, image.width)
    after = steps.cumsum(0)
    following = int(after[-1]) if length else 0
    return (after - steps).repeat(3, 1), following - length


def cell_channels(y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The y and x [k] of tokens as digits [k, CHANNELS] of a floating-point type."""
    return torch.stack([y // BASE, y % BASE, x // BASE, x % BASE], -1).to(dtype)


def position_offsets(channels: Tensor) -> Tensor:
    """What to add to the positions of tokens [3, k], from the digits [k, CHANNELS] they carry."""
    digits = channels.long()
    y, x = digits[:, 0] * BASE + digits[:, 1], digits[:, 2] * BASE + digits[:, 3]
    return torch.stack([torch.zeros_like(y), y, x])


def split_channels(embeddings: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The features of images without the channels behind them, and the offsets [3, k of all images] these hold."""
    offsets = [position_offsets(rows[:, -CHANNELS:]) for rows in embeddings]
    return [rows[:, :-CHANNELS] for rows in embeddings], torch.cat(offsets, 1)
