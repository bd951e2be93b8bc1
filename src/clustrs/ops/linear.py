"""The clustering of `kmeans` for many tokens: in passes over the tokens, without the N x N distances between them.

Distances are to k centers, held as features, for a block of tokens at a time. A draw of the seeding depends only on the
few tokens whose cost times rate is largest: costs fall as seeds are added, so an old one is an upper bound, and only
tokens that lead by an old cost are compared with the seeds drawn since. Where values cannot be read (compilers,
accelerators) a block is the whole image, and each seed is one pass.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from clustrs.ops.distances import (
    CENTER_SAMPLE,
    ROUNDING,
    can_read_without_sync,
    center,
    deterministic_matmul,
    exponential_noise,
    fill_invalid,
    stable_topk,
    upcast_half,
)
from clustrs.ops.kmeans import (
    LEAST_SUM,
    LIGHTEST,
    Clip,
    cluster_sizes,
    nearest,
    renumber,
    seeding_costs,
    shrink_factors,
    weighted_sums,
)

BLOCK = 512  # tokens whose distances are computed together: centered, they stay in the cache
LEADERS = 32  # tokens that are compared with new seeds at first; four times as many each time until one is sure to lead
HEAVIER = 2.0**60  # factor of weights in sums: neither the lightest times a small token nor the heaviest times a large
# one leaves float32


class Points(NamedTuple):
    """Tokens [B, N, D] with an origin [B, 1, D] in their midst and their squared distances [B, N] to it."""

    tokens: Tensor
    origin: Tensor
    norms: Tensor


def blocks(points: Points, image: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the tokens of an image, seen from its origin, as [M, D] in float32 or float64, with their slice of N. Where
    values can be read, the next ones overwrite them: fresh memory would cost more than the arithmetic."""
    tokens, origin = points.tokens[image], points.origin[image]
    if not can_read_without_sync(tokens):
        yield slice(0, len(tokens)), upcast_half(tokens) - origin
        return
    buffer = origin.new_empty(min(BLOCK, len(tokens)), origin.shape[-1])
    for start in range(0, len(tokens), BLOCK):
        part = slice(start, min(start + BLOCK, len(tokens)))
        yield part, torch.sub(tokens[part], origin, out=buffer[: part.stop - start])


def rows_at(points: Points, image: int, indices: Tensor) -> Tensor:
    """Return tokens [k, D] of an image, seen from its origin."""
    return upcast_half(points.tokens[image].index_select(0, indices)) - points.origin[image]


def to_rows(norms: Tensor, tokens: Tensor, squares: Tensor, rows: Tensor) -> Tensor:
    """Return squared distances [k, M] from rows [k, D] to tokens [M, D], from the `squares` and `norms` of both."""
    return deterministic_matmul(rows, tokens).mul_(-2).add_(squares.unsqueeze(-1)).add_(norms).clamp_(min=0)


