"""Grid: evenly spaced tokens, the other floor."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs import validation
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates


@register
@dataclass(frozen=True)
class Grid(Pruner):
    """Keep k tokens spread evenly over the image.

    columns: how many tokens a row of the image has; None means a square image, or one row if N is no square.
    """

    name = "grid"

    columns: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            validation.integer("columns", self.columns, 1)

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        n = tokens.shape[1]
        side = math.isqrt(n)
        width = self.columns or (side if side * side == n else n)
        if n % width:
            raise ValueError(f"columns={width}: {n} tokens do not fill rows of that many")
        height = n // width
        rows = max(math.ceil(k / width), min(height, k, round(math.sqrt(k * height / width))), 1)
        place = torch.arange(k, device=tokens.device)
        row = ((place + 1) * rows - 1) // k
        before = k * row // rows
        here = k * (row + 1) // rows - before
        y = (2 * row + 1) * height // (2 * rows)
        x = (2 * (place - before) + 1) * width // (2 * here)
        return (y * width + x).repeat(len(tokens), 1)
