"""Exact cosines, and choices that are made by them: nearest neighbors, and max-min diversity (DivPrune, MMR).

A near-tie of cosines decides which token survives. Here they are the same to the last bit for every batch, thread
count, memory layout, compiler and device, because they come from integers: each row is scaled by a power of two and
split into a `high` part of 26 bits and a `low` part of 20 more. By Cauchy and Schwarz every sum of products of these
stays below 2^53, so float64 adds them without any rounding, in any order. What is left out (the product of two low
parts, and bits below the 46th) is below float64's own rounding for float32 input of usual range.

Rough cosines, whose error is bounded, rule most tokens out; float64 and then exact cosines decide between the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from clustrs.ops.distances import (
    can_read_without_sync,
    edges,
    exporting,
    map_images,
    stable_topk,
    upcast_half,
)

HIGH_BITS, LOW_BITS = 26, 20
LARGEST_EXPONENT = 900  # rows whose norm lies beyond 2^±900 are out of range: none that `select` accepts
SMALLEST = 2.0**-400  # rows of float64 numbers below this are multiplied by a power of two before they are squared
CHUNK = 256  # features that are added up in float32 at once: the fewer, the smaller the error
ROUGH_BLOCK = 96  # rows of a rough product that are computed together
USUAL = 1e15  # rows with norms between 1 / USUAL and this are multiplied as they are
NEAR = 1e-11  # cosines in float64 differ by less from the exact ones
SMALL = 128 * 256  # up to this many numbers an image has, exact cosines of everything are quicker
MANY = 2048  # tokens from which on cosines are computed only of those that may be chosen
STORED = 2**24  # numbers that are held as integers
STRIP = 512  # rows of cosines that are computed at a time then
DIRECT = 1024  # up to this many tokens all cosines are looked at at once
NOT_A_NUMBER = 2.0  # stands for a cosine that is NaN: more than any other, so that its tokens come last
LARGEST_SIMILARITY = 2.0**127  # stands for an infinite one: less than that to itself, and every exporter can write it
LEADERS = 32  # tokens that are compared with newly chosen ones at first; four times as many each time

FixedPoint = tuple[Tensor, Tensor]


def cosines(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return the cosines in float64 between the rows of [B, M, D] and [B, N, D] (by default the same): [B, M, N].
    A row of zeros has cosine 0 with everything."""
    if right is None and not exporting():
        return map_images(_self_cosines, left)

    def cross(one: Tensor, other: Tensor) -> Tensor:
        a, b = fixed_point(one), fixed_point(other)
        return _divide(_inner(a, b), _inner(a, a, vecdot)[..., None] * _inner(b, b, vecdot)[..., None, :])

    return map_images(cross, left, left if right is None else right)


def paired_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Return the cosines [P] of the rows of [P, D] and [P, D] pair by pair: the same numbers as `cosines` has."""
    if len(left) > DIRECT and can_read_without_sync(left):
        return torch.cat([paired_cosines(*pair) for pair in zip(left.split(DIRECT), right.split(DIRECT), strict=True)])
    a, b = fixed_point(left), fixed_point(right)
    return _divide(_inner(a, b, vecdot), _inner(a, a, vecdot) * _inner(b, b, vecdot))


def double_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Return `paired_cosines` up to NEAR, sooner; NaN for a row of zeros."""
    a, b = raise_tiny(left).double(), raise_tiny(right).double()
    return vecdot(a, b) / vecdot(a, a).sqrt_() / vecdot(b, b).sqrt_()


def fixed_point(rows: Tensor) -> FixedPoint:
    """Return integers `high` and `low` (in float64) with rows [N, D] ~ scale * (high + low / 2^20)."""
    rows = raise_tiny(upcast_half(rows))
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
    # From the logarithm, because frexp does not compile everywhere. Where it rounds at a power of two, either is right.
    exponent = torch.where(norms > 0, norms, 1).log2().floor().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) + 1
    shift = HIGH_BITS - exponent
    half = (shift / 2).floor()  # two factors, because one might leave float32
    scaled = (rows * torch.exp2(half.to(rows.dtype))).mul_(torch.exp2((shift - half).to(rows.dtype)))
    high = scaled.round()
    low = scaled.sub_(high).mul_(2.0**LOW_BITS).round_()
    return high.double(), low.double()


