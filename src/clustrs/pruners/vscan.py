"""VScan, stage 1: a local scan of windows, a global scan, and the rest merged into what they keep."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import gather_tokens, stable_topk, upcast_half
from clustrs.ops.diversity import nearest_cosines
from clustrs.ops.kmeans import cluster_sizes, weighted_sums
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.baselines import TileGrids
from clustrs.pruners.inputs import Layout, PrunerInputs, Selection, check_finite, grid_layout
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class VScan(Pruner):
    """Keep tokens of every window by an early layer and others by the last one; merge the rest into the nearest.

    Stage 1 of VScan (https://arxiv.org/abs/2505.22654). Half of k are the most attended tokens of an early layer, as
    evenly as possible from the windows that the grid is divided into; the other half the most attended of the others in
    the layer of `scores`. A token that is not kept goes to the kept one with the largest cosine; output tokens are
    means.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        windows: Windows along each side of the image.

    Examples:
        >>> import torch
        >>> from clustrs import VScan
        >>> result = VScan(keep=4).select(torch.rand(16, 8), torch.rand(16), early_scores=torch.rand(16))
        >>> result.labels.shape
        torch.Size([16])
    """

    name = "vscan"
    paper = "https://arxiv.org/abs/2505.22654"
    needs = ("scores", "early_scores")
    merges = True

    windows: int = field(default=4, metadata=accepts(validation.integer, 1))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        if check:
            check_finite("tokens", inputs.tokens)
        tokens = upcast_half(inputs.tokens)
        with torch.no_grad():
            window = window_of(inputs.layout or grid_layout(inputs.tokens), self.windows)
            local = scan_windows(inputs["early_scores"], window, k // 2)
            others = inputs["scores"].scatter(-1, local, -1)
            indices = torch.cat([local, stable_topk(others, k - k // 2)], -1).sort(-1).values
            kept, own = gather_tokens(tokens, indices), torch.arange(k, device=indices.device).expand_as(indices)
            if 8 * k < window.shape[-1]:  # few rows too many cost less than a copy of the others
                labels = nearest_cosines(tokens, kept)[..., 0]
            else:
                rest = torch.zeros_like(window).scatter(-1, indices, 1).argsort(dim=-1, stable=True)[:, :-k]
                goal = nearest_cosines(gather_tokens(tokens, rest), kept)[..., 0]
                labels = torch.zeros_like(window).scatter(-1, rest, goal)
            labels = labels.scatter(-1, indices, own)
            sizes = cluster_sizes(labels, k)
            shares = sizes.to(tokens.dtype).reciprocal().gather(-1, labels)
        means = weighted_sums(tokens, labels, shares, sizes).to(inputs.tokens.dtype)
        return Selection(means, indices, labels, merged=sizes > 1, shares=shares)


def window_of(layout: Layout, count: int) -> Tensor:
    """Return the window [B, N] of each token: `count` x `count` of them in each tile."""
    grids = TileGrids(layout)
    y, x, height, width = grids.places()
    window = (grids.tile * count + y * count // height) * count + x * count // width
    return torch.empty_like(window).scatter_(-1, grids.order, window)


def scan_windows(scores: Tensor, window: Tensor, k: int) -> Tensor:
    """Return k indices [B, k]: the best of each window, then the second of each ...; of a round the best first."""
    order = stable_topk(scores, scores.shape[-1])
    by_window = order.gather(-1, window.gather(-1, order).argsort(dim=-1, stable=True))
    sorted_windows = window.gather(-1, by_window)
    first = torch.searchsorted(sorted_windows, sorted_windows)
    place = torch.arange(scores.shape[-1], device=scores.device) - first
    turn = torch.empty_like(place).scatter_(-1, by_window, place)
    return order.gather(-1, turn.gather(-1, order).argsort(dim=-1, stable=True))[:, :k]
