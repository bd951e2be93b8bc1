"""Attention-weighted k-means over the N x N squared distances of an image's tokens (C+H).

A centre is a weighted mean of its cluster's tokens, held as the shares w that they have in it. Its squared distance
to token i is sum_m w_m d_im - sum_lm w_l w_m d_lm / 2, so nothing here ever looks at the D features.
"""

import math

import torch
from torch import Tensor

from clustrs.ops.geometry import ROUNDING, map_chunks, map_images
from clustrs.ops.huber import huber
from clustrs.ops.indexing import fill_invalid, gather_tokens
from clustrs.ops.matmul import deterministic_matmul
from clustrs.ops.noise import waiting_times

AT_ONCE = 8
"""From this share of the tokens on, 1 / AT_ONCE, the costs to all tokens are computed at once, not seed by seed."""
LIGHTEST = 1e-36
"""What counts as no weight at all, next to a largest weight of about 1."""
LEAST_SUM = 2.0**-126
"""Below every sum of weights in a cluster, also of the lightest ones that the Huber estimate makes lighter still."""


def unit_scale(weight: Tensor) -> Tensor:
    """Weights [B, N] scaled by a power of two (so exactly) to a largest one near 1, and none below `LIGHTEST`.

    All functions below want such weights: sums neither overflow nor vanish, and tokens without weight count for
    nothing beside others that have some, but equally among themselves.
    """
    # From the logarithm, because frexp does not export. Where it rounds at a power of two, either is right.
    exponent = weight.amax(-1, keepdim=True).log2().floor().clamp(-127, 125)
    return (weight * torch.exp2(-1 - exponent)).clamp_(min=LIGHTEST)


def pow_weights(weight: Tensor, power: float) -> Tensor:
    """Raise weights [B, N] from `unit_scale` to a power above 0, the largest 1; what weighed nothing still does."""
    share = weight / weight.amax(-1, keepdim=True)
    share = share.masked_fill_(weight <= LIGHTEST, 0)
    return map_images(lambda row: map_chunks(lambda part: part.pow(power), row), share).clamp_(min=LIGHTEST)