def raise_tiny(rows: Tensor) -> Tensor:
    """Multiply float64 rows whose squares would vanish by a power of two; cosines do not depend on it."""
    if rows.dtype != torch.float64 or not can_read_without_sync(rows):
        return rows
    largest = rows.abs().amax(-1, keepdim=True)
    tiny = (largest > 0) & (largest < SMALLEST)
    return torch.where(tiny, rows * 2.0**700, rows) if tiny.any() else rows


def double_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of [..., D] in float64 and the inverse of their norms [...]; 0 for zeros."""
    rows = raise_tiny(rows).double()
    norms = torch.linalg.vector_norm(rows, dim=-1)
    return rows, torch.where(norms > 0, norms.reciprocal(), 0)


def _self_cosines(rows: Tensor) -> Tensor:
    """Return the cosines [N, N] between all rows; only blocks on and above the diagonal are computed."""
    high, low = fixed_point(rows)
    out = high.new_empty(len(high), len(high))
    for start, stop in edges(high):
        strip = _inner((high[start:stop], low[start:stop]), (high[start:], low[start:]))
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    norms = out.diagonal().clone()
    return _divide(out, norms[:, None] * norms)


def _inner(left: FixedPoint, right: FixedPoint, product: Any = lambda a, b: a @ b.mT) -> Tensor:
    """Return inner products of rows in fixed point; the mixed terms add up to the same from either side."""
    mixed = product(left[0], right[1]) + product(left[1], right[0])
    total: Tensor = product(left[0], right[0]).add_(mixed.mul_(2.0**-LOW_BITS))
    return total


def _divide(products: Tensor, squares: Tensor) -> Tensor:
    """Divide by the roots of products of squared norms; the root of a square is exact: a duplicate has cosine 1."""
    norms = squares.sqrt_()
    return products.div_(norms.masked_fill_(norms == 0, 1))


class ExactCosines:
    """Exact cosines between rows of [N, D], computed for those that are asked for. Up to STORED numbers are converted
    once, to 12 bytes each."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.held, squares = rows, rows.numel() <= STORED, []
        if self.held:
            self.high = torch.empty(rows.shape, dtype=torch.float64)
            self.low = torch.empty(rows.shape)  # integers of 20 bits, which float32 holds
        for start in range(0, len(rows), STRIP):
            part = slice(start, start + STRIP)
            own = fixed_point(rows[part])
            squares.append(_inner(own, own, vecdot))
            if self.held:
                self.high[part], self.low[part] = own
        self.squares = torch.cat(squares)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the cosines [M, P] of the rows at indices [M] and [P]."""
        one, out = self._rows(left), torch.empty(len(left), len(right), dtype=torch.float64)
        for start in range(0, len(right), STRIP):
            part = right[start : start + STRIP]
            squares = self.squares[left, None] * self.squares[part]
            out[:, start : start + STRIP] = _divide(_inner(one, self._rows(part)), squares)
        return out

    def _rows(self, indices: Tensor) -> FixedPoint:
        return (self.high[indices], self.low[indices].double()) if self.held else fixed_point(self.rows[indices])


def nearest_cosines(left: Tensor, right: Tensor, count: int = 1, skip: Tensor | None = None) -> Tensor:
    """Return the `count` rows of [B, N, D] with the largest exact cosines to each row of [B, M, D], the first of equal
    ones, never the row `skip` [B, M]: [B, M, count] in any order. Where values can be read, exact cosines are computed
    only of pairs that rough ones cannot tell apart."""

    def best(alike: Tensor, skipped: Tensor | None) -> Tensor:
        alike = alike if skipped is None else alike.scatter(-1, skipped.unsqueeze(-1), -torch.inf)
        return alike.argmax(-1, keepdim=True) if count == 1 else stable_topk(alike, count)

    def nearest(one: Tensor, other: Tensor, skipped: Tensor | None = None) -> Tensor:
        if len(one) * len(other) > STRIP * DIRECT * 8 and len(one) > STRIP:
            parts = (
                one.split(STRIP),
                [other] * -(-len(one) // STRIP),
                *(() if skipped is None else [skipped.split(STRIP)]),
            )
            return torch.cat([nearest(*part) for part in zip(*parts, strict=True)])
        (rows, length), (others, lengths) = rough_rows(one, one.shape[-1]), rough_rows(other)
        total = rough_products(rows, others).div_(lengths.T)
        if skipped is not None:
            total.scatter_(-1, skipped.unsqueeze(-1), -torch.inf)
        values, index = total.max(-1, keepdim=True) if count == 1 else total.topk(count)
        edge = values[:, -1:]
        close = (total - edge).abs_() <= 2.01 * rounding(one.shape[-1]) * length
        unsure = (close.sum(-1) != 1).nonzero()[:, 0]  # also where there is NaN
        if not len(unsure):
            return index
        row, column = close[unsure].nonzero().unbind(-1)
        if len(row) > 2 * len(one):
            return best(torch.cat([cosines(one[None], part[None])[0] for part in other.split(DIRECT)], -1), skipped)
        score = torch.where(total[unsure] > edge[unsure], torch.inf, -torch.inf).double()
        for compare in (double_cosines, paired_cosines):
            score[row, column] = compare(one[unsure[row]], other[column])
            last, next_one = score.topk(count + 1).values[:, -2:].unbind(-1)
            if (last - next_one > NEAR).all():
                break
        return index.index_copy(0, unsure, best(score, None))

    if right.shape[1] <= count or not can_read_without_sync(left):
        return best(cosines(left, right), skip)
    return map_images(nearest, left, right, *(() if skip is None else (skip,)))


def rough_cosines(tokens: Tensor) -> tuple[Tensor, float]:
    """Return cosines [N, N] in float32, and how far they may be from the true ones."""
    rows, norms = rough_rows(tokens)
    return rough_gram(rows, norms), rounding(rows.shape[-1])


def rough_gram(rows: Tensor, norms: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return the inner products [N, N] of rows in float32, over their norms [N, 1]."""
    out = rows.new_empty(len(rows), len(rows))
    for start, stop in edges(rows, ROUGH_BLOCK):
        strip = rough_products(rows[start:stop], rows[start:], chunk).div_(norms[start:stop]).div_(norms[start:].T)
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    return out


