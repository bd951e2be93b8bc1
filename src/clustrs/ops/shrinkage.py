"""Residual shrinkage (RRS): a kept token moves towards the weighted mean of its cluster."""

import torch
from torch import Tensor

from clustrs.ops import kmeans
from clustrs.ops.clusters import Clusters, medians, partition, weighted_sums
from clustrs.ops.geometry import ROUNDING
from clustrs.ops.indexing import gather_tokens
from clustrs.ops.precision import upcast_half


def shrink_factors(residuals: Tensor, kept: Tensor, clusters: Clusters, clip: tuple[float, float]) -> Tensor:
    """How much of each kept token stays, [B, k]: alpha = delta^2 / (r^2 + delta^2), within `clip`.

    `residuals` [B, N] are the distances r of all tokens to the centres of their clusters, delta is their median over
    a cluster. A cluster of one has alpha 1: its token is its centre.
    """
    noise = medians(clusters, residuals).square()
    total = residuals.gather(-1, kept).square() + noise
    alpha = torch.where(total > 0, noise / total, 1).clamp(*clip)
    return torch.where(clusters.sizes == 1, 1, alpha)


def shrink_to_means(
    tokens: Tensor,
    indices: Tensor,
    labels: Tensor,
    weight: Tensor,
    distances: Tensor,
    scale: Tensor,
    clip: tuple[float, float] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept tokens moved towards the weighted means of their clusters, these means, how much stayed, and each
    token's share in the mean of its cluster.

    `tokens` [B, N, D], `indices` [B, k] of the kept ones, `labels` [B, N] of all; `distances` and `scale` as
    `squared_distances` returns them. Without `clip` nothing moves.
    Gives [B, k, D], [B, k, D], [B, k] and [B, N].
    """
    features = upcast_half(tokens)
    k = indices.shape[-1]
    with torch.no_grad():
        clusters = partition(labels, k)
        shares = kmeans.mean_shares(kmeans.membership(labels, k), weight)
        if clip is None:
            alpha = torch.ones_like(indices, dtype=features.dtype)
        else:
            residuals = kmeans.gather_own(kmeans.to_means(distances, shares), labels)
            residuals = residuals.masked_fill_(residuals <= ROUNDING * scale, 0).sqrt_()
            alpha = shrink_factors(residuals, indices, clusters, clip)
        share = kmeans.gather_own(shares, labels)
    centroids = weighted_sums(clusters, features, share)
    kept = gather_tokens(tokens, indices)
    if clip is not None:
        kept = upcast_half(kept).lerp_(centroids, 1 - alpha.unsqueeze(-1)).to(tokens.dtype)
    return kept, centroids.to(tokens.dtype), alpha, share
