"""Choosing and gathering tokens by index. Ties always go to the token that comes first."""

import torch
from torch import Tensor

from clustrs.ops.precision import exporting


def stable_topk(score: Tensor, k: int) -> Tensor:
    """Indices [B, k] of the k largest scores of [B, N], best first."""
    return score.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def fill_invalid(chosen: Tensor, valid: Tensor, score: Tensor) -> Tensor:
    """Replace the invalid entries of `chosen` [B, k], in their order, by the best tokens not chosen yet.

    `score` [B, N] must not be negative.
    """
    taken = torch.zeros_like(score, dtype=torch.long).scatter_add_(-1, chosen, valid.long()) > 0
    spare = stable_topk(score.masked_fill(taken, -1), chosen.shape[-1])
    rank = (~valid).cumsum(-1).sub(1).clamp(min=0)
    return torch.where(valid, chosen, spare.gather(-1, rank))


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Tokens of [B, N, D] at [B, k]: [B, k, D]."""
    batch, n, width = tokens.shape
    if not exporting() and batch == 1:
        return tokens.squeeze(0).index_select(0, indices.squeeze(0)).unsqueeze(0)
    flat = indices + torch.arange(batch, device=tokens.device)[:, None] * n
    return tokens.reshape(batch * n, width).index_select(0, flat.flatten()).view(batch, -1, width)
