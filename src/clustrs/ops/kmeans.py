"""Attention-weighted Huber k-means++ (C+H) and residual shrinkage (RRS), over the squared distances of the tokens.

A center is a weighted mean of its cluster's tokens, held as the shares w that they have in it. Its squared distance to
token i is sum_m w_m d_im - sum_lm w_l w_m d_lm / 2, so the clustering never reads the D features.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from clustrs.ops.distances import (
    ROUNDING,
    deterministic_matmul,
    exponential_noise,
    exporting,
    fill_invalid,
    gather_tokens,
    map_chunks,
    map_images,
)

AT_ONCE = 8  # from this share of the tokens on, 1 / AT_ONCE, costs are computed at once, not seed by seed
LIGHTEST = 1e-36  # weight that counts as none, next to a largest weight of about 1
LEAST_SUM = 2.0**-126  # below every sum of weights in a cluster, also of those that the Huber estimate makes lighter
Clip = tuple[float, float]


def salience(tokens: Tensor, attention: Tensor) -> Tensor:
    """Return s_i = a_i + 2 mean(a) max(0, |v_i| - mean |v|) [B, N], for encoders without a CLS token."""
    norms = torch.linalg.vector_norm(tokens, dim=-1)
    bonus = (norms - norms.mean(-1, keepdim=True)).clamp(min=0)
    return attention + 2 * attention.mean(-1, keepdim=True) * bonus


def unit_scale(weight: Tensor) -> Tensor:
    """Scale weights [B, N] by a power of two (so exactly) to a largest one near 1, and none below `LIGHTEST`: sums
    neither overflow nor vanish, and tokens without weight are equal among themselves."""
    # From the logarithm, because frexp does not export. Where it rounds at a power of two, either is right.
    exponent = weight.amax(-1, keepdim=True).log2().floor().clamp(-127, 125)
    return (weight * torch.exp2(-1 - exponent)).clamp_(min=LIGHTEST)


def pow_weights(weight: Tensor, power: float) -> Tensor:
    """Raise weights [B, N] from `unit_scale` to a power above 0, the largest 1; what weighed nothing still does."""
    share = weight / weight.amax(-1, keepdim=True)
    share = share.masked_fill_(weight <= LIGHTEST, 0)
    return map_images(lambda row: map_chunks(lambda part: part.pow(power), row), share).clamp_(min=LIGHTEST)


def seeding_costs(far: Tensor, slack: Tensor, tau: float | None, zero: Tensor) -> Tensor:
    """Return the cost of squared distances: h_tau of the distance, or `far` itself if tau is None; 0 up to `slack`.
    `zero` is the number as a tensor, made once for all seeds."""
    far = far.masked_fill(far <= slack, 0)
    if tau is not None:  # the operator itself, without the checks of torch.nn: this is called for every seed
        far = torch.ops.aten.huber_loss.default(far.sqrt_(), zero, 0, tau)
    return far


def seeding(distances: Tensor, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    """Draw k-means++ seeds [B, k]: first the heaviest token, then in proportion to weight times cost.

    The cost is h_tau of the distance to the nearest seed, or the squared distance if tau is None; 0 for a token that
    repeats a seed, up to rounding. Where all that is left weighs or costs nothing, the heaviest tokens follow.
    """
    batch, n, _ = distances.shape
    rows = distances.reshape(batch * n, n)
    offset = torch.arange(batch, device=distances.device) * n if batch > 1 else None
    slack = ROUNDING * scale
    zero = slack.new_zeros(())
    at_once = k * AT_ONCE >= n
    if at_once:
        rows = seeding_costs(distances, slack.unsqueeze(1), tau, zero).view(batch * n, n)
    seeds = [weight.argmax(-1)]
    cost = None
    for rate in (weight.unsqueeze(1) / exponential_noise(seed, k - 1, n, like=distances)).unbind(1):
        row = rows.index_select(0, seeds[-1] if offset is None else seeds[-1] + offset)
        row = row if at_once else seeding_costs(row, slack, tau, zero)
        cost = row if cost is None else torch.minimum(cost, row)
        seeds.append((cost * rate).argmax(-1))
    drawn = torch.stack(seeds, -1)
    between = gather_tokens(distances, drawn).gather(-1, drawn.unsqueeze(1).expand(-1, k, -1))
    repeated = (between <= slack.gather(-1, drawn).unsqueeze(1)).triu(1).any(1)
    return fill_invalid(drawn, ~repeated & (weight.gather(-1, drawn) > LIGHTEST), weight)


def membership(labels: Tensor, k: int) -> Tensor:
    """Tell [B, k, N] which tokens each cluster has, from labels [B, N]."""
    return labels.unsqueeze(1) == torch.arange(k, device=labels.device).unsqueeze(1)


def cluster_sizes(labels: Tensor, k: int) -> Tensor:
    """Count the tokens [B, k] of each cluster, from labels [B, N]."""
    return labels.new_zeros(labels.shape[0], k).scatter_add_(-1, labels, torch.ones_like(labels))


def weighted_sums(tokens: Tensor, labels: Tensor, factors: Tensor, sizes: Tensor) -> Tensor:
    """Return the sums [B, k, D] of `factors` [B, N] times `tokens` [B, N, D] over clusters of `sizes` [B, k], not 0."""
    if exporting():  # other runtimes loop over the bags
        return torch.where(membership(labels, sizes.shape[-1]), factors[:, None], 0) @ tokens
    batch, n, width = tokens.shape
    order = labels.argsort(dim=-1, stable=True)
    slots = order + torch.arange(batch, device=tokens.device)[:, None] * n
    weights, counts = factors.gather(-1, order).flatten(), sizes.flatten()
    starts = counts.cumsum(0) - counts
    rows = tokens.reshape(batch * n, width)
    total = functional.embedding_bag(slots.flatten(), rows, starts, mode="sum", per_sample_weights=weights)
    return total.view(batch, -1, width)


def mean_shares(labels: Tensor, weight: Tensor, k: int) -> Tensor:
    """Return the share [B, k, N] of each token in the weighted mean of its cluster; an empty cluster has zeros."""
    part = membership(labels, k) * weight.unsqueeze(1)
    return part.div_(part.sum(-1, keepdim=True).clamp_(min=LEAST_SUM))


def to_means(distances: Tensor, shares: Tensor) -> Tensor:
    """Return squared distances [B, k, N] from the clusters' means to all tokens; infinite from an empty cluster."""
    mixed = map_images(deterministic_matmul, shares, distances)
    spread = (shares * mixed).sum(-1, keepdim=True).div_(2)
    empty = shares.amax(-1, keepdim=True) == 0
    return mixed.sub_(spread.masked_fill_(empty, -torch.inf)).clamp_(min=0)


