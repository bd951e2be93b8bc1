"""Downsample: the means of a coarser grid."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.distances import upcast_half
from clustrs.ops.kmeans import cluster_sizes, weighted_sums
from clustrs.pruners.base import Pruner
from clustrs.pruners.baselines import TileGrids, count_lines
from clustrs.pruners.clustermeans import cluster_slots
from clustrs.pruners.inputs import Layout, PrunerInputs, Selection, check_finite, grid_layout
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class Downsample(Pruner):
    """Average the tokens over the cells of a coarser grid: what every method should beat.

    The baseline of VTC-Bench (https://arxiv.org/abs/2510.07143), on features. Tiles share the budget by their sizes; in
    each, lines and columns are divided as evenly as k allows. A mean takes the slot nearest to the middle of its cell.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> import torch
        >>> from clustrs import Downsample
        >>> Downsample(keep=4).select(torch.arange(16.0)[:, None]).tokens.flatten()
        tensor([ 2.5000,  4.5000, 10.5000, 12.5000])
    """

    name = "downsample"
    paper = "https://arxiv.org/abs/2510.07143"
    merges = True
    exportable = True

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        if check:
            check_finite("tokens", inputs.tokens)
        tokens = upcast_half(inputs.tokens)
        with torch.no_grad():
            labels = cells(inputs.layout or grid_layout(inputs.tokens), k)
            shares = cluster_sizes(labels, k).to(tokens.dtype).reciprocal().gather(-1, labels)
            slots, order = cluster_slots(labels, shares, inputs, k).sort(-1)
            labels = order.argsort(-1).gather(-1, labels)
            sizes = cluster_sizes(labels, k)
        means = weighted_sums(tokens, labels, shares, sizes).to(inputs.tokens.dtype)
        return Selection(means, slots, labels, merged=sizes > 1, shares=shares)


def cells(layout: Layout, k: int) -> Tensor:
    """Return the cell [B, N] of each token: rectangles of a tile's grid, as many as its part of k. A tile without a
    cell of its own belongs to the next one's first."""
    grids = TileGrids(layout)
    share, end = (part.gather(-1, grids.tile) for part in grids.shares(k))
    y, x, height, width = grids.places()
    lines = count_lines(share, height, width)
    line = ((y + 1) * lines - 1) // height
    before = share * line // lines
    here = share * (line + 1) // lines - before
    cell = end - share + before + (((x + 1) * here - 1) // width).clamp(min=0)
    return torch.empty_like(cell).scatter_(-1, grids.order, cell.clamp(max=k - 1))
