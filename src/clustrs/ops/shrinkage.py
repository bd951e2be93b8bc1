"""Residual shrinkage (RRS): a kept token moves towards the weighted mean of its cluster."""

import torch
from torch import Tensor

from clustrs.ops import kmeans
from clustrs.ops.clusters import Clusters, medians, partition, weighted_sums
from clustrs.ops.geometry import ROUNDING, map_images
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


def noise_variance(distances: Tensor, scale: Tensor) -> Tensor:
    """An estimate [B, 1] of the squared length of the noise in an image's tokens: half the median over the tokens of
    the squared distance to the nearest other one. A distance that rounding could make (see `scale`) is none.

    Many tokens of a clean image nearly repeat another one (sky, walls). Noise that is drawn for each token puts about
    twice its variance between any two of them, however alike they were.
    """
    n = distances.shape[-1]
    same = torch.eye(n, dtype=torch.bool, device=distances.device)
    nearest = distances.masked_fill(same, torch.inf).amin(-1)
    nearest = nearest.masked_fill(nearest <= ROUNDING * scale, 0).sort(-1).values
    return (nearest[:, (n - 1) // 2] + nearest[:, n // 2]).unsqueeze(-1) / 4


def adaptive_factors(residuals: Tensor, clusters: Clusters, noise: Tensor, clip: tuple[float, float]) -> Tensor:
    """How much of each kept token stays, [B, k]: alpha = 1 - noise / mean(r^2), within `clip`; the same for all tokens
    of an image.

    The mean squared distance r^2 of all its tokens to the centres of their clusters is signal and `noise` [B, 1]
    together; what stays is the part that is not noise. Where both are 0, or in a cluster of one, alpha is 1.
    """
    total = map_images(lambda image: image.square().mean(-1, keepdim=True), residuals)
    alpha = torch.where(total > 0, 1 - noise / total, torch.where(noise > 0, 0.0, 1.0)).clamp(*clip)
    return torch.where(clusters.sizes == 1, 1, alpha)


def shrink_to_means(
    tokens: Tensor,
    indices: Tensor,
    labels: Tensor,
    weight: Tensor,
    distances: Tensor,
    scale: Tensor,
    clip: tuple[float, float] | None,
    adaptive: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept tokens moved towards the weighted means of their clusters, these means, how much stayed, and each
    token's share in the mean of its cluster.

    `tokens` [B, N, D], `indices` [B, k] of the kept ones, `labels` [B, N] of all; `distances` and `scale` as
    `squared_distances` returns them. Without `clip` nothing moves; `adaptive` lets the image's noise say how far.
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
            if adaptive:
                alpha = adaptive_factors(residuals, clusters, noise_variance(distances, scale), clip)
            else:
                alpha = shrink_factors(residuals, indices, clusters, clip)
        share = kmeans.gather_own(shares, labels)
    centroids = weighted_sums(clusters, features, share)
    kept = gather_tokens(tokens, indices)
    if clip is not None:
        kept = upcast_half(kept).lerp_(centroids, 1 - alpha.unsqueeze(-1)).to(tokens.dtype)
    return kept, centroids.to(tokens.dtype), alpha, share