def measure(tokens: Tensor) -> tuple[Points, Tensor]:
    """Return what stands for the squared distances between the tokens [B, N, D] of each image, and their means [B, N]:
    |x_i - x_j|^2 is |x_i|^2 + mean |x|^2 - 2 x_i mean(x) in the mean over j."""
    n = tokens.shape[1]
    step = max(1, n // CENTER_SAMPLE)
    origin = center(upcast_half(tokens[:, : CENTER_SAMPLE * step : step]))
    points, norms, scales = Points(tokens, origin, origin), [], []
    for image in range(len(tokens)):
        squares, mean, square = [], torch.zeros_like(origin[0]), origin.new_zeros(())
        for _, rows in blocks(points, image):
            one = torch.zeros(1, len(rows), dtype=torch.long, device=rows.device)
            mean = mean + _weigh(rows, one, torch.full_like(rows[None, :, 0], 1 / n), 1)[0]
            squares.append(rows.square_().sum(-1))
            square = square + squares[-1].sum()
        inner = torch.cat([deterministic_matmul(mean, rows)[0] for _, rows in blocks(points, image)])
        norms.append(torch.cat(squares))
        scales.append(inner.mul_(-2).add_(norms[-1]).add_(square / n).clamp_(min=0))
    return points._replace(norms=torch.stack(norms)), torch.stack(scales)


def seeding(points: Points, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    """Draw the seeds [B, k] as `kmeans.seeding` does."""
    noise = exponential_noise(seed, k - 1, weight.shape[1], like=weight)
    draw = _draw_by_leaders if can_read_without_sync(weight) else _draw_by_passes
    drawn, costs = [], []
    for image, own in enumerate(weight):
        seeds, cost = draw(points, image, ROUNDING * scale[image], own, noise, tau)
        drawn.append(seeds)
        costs.append(cost)
    seeds = torch.stack(drawn)
    return fill_invalid(seeds, (torch.stack(costs) > 0) & (weight.gather(-1, seeds) > LIGHTEST), weight)


def _draw_by_passes(
    points: Points, image: int, slack: Tensor, weight: Tensor, noise: Tensor, tau: float | None
) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens [k] and the cost [k] of each when it was drawn: one pass for each seed."""
    norms, tokens = points.norms[image], upcast_half(points.tokens[image]) - points.origin[image]
    seeds, costs = [weight.argmax(-1, keepdim=True)], [weight.new_ones(1)]
    cost, zero = torch.full_like(weight, torch.inf), slack.new_zeros(())
    for waiting in noise:
        row, square = rows_at(points, image, seeds[-1]), norms.gather(0, seeds[-1])
        far = to_rows(norms, tokens, square, row)[0]
        cost = torch.minimum(cost, seeding_costs(far, slack, tau, zero)).scatter(0, seeds[-1], 0)
        seeds.append((cost * (weight / waiting)).argmax(-1, keepdim=True))
        costs.append(cost.gather(0, seeds[-1]))
    return torch.cat(seeds), torch.cat(costs)


def _draw_by_leaders(
    points: Points, image: int, slack: Tensor, weight: Tensor, noise: Tensor, tau: float | None
) -> tuple[Tensor, Tensor]:
    """Return the same from one pass, and distances of tokens that lead in a draw to the seeds before it."""
    norms, k, n = points.norms[image], len(noise) + 1, len(weight)
    seeds, costs = [int(weight.argmax())], weight.new_ones(k)
    rows, squares = norms.new_empty(k, points.tokens.shape[-1]), norms.new_empty(k)

    def add_seed() -> None:
        newest = torch.tensor(seeds[-1:])
        rows[len(seeds) - 1] = rows_at(points, image, newest)[0]
        squares[len(seeds) - 1] = norms[seeds[-1]]
        cost[seeds[-1]] = 0

    cost, zero = torch.empty_like(weight), slack.new_zeros(())
    add_seed()
    far = [to_rows(norms[part], tokens, squares[:1], rows[:1])[0] for part, tokens in blocks(points, image)]
    cost = seeding_costs(torch.cat(far), slack, tau, zero)
    cost[seeds[0]] = 0
    compared = torch.ones(n, dtype=torch.long)  # seeds that each cost accounts for
    for step in range(1, k):
        rate = weight / noise[step - 1]
        value, count = cost * rate, LEADERS
        while True:
            best = int(value.argmax())
            if int(compared[best]) == step or float(cost[best]) == 0:
                break
            leaders = value.topk(min(count, n)).indices
            leaders = leaders[compared[leaders] < step]
            first, count = int(compared[leaders].amin()), min(BLOCK, 4 * count)
            tokens = rows_at(points, image, leaders)
            near = to_rows(norms[leaders], tokens, squares[first:step], rows[first:step]).amin(0)
            cost[leaders] = torch.minimum(cost[leaders], seeding_costs(near, slack[leaders], tau, zero))
            value[leaders] = cost[leaders] * rate[leaders]
            compared[leaders] = step
        costs[step] = cost[best]
        seeds.append(best)
        add_seed()
    return torch.tensor(seeds), costs


def refine(
    points: Points, scale: Tensor, weight: Tensor, seeds: Tensor, *, rounds: int, tolerance: float, tau: float | None
) -> tuple[Tensor, Tensor]:
    """Run the rounds of `kmeans.refine`; return labels [B, N] and squared distances [B, N] to each token's center."""
    few, k = math.ceil(tolerance * weight.shape[1]), seeds.shape[1]
    results = []
    for image, own in enumerate(weight):
        slack, norms, readable = ROUNDING * scale[image], points.norms[image], can_read_without_sync(own)
        rows = rows_at(points, image, seeds[image])
        squares = norms.gather(0, seeds[image])
        labels, far = seeds.new_zeros(own.shape), own
        done = torch.zeros((), dtype=torch.bool, device=own.device)
        for turn in range(rounds):
            found, nearness = [], []
            sums, totals = torch.zeros_like(rows), torch.zeros_like(rows[:, :1])
            for part, tokens in blocks(points, image):
                to_centers = to_rows(norms[part], tokens, squares, rows)
                label = nearest(to_centers[None], slack[None, None, part])
                found.append(label[0])
                nearness.append(to_centers.gather(0, label)[0])
                if turn < rounds - 1:
                    heavy = own[part] * HEAVIER
                    if tau is not None:
                        heavy = heavy * (tau / nearness[-1].sqrt()).clamp(max=1)
                    summed, total = _weigh(tokens, label, heavy[None], k)
                    sums, totals = sums + summed, totals + total
            update, distance = torch.cat(found), torch.cat(nearness)
            changed = (update != labels).sum()
            labels, far = torch.where(done, labels, update), torch.where(done, far, distance)
            done = done | (changed < few) if turn else done
            if readable and done:
                break
            if turn < rounds - 1:
                rows = sums / totals.clamp(min=LEAST_SUM)
                squares = rows.square().sum(-1).masked_fill(totals[:, 0] == 0, torch.inf)
        results.append((labels, far))
    every_label, every_distance = zip(*results, strict=True)
    return torch.stack(every_label), torch.stack(every_distance)


def _weigh(tokens: Tensor, labels: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the sums [k, D] of weight times token over each cluster, and of the weights [k, 1]."""
    sizes = cluster_sizes(labels, k)
    sums = weighted_sums(tokens[None], labels, weight, sizes)[0]
    return sums, weighted_sums(torch.ones_like(tokens[None, :, :1]), labels, weight, sizes)[0]


def representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do `kmeans.representatives` by sorting."""
    n = labels.shape[-1]
    order = stable_topk(score, n)
    place = torch.arange(n, device=labels.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    first = labels.new_full((len(labels), k), n).scatter_reduce(-1, labels, rank, "amin")
    return renumber(labels, order.gather(-1, first.clamp(max=n - 1)), first < n, score)


def medoids(labels: Tensor, points: Points, scale: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do `kmeans.medoids` with each token's distance to its own center."""
    n = labels.shape[-1]
    far = to_own_means(points, labels, weight, k)
    least = far.new_full((len(far), k), torch.inf).scatter_reduce(-1, labels, far, "amin")
    near = far <= least.gather(-1, labels) + ROUNDING * scale
    index = torch.where(near, torch.arange(n, device=labels.device), n)
    first = labels.new_full((len(labels), k), n).scatter_reduce(-1, labels, index, "amin")
    return renumber(labels, first.clamp(max=n - 1), first < n, weight)


def to_own_means(points: Points, labels: Tensor, weight: Tensor, k: int) -> Tensor:
    """Return each token's squared distance [B, N] to the weighted mean of its cluster."""

    def of_image(image: int) -> Tensor:
        sums, totals = points.origin.new_zeros(k, points.tokens.shape[-1]), points.origin.new_zeros(k, 1)
        for part, rows in blocks(points, image):
            summed, total = _weigh(rows, labels[image, None, part], weight[image, None, part] * HEAVIER, k)
            sums, totals = sums + summed, totals + total
        means, far, own = sums / totals.clamp(min=LEAST_SUM), [], None
        for part, rows in blocks(points, image):
            if can_read_without_sync(rows):
                own = torch.empty_like(rows) if own is None else own[: len(rows)]
                torch.index_select(means, 0, labels[image, part], out=own)
            else:
                own = means.index_select(0, labels[image, part])
            far.append(rows.sub_(own).square_().sum(-1))
        return torch.cat(far)

    return torch.stack([of_image(image) for image in range(len(labels))])


def weighted_means(
    features: Tensor, kept: Tensor, labels: Tensor, weight: Tensor, points: Points, scale: Tensor, clip: Clip | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `kmeans.weighted_means` does."""
    with torch.no_grad():
        sizes = cluster_sizes(labels, kept.shape[-1])
        totals = weighted_sums(torch.ones_like(weight).unsqueeze(-1), labels, weight, sizes).squeeze(-1)
        share = weight / totals.gather(-1, labels)
        alpha = torch.ones_like(kept, dtype=features.dtype)
        if clip is not None:
            residuals = to_own_means(points, labels, weight, kept.shape[-1])
            residuals = residuals.masked_fill_(residuals <= ROUNDING * scale, 0).sqrt_()
            alpha = shrink_factors(residuals, kept, labels, sizes, clip)
    return weighted_sums(features, labels, share, sizes), alpha, share
