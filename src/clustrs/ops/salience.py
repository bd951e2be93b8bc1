"""Norm-aware salience, for vision encoders without a CLS token."""

import torch
from torch import Tensor


def salience(tokens: Tensor, attention: Tensor) -> Tensor:
    """s_i = a_i + 2 mean(a) max(0, |v_i| - mean |v|): [B, N, D] and [B, N] give [B, N]."""
    norms = torch.linalg.vector_norm(tokens, dim=-1)
    bonus = (norms - norms.mean(-1, keepdim=True)).clamp(min=0)
    return attention + 2 * attention.mean(-1, keepdim=True) * bonus
