"""HoloV: a budget for each part of the image, then the most attended tokens there."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import can_read_without_sync, deterministic_matmul, map_images, stable_topk, upcast_half
from clustrs.ops.diversity import raise_tiny
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register

CONTEXT, EPSILON, SCALE = 0.09, 1e-6, 1000.0
LEAST = 1e-30  # squared norm down to which, and up to its inverse, tokens are not normalized before they are multiplied
UNIT = 2**32  # a run's share of the budget is a multiple of 1 / UNIT, so that equal runs have equal shares


@register
@dataclass(frozen=True)
class HoloV(Pruner):
    """Share the budget between stretches of the image by attention and variety; keep the most attended of each.

    HoloV (https://arxiv.org/abs/2510.02912). The tokens in raster order form runs of equal length. In a run, V is the
    variance of a token's cosines to the others, scaled to the mean of A = 1000 a. The share of a run is its mean of
    A + 0.09 V; what a run cannot take goes to those with the next largest share.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        runs: Number of runs.

    Examples:
        >>> import torch
        >>> from clustrs import HoloV
        >>> HoloV(keep=3, runs=2).select(torch.rand(6, 8), torch.tensor([0.3, 0.2, 0.1, 0.1, 0.1, 0.2])).indices
        tensor([0, 1, 5])
    """

    name = "holov"
    paper = "https://arxiv.org/abs/2510.02912"
    needs = ("scores",)
    exportable = True

    runs: int = field(default=16, metadata=accepts(validation.integer, 1))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        (batch, n, _), device = inputs.tokens.shape, inputs.tokens.device
        runs = min(self.runs, n)
        sizes = torch.tensor([n // runs + (run < n % runs) for run in range(runs)], device=device)
        cell = torch.arange(-(-n // runs), device=device)
        inside = cell < sizes[:, None]
        place = ((sizes.cumsum(0) - sizes)[:, None] + cell).clamp(max=n - 1)
        scores = inputs["scores"].double()[:, place.flatten()].unflatten(1, place.shape)
        tokens = inputs.tokens.unflatten(1, place.shape) if n % runs == 0 else inputs.tokens[:, place]
        share = run_shares(tokens, scores * SCALE, inside, sizes)
        budget = divide(share, sizes, k).unsqueeze(-1)
        rank = scores.masked_fill(~inside, -1).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        kept = torch.zeros(batch, n, device=device)
        spot = place.flatten().expand(batch, -1)
        return stable_topk(kept.scatter_add(1, spot, (rank < budget).flatten(1).float()), k)


def run_shares(tokens: Tensor, attention: Tensor, inside: Tensor, sizes: Tensor) -> Tensor:
    """Return the share [B, P] of each run in units of 1 / UNIT, from tokens [B, P, L, D] and attention [B, P, L]."""
    rows = upcast_half(tokens).flatten(0, 1)
    products = map_images(lambda run: deterministic_matmul(run, run), rows).double()
    squares = products.diagonal(dim1=-2, dim2=-1)
    usual = ((squares > LEAST) & (squares < 1 / LEAST)).all(-1)[:, None, None]
    lengths = squares.unsqueeze(-1).sqrt()
    cosine = products / lengths / lengths.mT
    if not can_read_without_sync(rows) or not usual.all():
        rows = raise_tiny(rows)
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
        rows = rows / torch.where(norms > 0, norms, 1).to(rows.dtype)
        cosine = torch.where(usual, cosine, map_images(lambda run: deterministic_matmul(run, run), rows))
    others = inside.unsqueeze(-2) & ~torch.eye(inside.shape[-1], dtype=torch.bool, device=inside.device)
    cosine = torch.where(others, cosine.unflatten(0, tokens.shape[:2]), 0)
    count = (sizes - 1).clamp(min=1)[:, None]
    mean = cosine.sum(-1, keepdim=True) / count.unsqueeze(-1)
    variance = torch.where(inside.unsqueeze(-2), (cosine - mean).square(), 0).sum(-1) / count
    attended, varied = (torch.where(inside, part, 0).sum(-1) / sizes for part in (attention, variance))
    score = attended + CONTEXT * varied * attended / (varied + EPSILON)
    total = score.sum(-1, keepdim=True)
    return (torch.where(total > 0, score / total, 1 / len(sizes)) * UNIT).round().long()


def divide(share: Tensor, sizes: Tensor, k: int) -> Tensor:
    """Return the budget [B, P] of each run: k in proportion to the shares, at most its size."""
    budget = share * k // UNIT
    order = share.argsort(dim=-1, descending=True, stable=True)
    budget = budget + (order.argsort(-1) < k - budget.sum(-1, keepdim=True))
    taken = torch.minimum(budget, sizes)
    room = (sizes - taken).gather(-1, order)
    surplus = k - taken.sum(-1, keepdim=True)
    more = torch.minimum((surplus - (room.cumsum(-1) - room)).clamp(min=0), room)
    return taken.scatter_add(-1, order, more)
