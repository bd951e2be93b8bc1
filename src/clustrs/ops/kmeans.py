"""Attention-weighted k-means over the N x N squared distances of a picture's tokens (C+H).

A centre is a weighted mean of its cluster's tokens, held as the share [B, N] that each token has in it. Its squared
distance to token i is sum_m w_m d_im - sum_lm w_l w_m d_lm / 2, so nothing here ever looks at the D features.
"""

import math

import torch
from torch import Tensor

from clustrs.ops.clusters import Clusters, partition, shares, sums
from clustrs.ops.geometry import ROUNDING, stacked
from clustrs.ops.huber import huber
from clustrs.ops.noise import waiting_times
from clustrs.ops.picking import fill, rows_at, top
from clustrs.ops.products import product


def unit_scale(weight: Tensor) -> Tensor:
    """Weights [B, N] scaled by a power of two (so exactly) to a maximum near 1: neither sums nor products overflow."""
    exponent = weight.amax(-1, keepdim=True).frexp().exponent.clamp(-126, 126)
    return weight * torch.exp2(-exponent.to(weight.dtype))


def seeding(distances: Tensor, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    """k-means++ seeds [B, k]: first the heaviest token, then draws in proportion to weight times cost.

    The cost of a token is h_tau of its distance to the nearest seed, or the squared distance if tau is None.
    Once all that is left weighs nothing or repeats a seed (up to rounding: see `scale` [B, N]), no draw is possible,
    and the heaviest tokens not drawn follow.
    """
    batch, n, _ = distances.shape
    rows = distances.reshape(batch * n, n)
    offset = torch.arange(batch, device=distances.device) * n
    rates = unit_scale(weight)[:, None] / waiting_times(seed, k - 1, n, like=distances)
    seeds = [weight.argmax(-1)]
    zero = torch.zeros_like(weight)
    cost = torch.full_like(weight, torch.inf)
    for rate in rates.unbind(1):
        row = rows.index_select(0, seeds[-1] + offset if batch > 1 else seeds[-1])
        cost = torch.minimum(cost, row if tau is None else huber(row.sqrt_(), tau, zero))
        seeds.append((cost * rate).argmax(-1))
    drawn = torch.stack(seeds, -1)
    between = rows_at(distances, drawn).gather(-1, drawn[:, None].expand(-1, k, -1))
    repeated = (between <= ROUNDING * scale.gather(-1, drawn)[:, None]).triu(1).any(1)
    return fill(drawn, ~repeated & (weight.gather(-1, drawn) > 0), weight)


def to_means(distances: Tensor, clusters: Clusters, share: Tensor) -> Tensor:
    """Squared distances [B, k, N] from the means of the clusters to all tokens; infinite from an empty cluster."""
    batch, k = clusters.sizes.shape
    mixture = share.new_zeros(batch, k, share.shape[-1]).scatter_(1, clusters.labels[:, None], share[:, None])
    mixed = stacked([product(d, w.T).T for d, w in zip(distances.unbind(0), mixture.unbind(0), strict=True)])
    spread = sums(clusters, own(mixed, clusters)[..., None], share / 2)
    spread = spread.masked_fill_(clusters.sizes[..., None] == 0, -torch.inf)
    return mixed.sub_(spread).clamp_(min=0)


def own(to_centres: Tensor, clusters: Clusters) -> Tensor:
    """Of [B, k, N], the entries [B, N] of each token's own cluster."""
    return to_centres.gather(1, clusters.labels[:, None])[:, 0]


def nearest(to_centres: Tensor, scale: Tensor) -> Tensor:
    """The nearest centre [B, N] of each token; differences that rounding could make (see `scale` [B, N]) are ties."""
    limit = to_centres.amin(1, keepdim=True) + ROUNDING * scale[:, None]
    k = to_centres.shape[1]
    number = torch.arange(k, device=scale.device, dtype=scale.dtype)[:, None]
    return torch.where(to_centres <= limit, number, k - 1).amin(1).long()


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
    """Lloyd rounds from `seeds`: labels [B, N], and each token's share [B, N] in the last centre of its cluster.

    A picture is done when fewer than tolerance * N of its tokens changed cluster; its labels then stay.
    Centres are weighted means or, with `huber_tau`, one re-weighting step of the Huber M-estimate a round.
    A cluster that lost all its members has no centre, and gets no tokens back.
    """
    k, n = seeds.shape[-1], distances.shape[-1]
    weight = unit_scale(weight)
    few = math.ceil(tolerance * n)

    def centres(clusters: Clusters, to_centres: Tensor) -> Tensor:
        share = shares(clusters, weight)
        if huber_tau is None:
            return share
        pull = (huber_tau / own(to_centres, clusters).sqrt()).clamp(max=1)
        return shares(clusters, share * pull)

    to_centres = rows_at(distances, seeds)
    clusters = partition(nearest(to_centres, scale), k)
    share = centres(clusters, to_centres)
    done = torch.zeros_like(seeds[:, :1], dtype=torch.bool)
    for _ in range(iterations - 1):
        to_centres = to_means(distances, clusters, share)
        update = nearest(to_centres, scale)
        changed = (update != clusters.labels).sum(-1, keepdim=True)
        clusters = partition(torch.where(done, clusters.labels, update), k)
        done = done | (changed < few)
        share = centres(clusters, to_centres)
    return clusters.labels, share


def representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Clusters]:
    """The best-scored member [B, k] of each cluster, and the clusters, numbered in raster order of these.

    An empty cluster gives its place to the best token not kept yet, which leaves its old cluster for one of its own.
    """
    rank = top(score, score.shape[-1])
    ranked = partition(labels.gather(-1, rank), k)
    alive = ranked.sizes > 0
    first = ranked.order.gather(-1, ranked.starts.clamp(max=labels.shape[-1] - 1))
    kept = fill(rank.gather(-1, first), alive, score)
    number = torch.arange(k, device=labels.device).expand_as(kept)
    labels = labels.scatter(-1, kept, torch.where(alive, labels.gather(-1, kept), number))
    kept, order = kept.sort(-1)
    return kept, partition(order.argsort(-1).gather(-1, labels), k)
