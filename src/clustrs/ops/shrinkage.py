"""Residual shrinkage (RRS): a kept token moves towards the weighted mean of its cluster."""

import torch
from torch import Tensor

from clustrs.ops.clusters import Clusters, medians


def shrink_factors(residuals: Tensor, kept: Tensor, clusters: Clusters, clip: tuple[float, float]) -> Tensor:
    """How much of each kept token stays, [B, k]: alpha = delta^2 / (r^2 + delta^2), within `clip`.

    `residuals` [B, N] are the distances r of all tokens to the centres of their clusters, delta is their median over
    a cluster. A cluster of one has alpha 1: its token is its centre.
    """
    noise = medians(clusters, residuals).square()
    total = residuals.gather(-1, kept).square() + noise
    alpha = torch.where(total > 0, noise / total, 1).clamp(*clip)
    return torch.where(clusters.sizes == 1, 1, alpha)
