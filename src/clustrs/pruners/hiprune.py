"""HiPrune: objects and their surroundings by a middle layer, the rest by a deep one."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import is_ordinary, stable_topk, top_set
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs, grid_side
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class HiPrune(Pruner):
    """Keep anchors, attended in a middle layer, with their neighbors on the grid; fill up by a deep layer's attention.

    HiPrune (https://arxiv.org/abs/2508.00553). Attention is what a token receives, mean over heads and queries. Anchors
    are the top max(1, round(k r / 5)) of the object layer, buffers their four neighbors, registers the top of the layer
    that the projector reads among the others, up to k.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        objects: Share r of the budget for anchors and their neighbors.

    Examples:
        >>> import torch
        >>> from clustrs import HiPrune
        >>> middle, deep = torch.eye(9)[4], torch.linspace(1, 0, 9)
        >>> HiPrune(keep=6).select(torch.rand(9, 8), received=deep, object_scores=middle).indices
        tensor([0, 1, 3, 4, 5, 7])
    """

    name = "hiprune"
    paper = "https://arxiv.org/abs/2508.00553"
    needs = ("received", "object_scores")

    objects: float = field(default=0.1, metadata=accepts(validation.number, 0, 1))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        scores, count = inputs["object_scores"], max(1, round(k * self.objects / 5))
        anchors = top_set(scores, count)
        place, line = grid_places(inputs)
        apart = (place.gather(-1, anchors).unsqueeze(-1) - place.unsqueeze(1)).abs()
        near = ((apart == 1) | (apart == line)).any(1)
        if 5 * count <= k:  # all anchors and buffers fit
            kept = near.scatter(-1, anchors, True)
            return top_set(inputs["received"].masked_fill(kept, torch.inf), k)
        rank = near.long().scatter(-1, anchors, 2)  # anchors before buffers before the rest
        attention = torch.where(rank > 0, scores, inputs["received"])
        order = stable_topk(attention, attention.shape[-1])
        return order.gather(-1, stable_topk(rank.gather(-1, order), k))


def grid_places(inputs: PrunerInputs) -> tuple[Tensor, Tensor | int]:
    """Return numbers [B, N] of the places on the grid that differ by 1 for neighbors in a line, and by the second value
    for those in a column; lines and tiles are further apart than that."""
    layout, (batch, n, _) = inputs.layout, inputs.tokens.shape
    if layout is None:
        make = square_places if is_ordinary(inputs.tokens) else square_places.__wrapped__
        return make(n, inputs.tokens.device).expand(batch, -1), grid_side(n) + 1
    lines, line = (axis.amax() - axis.amin() + 2 for axis in (layout.y, layout.x))
    return (layout.tile * lines + layout.y) * line + layout.x, line


@lru_cache(maxsize=8)
def square_places(n: int, device: torch.device) -> Tensor:
    """Return the numbers [1, N] of places on a square, or else in one line."""
    cell = torch.arange(n, device=device)
    return (cell + cell // grid_side(n))[None]
