"""Choosing tokens by score. Ties always go to the token that comes first."""

import torch
from torch import Tensor


def top(score: Tensor, k: int) -> Tensor:
    """The k best of [B, N], best first: [B, k]."""
    return score.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def fill(chosen: Tensor, valid: Tensor, score: Tensor) -> Tensor:
    """Replace the invalid entries of `chosen` [B, k], in their order, by the best tokens not chosen yet.

    `score` [B, N] must not be negative.
    """
    taken = torch.zeros_like(score, dtype=torch.long).scatter_add_(-1, chosen, valid.long()) > 0
    spare = top(score.masked_fill(taken, -1), chosen.shape[-1])
    rank = (~valid).cumsum(-1).sub(1).clamp(min=0)
    return torch.where(valid, chosen, spare.gather(-1, rank))


def rows_at(source: Tensor, indices: Tensor) -> Tensor:
    """Rows of [B, N, D] at [B, k]: [B, k, D]."""
    batch, n, width = source.shape
    places = indices + torch.arange(batch, device=source.device)[:, None] * n
    return source.reshape(batch * n, width).index_select(0, places.flatten()).view(batch, -1, width)
