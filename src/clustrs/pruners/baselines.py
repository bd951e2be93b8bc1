"""Baselines: no pruning, a random choice, and an evenly spaced one."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import random_order
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import Layout, PrunerInputs, grid_side
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class NoPruning(Pruner):
    """Keep every token: what every method is compared with. Leave `keep` out.

    Examples:
        >>> NoPruning().select(torch.rand(9, 4)).tokens.shape
        torch.Size([9, 4])
    """

    name = "none"
    label = "no pruning"
    exportable = True

    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.keep != 1.0 or not isinstance(self.keep, float):
            raise ValueError(f"keep must be 1.0 or left out (this method keeps every token), got {self.keep!r}")


@register
@dataclass(frozen=True)
class Random(Pruner):
    """Keep k tokens drawn uniformly without replacement: the same positions in every image, for one seed.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        seed: Seed of the draw.

    Examples:
        >>> Random(keep=3).select(torch.rand(9, 4)).indices.shape
        torch.Size([3])
    """

    name = "random"
    exportable = True

    seed: int = field(default=0, metadata=accepts(validation.integer, 0))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        batch, n, _ = inputs.tokens.shape
        return random_order(self.seed, n, inputs.tokens)[:, :k].expand(batch, -1)


@register
@dataclass(frozen=True)
class Grid(Pruner):
    """Keep k tokens spread evenly over the image.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        columns: Tokens in a line of the image. None: as the layout says; without one a square, or else one line.

    Examples:
        >>> Grid(keep=4).select(torch.rand(16, 4)).indices
        tensor([ 5,  7, 13, 15])
    """

    name = "grid"
    exportable = True

    columns: int | None = field(default=None, metadata=accepts(validation.integer, 1))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        batch, n, _ = inputs.tokens.shape
        if inputs.layout is not None and self.columns is None:
            return spread_over_tiles(inputs.layout, k)
        width = self.columns or grid_side(n)
        if n % width:
            raise ValueError(f"columns must divide the number of tokens, {n}, got {width}")
        slot = torch.arange(k, device=inputs.tokens.device)
        return spread(slot, *(torch.full_like(slot, size) for size in (k, n // width, width))).repeat(batch, 1)


def count_lines(k: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return how many lines of a grid k places lie on: about as many as make the spacing the same both ways."""
    ideal = (k * height).double().div(width).sqrt().round().long()
    return torch.maximum(torch.minimum(torch.minimum(height, k), ideal), (k + width - 1) // width).clamp(min=1)


def spread(slot: Tensor, k: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return raster positions of the slots 0 .. k-1 on a grid of `height` x `width`, each slot on a grid of its own:
    lines at even distances, and on each columns likewise."""
    lines = count_lines(k, height, width)
    line = ((slot + 1) * lines - 1) // k
    before = k * line // lines
    here = k * (line + 1) // lines - before
    y = (2 * line + 1) * height // (2 * lines)
    x = (2 * (slot - before) + 1) * width // (2 * here)
    return y * width + x


class TileGrids:
    """Tokens tile by tile in raster order. `order` and `tile` [B, N] are by token in that order, tiles counted from 0;
    `size`, `height`, `width` [B, N] are by tile: the rectangle that its tokens fill, or one line if they fill none."""

    def __init__(self, layout: Layout) -> None:
        order = layout.x.argsort(dim=-1, stable=True)
        for key in (layout.y, layout.tile):
            order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
        tile, y, x = (part.gather(-1, order) for part in (layout.tile, layout.y, layout.x))
        tile = torch.nn.functional.pad(tile[:, 1:] != tile[:, :-1], (1, 0)).long().cumsum(-1)
        size = torch.zeros_like(tile).scatter_add_(-1, tile, torch.ones_like(tile))

        def extent(position: Tensor) -> Tensor:
            low = torch.zeros_like(tile).scatter_reduce(-1, tile, position, "amin", include_self=False)
            return low.scatter_reduce(-1, tile, position, "amax", include_self=False) - low + 1

        height, width = extent(y), extent(x)
        full = height * width == size
        self.order, self.tile, self.size = order, tile, size
        self.height, self.width = torch.where(full, height, 1), torch.where(full, width, size)

    def shares(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the part [B, N] of k that each tile gets, and of those up to it: k * (their tokens) // N."""
        end = k * self.size.cumsum(-1) // self.size.shape[-1]
        return torch.diff(end, dim=-1, prepend=torch.zeros_like(end[:, :1])), end

    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return line, column, height and width of the grid [B, N], by token."""
        start = (self.size.cumsum(-1) - self.size).gather(-1, self.tile)
        inside = torch.arange(self.tile.shape[-1], device=self.tile.device) - start
        height, width = (part.gather(-1, self.tile) for part in (self.height, self.width))
        return inside // width, inside % width, height, width


def spread_over_tiles(layout: Layout, k: int) -> Tensor:
    """Return indices [B, k]: each tile gets its part of the budget, spread over its grid."""
    grids = TileGrids(layout)
    share, share_end = grids.shares(k)
    slot = torch.arange(k, device=share.device).repeat(len(share), 1)
    own = torch.searchsorted(share_end, slot, right=True)
    inside = spread(
        slot - (share_end - share).gather(-1, own),
        *(part.gather(-1, own) for part in (share, grids.height, grids.width)),
    )
    start = grids.size.cumsum(-1) - grids.size
    return grids.order.gather(-1, start.gather(-1, own) + inside)