def nearest(to_centers: Tensor, slack: Tensor) -> Tensor:
    """Return the nearest center [B, N] of each token: the first of those that differ by at most `slack` [B, 1, N]."""
    k = to_centers.shape[1]
    limit = to_centers.amin(1, keepdim=True) + slack
    index = torch.arange(k, device=slack.device, dtype=slack.dtype).unsqueeze(1)
    return torch.where(to_centers <= limit, index, k - 1).amin(1).long()


def gather_own(to_centers: Tensor, labels: Tensor) -> Tensor:
    """Return the entries [B, N] of [B, k, N] that belong to each token's own cluster."""
    return to_centers.gather(1, labels.unsqueeze(1)).squeeze(1)


def centers(labels: Tensor, to_centers: Tensor, weight: Tensor, huber_tau: float | None) -> Tensor:
    """Return the shares [B, k, N] in the next centers: weighted means, or a step towards the Huber M-estimates."""
    if huber_tau is not None:
        weight = weight * (huber_tau / gather_own(to_centers, labels).sqrt()).clamp(max=1)
    return mean_shares(labels, weight, to_centers.shape[1])


def refine(
    distances: Tensor, scale: Tensor, weight: Tensor, seeds: Tensor, *, rounds: int, tolerance: float, tau: float | None
) -> tuple[Tensor, Tensor]:
    """Run Lloyd rounds from `seeds`; return labels [B, N] and the squared distances [B, k, N] to the centers. An image
    whose labels changed for fewer than tolerance * N tokens is done. An empty cluster stays empty."""
    slack = (ROUNDING * scale).unsqueeze(1)
    few = math.ceil(tolerance * distances.shape[-1])
    to_centers = gather_tokens(distances, seeds)
    labels = nearest(to_centers, slack)
    done = labels.new_zeros(labels.shape[0], 1, dtype=torch.bool)
    for _ in range(rounds - 1):
        to_centers = to_means(distances, centers(labels, to_centers, weight, tau))
        update = nearest(to_centers, slack)
        changed = (update != labels).sum(-1, keepdim=True)
        labels = torch.where(done, labels, update)
        done = done | (changed < few)
    return labels, to_centers


def representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the best-scored member [B, k] of each cluster, and labels with clusters numbered in their raster order."""
    best = torch.where(membership(labels, k), score.unsqueeze(1), -1).max(-1)
    return renumber(labels, best.indices, best.values >= 0, score)


def medoids(labels: Tensor, distances: Tensor, scale: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return, as `representatives`, the member nearest to the weighted mean of its cluster: the first of those that
    rounding (see `scale` [B, N]) cannot tell from the nearest. Slots of empty clusters go by weight."""
    members = membership(labels, k)
    to_centers = to_means(distances, mean_shares(labels, weight, k)).masked_fill(~members, torch.inf)
    limit = to_centers.amin(-1, keepdim=True) + (ROUNDING * scale).unsqueeze(1)
    n = labels.shape[-1]
    first = torch.where(members & (to_centers <= limit), torch.arange(n, device=labels.device), n).amin(-1)
    return renumber(labels, first.clamp(max=n - 1), first < n, weight)


def renumber(labels: Tensor, kept: Tensor, alive: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the token [B, k] of each cluster in raster order; return it and the labels in that order of clusters. A
    cluster that is not `alive` [B, k] has no members: the best-scored token not kept yet becomes its only one."""
    kept = fill_invalid(kept, alive, score)
    index = torch.arange(kept.shape[-1], device=labels.device)
    labels = labels.scatter(-1, kept, torch.where(alive, labels.gather(-1, kept), index))
    kept, order = kept.sort(-1)
    return kept, order.argsort(-1).gather(-1, labels)


def shrink_factors(residuals: Tensor, kept: Tensor, labels: Tensor, sizes: Tensor, clip: Clip) -> Tensor:
    """Return how much of each kept token stays [B, k]: alpha = delta^2 / (r^2 + delta^2), within `clip`. `residuals`
    [B, N] are the distances r of all tokens to their centers, delta is their median over a cluster."""
    by_value = residuals.argsort(-1)
    key = labels.gather(-1, by_value)
    if exporting():  # no two keys are equal then, so that a runtime whose sort is not stable gets the same order
        key = key * residuals.shape[-1] + torch.arange(residuals.shape[-1], device=residuals.device)
    ordered = residuals.gather(-1, by_value.gather(-1, key.argsort(dim=-1, stable=True)))
    starts = sizes.cumsum(-1) - sizes
    low, high = (ordered.gather(-1, starts + middle) for middle in ((sizes - 1) // 2, sizes // 2))
    noise = ((low + high) / 2).square()
    total = residuals.gather(-1, kept).square() + noise
    alpha = torch.where(total > 0, noise / total, 1).clamp(*clip)
    return torch.where(sizes == 1, 1, alpha)


def weighted_means(
    features: Tensor, kept: Tensor, labels: Tensor, weight: Tensor, distances: Tensor, scale: Tensor, clip: Clip | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted means [B, k, D] of the clusters, alpha [B, k], and each token's share [B, N] in its mean.

    Alpha is how much of the tokens `kept` [B, k] stays when they move towards the means (RRS): all without `clip`.
    """
    with torch.no_grad():
        sizes = cluster_sizes(labels, kept.shape[-1])
        shares = mean_shares(labels, weight, kept.shape[-1])
        if clip is None:
            alpha = torch.ones_like(kept, dtype=features.dtype)
        else:
            residuals = gather_own(to_means(distances, shares), labels)
            residuals = residuals.masked_fill_(residuals <= ROUNDING * scale, 0).sqrt_()
            alpha = shrink_factors(residuals, kept, labels, sizes, clip)
        share = gather_own(shares, labels)
    return weighted_sums(features, labels, share, sizes), alpha, share