def rough_products(left: Tensor, right: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return the inner products [M, N] of rows in float32, added up in chunks: the smaller, the smaller the error."""
    total = left.new_zeros(len(left), len(right))
    for part, other in zip(left.split(chunk, -1), right.split(chunk, -1), strict=True):
        total.addmm_(part, other.T)
    return total


def rounding(width: int) -> float:
    """A float32 sum of m products is off by m 2^-24 of the sum of their magnitudes at most, which is 1 here; adding the
    chunks up costs one rounding each, and both norms cost less than another chunk."""
    return (2 * CHUNK + 2 * width / CHUNK + 20) * 2.0**-24


def rough_rows(tokens: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return rows [N, D] in float32 and their norms [N, 1]; where products of them could leave float32, rows of length
    1 (a row of zeros stays) and ones. Norms that are summed in larger chunks are known less exactly."""
    rows = upcast_half(tokens)
    parts = [torch.linalg.vector_norm(part, dim=-1) for part in rows.split(chunk, -1)]
    norms = torch.linalg.vector_norm(torch.stack(parts, -1), dim=-1, keepdim=True)
    if norms.amin().item() > 1 / USUAL and norms.amax().item() < USUAL:
        return rows.float(), norms.float()
    rows = raise_tiny(rows.double())
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return (rows / torch.where(norms > 0, norms, 1)).float(), torch.ones_like(norms).float()


def most_diverse(tokens: Tensor, k: int, bonus: Tensor | None = None, weight: float = 1.0) -> Tensor:
    """Choose k tokens of [B, N, D] one by one, each with the least `weight` times largest cosine to the chosen ones,
    minus its `bonus` [B, N]: [B, k]. The first has the largest bonus; without one, the smallest cosine to its nearest
    neighbor."""
    if tokens[0].numel() <= SMALL or not can_read_without_sync(tokens):
        return max_min(cosines(tokens), k, bonus, weight)
    choose = _lazy_max_min if tokens.shape[1] >= MANY else _certain_max_min
    if bonus is None:
        return map_images(lambda image: choose(image, k, None, weight), tokens)
    return map_images(lambda image, own: choose(image, k, own, weight), tokens, bonus)


def max_min(similarity: Tensor, k: int, bonus: Tensor | None = None, weight: float = 1.0) -> Tensor:
    """Choose by similarities [B, N, N], which are overwritten: [B, k], distinct whatever the numbers are."""
    batch, n, _ = similarity.shape
    offset = torch.arange(batch, device=similarity.device) * n
    itself = torch.eye(n, dtype=torch.bool, device=similarity.device)
    similarity.nan_to_num_(NOT_A_NUMBER, LARGEST_SIMILARITY, -LARGEST_SIMILARITY).masked_fill_(itself, -torch.inf)
    chosen = [similarity.amax(-1).argmin(-1) if bonus is None else bonus.argmax(-1)]
    if bonus is not None:
        similarity.mul_(weight)
    similarity.masked_fill_(itself, torch.inf)
    rows = similarity.view(-1, n)
    closeness = similarity.new_full((batch, n), -torch.inf)
    for _ in range(k - 1):
        closeness = torch.maximum(closeness, rows.index_select(0, chosen[-1] + offset))
        chosen.append((closeness if bonus is None else closeness - bonus).argmin(-1))
    return torch.stack(chosen, -1)


def _certain_max_min(tokens: Tensor, k: int, bonus: Tensor | None, weight: float) -> Tensor:
    """Choose for one image [N, D] as exact cosines do: by rough ones, whose error is bounded, where they leave one
    candidate, by float64 where they leave several, and by exact cosines where that leaves several, too."""
    n = len(tokens)
    rough, error = rough_cosines(tokens)
    pairs_left = 2 * n
    chosen = torch.empty(k, dtype=torch.long)
    closeness = rough.fill_diagonal_(-torch.inf).amax(-1)
    for step in range(k):
        if step == 0 and bonus is not None:
            pick = bonus.argmax()
        else:
            cost = closeness if bonus is None else closeness * weight - bonus
            least, pick = cost.topk(2, largest=False)
            low, high = least.tolist()
            pick = pick[0]
            if not high - low > 2 * error * weight:
                likely = (cost <= low + 2 * error * weight).nonzero()[:, 0]
                others = chosen[:step] if step else torch.arange(n)
                near = rough[likely][:, others]
                candidate, other = (near >= near.amax(-1, keepdim=True) - 2 * error).nonzero().unbind(-1)
                pairs_left -= len(candidate)
                if pairs_left < 0 or not len(likely):  # too many near-ties, or NaN
                    return max_min(cosines(tokens[None]), k, None if bonus is None else bonus[None], weight)[0]
                pick = _settle(tokens, likely, others, candidate, other, bonus, weight)
        chosen[step] = pick
        row = rough[pick]
        closeness = torch.maximum(closeness, row) if step else row.clone()
        closeness[pick] = torch.inf
    return chosen


def _settle(
    tokens: Tensor,
    likely: Tensor,
    others: Tensor,
    candidate: Tensor,
    other: Tensor,
    bonus: Tensor | None,
    weight: float,
) -> Tensor:
    """Return the one of the `likely` tokens that max-min chooses: by float64, or by exact cosines if that leaves
    several. The pairs `candidate`, `other` (places in `likely` and `others`) have the largest cosine of each."""
    for compare in (double_cosines, paired_cosines):
        alike = compare(tokens[likely[candidate]], tokens[others[other]])
        largest = alike.new_full((len(likely),), -torch.inf).scatter_reduce_(0, candidate, alike, "amax")
        value = largest if bonus is None else largest * weight - bonus[likely]
        pick = likely[value.argmin()]
        if (value <= value.amin() + NEAR).sum() == 1:
            break
    return pick


def _lazy_max_min(tokens: Tensor, k: int, bonus: Tensor | None, weight: float) -> Tensor:
    """Do `_certain_max_min` for many tokens, without their N x N cosines. The largest cosine of a token to the chosen
    ones only grows: tokens are compared with new ones only while they lead by an old value."""
    n, (rows, norms), error = len(tokens), rough_rows(tokens), rounding(tokens.shape[-1])

    def rough(left: Tensor, right: Tensor | slice) -> Tensor:
        return rough_products(rows[left], rows[right]).div_(norms[left]).div_(norms[right].T)

    everything = torch.arange(n)
    closeness, compared = torch.full((n,), -torch.inf), torch.zeros(n, dtype=torch.long)
    chosen, pairs_left = everything[:0], 2 * n
    for step in range(k):
        if step == 0 and bonus is not None:
            likely = bonus.argmax(keepdim=True)
        elif step == 0:
            likely = _least_alike(rough, n, error)
        else:
            count = LEADERS
            while True:
                cost = closeness if bonus is None else closeness * weight - bonus
                low = cost.amin()
                likely = (cost <= low + 2 * error * weight).nonzero()[:, 0]
                stale = likely[compared[likely] < step]
                if not len(stale):
                    break
                if compared[cost.argmin()] < step:
                    stale = cost.topk(min(count, n), largest=False).indices
                    stale = stale[compared[stale] < step]
                stale, count = stale[:STRIP], min(STRIP, 4 * count)
                new = rough(stale, chosen[int(compared[stale].amin()) :]).amax(-1)
                closeness[stale] = torch.maximum(closeness[stale], new)
                compared[stale] = step
        if len(likely) != 1:
            others = chosen if step else everything
            near = rough(likely, others) if len(likely) <= STRIP else None
            if near is not None and not step:
                near[torch.arange(len(likely)), likely] = -torch.inf
            if near is not None:
                candidate, other = (near >= near.amax(-1, keepdim=True) - 2 * error).nonzero().unbind(-1)
                pairs_left -= len(candidate)
            if near is None or pairs_left < 0 or not len(likely):  # too many near-ties, or NaN
                return _exact_max_min(tokens, k, bonus, weight)
            likely = _settle(tokens, likely, others, candidate, other, bonus, weight)[None]
        chosen = torch.cat([chosen, likely])
        closeness[likely] = torch.inf
        compared[likely] = k
    return chosen


def _least_alike(rough: Callable[..., Tensor], n: int, error: float) -> Tensor:
    """Return the tokens whose largest cosine to another one may be the smallest. Tokens are compared with some others
    at a time, and dropped once one is more like them than any is like the best candidate."""
    closeness, bound, left = torch.full((n,), -torch.inf), torch.inf, torch.arange(n)
    for start in range(0, n, STRIP):
        for part in left.split(STRIP):
            alike = rough(part, slice(start, start + STRIP))
            itself = (part >= start) & (part < start + STRIP)
            alike[itself.nonzero()[:, 0], part[itself] - start] = -torch.inf
            closeness[part] = torch.maximum(closeness[part], alike.amax(-1))
        best = left[closeness[left].argmin()][None]
        row = rough(best, slice(None))[0]
        row[best] = -torch.inf
        bound = min(bound, row.amax().item())
        left = left[~(closeness[left] > bound + 2 * error)]
    return left[~(closeness[left] > closeness[left].amin() + 2 * error)]


def _exact_max_min(tokens: Tensor, k: int, bonus: Tensor | None, weight: float) -> Tensor:
    """Do `max_min` for many tokens of one image, some rows of the cosines at a time."""
    exact, everything = ExactCosines(tokens), torch.arange(len(tokens))

    def rows(left: Tensor, itself: float) -> Tensor:
        alike = exact(left, everything).nan_to_num_(NOT_A_NUMBER, LARGEST_SIMILARITY, -LARGEST_SIMILARITY)
        return alike.scatter_(-1, left[:, None], itself)

    if bonus is None:
        pick = torch.cat([rows(part, -torch.inf).amax(-1) for part in everything.split(STRIP)]).argmin()
    else:
        pick = bonus.argmax()
    chosen = [pick]
    closeness = torch.full_like(everything, -torch.inf, dtype=torch.float64)
    for _ in range(k - 1):
        row = rows(chosen[-1][None], torch.inf)[0]
        closeness = torch.maximum(closeness, row if bonus is None else row * weight)
        chosen.append((closeness if bonus is None else closeness - bonus).argmin())
    return torch.stack(chosen)