def seeding(distances: Tensor, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    """k-means++ seeds [B, k]: first the heaviest token, then draws in proportion to weight times cost.

    The cost of a token is h_tau of its distance to the nearest seed, or the squared distance if tau is None.
    A token that repeats a seed, up to rounding (see `scale` [B, N]), costs nothing. Once all that is left weighs or
    costs nothing, no draw is possible, and the heaviest tokens not drawn follow.
    """
    batch, n, _ = distances.shape
    rows = distances.reshape(batch * n, n)
    offset = torch.arange(batch, device=distances.device) * n
    slack = ROUNDING * scale
    zero = slack.new_zeros(())
    at_once = k * AT_ONCE >= n
    if at_once:
        rows = costs(distances, slack.unsqueeze(1), tau, zero).view(batch * n, n)
    seeds = [weight.argmax(-1)]
    cost = None
    for rate in (weight.unsqueeze(1) / waiting_times(seed, k - 1, n, like=distances)).unbind(1):
        row = rows.index_select(0, seeds[-1] + offset if batch > 1 else seeds[-1])
        row = row if at_once else costs(row, slack, tau, zero)
        cost = row if cost is None else torch.minimum(cost, row)
        seeds.append((cost * rate).argmax(-1))
    drawn = torch.stack(seeds, -1)
    between = gather_tokens(distances, drawn).gather(-1, drawn.unsqueeze(1).expand(-1, k, -1))
    repeated = (between <= slack.gather(-1, drawn).unsqueeze(1)).triu(1).any(1)
    return fill_invalid(drawn, ~repeated & (weight.gather(-1, drawn) > LIGHTEST), weight)


def costs(distances: Tensor, slack: Tensor, tau: float | None, zero: Tensor) -> Tensor:
    """What it costs to be that far from a seed: h_tau of the distance, its square if tau is None, 0 up to rounding."""
    far = distances.masked_fill(distances <= slack, 0)
    return far if tau is None else huber(far.sqrt_(), tau, zero)


def membership(labels: Tensor, k: int) -> Tensor:
    """Whether a cluster has a token: labels [B, N] give [B, k, N]."""
    return labels.unsqueeze(1) == torch.arange(k, device=labels.device).unsqueeze(1)


def mean_shares(members: Tensor, weight: Tensor) -> Tensor:
    """The share [B, k, N] of each token in the weighted mean of its cluster; an empty cluster has zeros."""
    part = members * weight.unsqueeze(1)
    return part.div_(part.sum(-1, keepdim=True).clamp_(min=LEAST_SUM))


def to_means(distances: Tensor, shares: Tensor) -> Tensor:
    """Squared distances [B, k, N] from the means of the clusters to all tokens; infinite from an empty cluster."""
    mixed = map_images(deterministic_matmul, shares, distances)
    spread = (shares * mixed).sum(-1, keepdim=True).div_(2)
    empty = shares.amax(-1, keepdim=True) == 0
    return mixed.sub_(spread.masked_fill_(empty, -torch.inf)).clamp_(min=0)


def nearest(to_centres: Tensor, slack: Tensor) -> Tensor:
    """The nearest centre [B, N] of each token: the first of those that differ by `slack` [B, 1, N] at most."""
    k = to_centres.shape[1]
    limit = to_centres.amin(1, keepdim=True) + slack
    index = torch.arange(k, device=slack.device, dtype=slack.dtype).unsqueeze(1)
    return torch.where(to_centres <= limit, index, k - 1).amin(1).long()


def gather_own(to_centres: Tensor, labels: Tensor) -> Tensor:
    """Of [B, k, N], the entries [B, N] of each token's own cluster."""
    return to_centres.gather(1, labels.unsqueeze(1)).squeeze(1)


def centres(labels: Tensor, to_centres: Tensor, weight: Tensor, huber_tau: float | None) -> Tensor:
    """Shares [B, k, N] of the tokens in the next centres: weighted means, or a step towards the Huber M-estimates."""
    if huber_tau is not None:
        weight = weight * (huber_tau / gather_own(to_centres, labels).sqrt()).clamp(max=1)
    return mean_shares(membership(labels, to_centres.shape[1]), weight)


def refine(
    distances: Tensor,
    scale: Tensor,
    weight: Tensor,
    seeds: Tensor,
    *,
    iterations: int,
    tolerance: float,
    huber_tau: float | None,
) -> tuple[Tensor, Tensor]:
    """Lloyd rounds from `seeds`: labels [B, N], and the squared distances [B, k, N] to the centres that gave them.

    An image is done when fewer than tolerance * N of its tokens changed cluster; its labels then stay.
    A cluster that lost all its members has no centre, and gets no tokens back.
    """
    slack = (ROUNDING * scale).unsqueeze(1)
    few = math.ceil(tolerance * distances.shape[-1])
    to_centres = gather_tokens(distances, seeds)
    labels = nearest(to_centres, slack)
    done = labels.new_zeros(labels.shape[0], 1, dtype=torch.bool)
    for _ in range(iterations - 1):
        to_centres = to_means(distances, centres(labels, to_centres, weight, huber_tau))
        update = nearest(to_centres, slack)
        changed = (update != labels).sum(-1, keepdim=True)
        labels = torch.where(done, labels, update)
        done = done | (changed < few)
    return labels, to_centres


def representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best-scored member [B, k] of each cluster, and the labels, clusters numbered in raster order of these.

    An empty cluster gives its slot to the best token not kept yet, which leaves its old cluster for one of its own.
    """
    best = torch.where(membership(labels, k), score.unsqueeze(1), -1).max(-1)
    return renumber(labels, best.indices, best.values >= 0, score)


def medoids(labels: Tensor, distances: Tensor, scale: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `representatives`, but the member nearest to the weighted mean of its cluster: the first of those that
    rounding (see `scale` [B, N]) cannot tell from the nearest. Slots of empty clusters go by weight."""
    members = membership(labels, k)
    to_centres = to_means(distances, mean_shares(members, weight)).masked_fill(~members, torch.inf)
    limit = to_centres.amin(-1, keepdim=True) + (ROUNDING * scale).unsqueeze(1)
    n = labels.shape[-1]
    index = torch.arange(n, device=labels.device)
    first = torch.where(members & (to_centres <= limit), index, n).amin(-1)
    return renumber(labels, first.clamp(max=n - 1), first < n, weight)


def renumber(labels: Tensor, kept: Tensor, alive: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """The token [B, k] of each cluster in raster order, and the labels in that order of the clusters.

    A cluster that is not `alive` [B, k] has no members: the best-scored token not kept yet becomes its only one.
    """
    kept = fill_invalid(kept, alive, score)
    index = torch.arange(kept.shape[-1], device=labels.device)
    labels = labels.scatter(-1, kept, torch.where(alive, labels.gather(-1, kept), index))
    kept, order = kept.sort(-1)
    return kept, order.argsort(-1).gather(-1, labels)
