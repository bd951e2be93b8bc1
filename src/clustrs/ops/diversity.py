"""Exact cosines, and choices that are made by them: nearest neighbors and thinning (VisPruner).

A near-tie of cosines decides which token survives. Here they are the same to the last bit for every batch, thread
count, memory layout, compiler and device, because they come from integers: each row is scaled by a power of two and
split into a `high` part of 26 bits and a `low` part of 20 more. By Cauchy and Schwarz every sum of products of these
stays below 2^53, so float64 adds them without any rounding, in any order. What is left out (the product of two low
parts, and bits below the 46th) is below float64's own rounding for float32 input of usual range.
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
    gather_tokens,
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
AT_ONCE = 8  # tokens that one round drops at most
WINDOW = 48  # nearest neighbors that are remembered of each token
MANY = 2048  # tokens from which on cosines are computed only of those that may be chosen
HELD = 8192  # tokens whose cosines are held in float64 at most
STORED = 2**24  # numbers that are held as integers
STRIP = 512  # rows of cosines that are computed at a time then
DIRECT = 1024  # up to this many tokens each round looks at all cosines; beyond, remembering neighbors is quicker

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


def thin(features: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Drop tokens from the lists [B, R] until k remain, by the cosines of their features [B, N, H].

    A round splits a list into even and odd positions, scores each even token by its largest similarity to an odd one
    and drops the most similar even ones, at most 8; the list continues with the other even ones, by descending score,
    and then the odd ones.
    """
    readable = can_read_without_sync(features)
    if tokens.shape[1] > HELD and readable:
        return map_images(lambda rows, image: _thin_by_neighbors(ExactCosines(rows), image, k), features, tokens)
    similarity = cosines(features)
    if tokens.shape[1] > DIRECT and readable:

        def by_matrix(matrix: Tensor, image: Tensor) -> Tensor:
            alike = lambda left, right: matrix.index_select(0, left).index_select(1, right)  # noqa: E731
            return _thin_by_neighbors(alike, image, k)

        return map_images(by_matrix, similarity, tokens)

    def largest(matrix: Tensor, even: Tensor, odd: Tensor) -> Tensor:
        if exporting():
            rows = gather_tokens(matrix, even)
            return rows.gather(-1, odd[:, None].expand(-1, even.shape[1], -1)).amax(-1)
        return matrix.index_select(0, even).index_select(1, odd).amax(-1)

    while tokens.shape[1] > k:
        even, odd = tokens[:, ::2], tokens[:, 1::2]
        tokens = _next_list(even, odd, map_images(largest, similarity, even, odd), k)
    return tokens


def _next_list(even: Tensor, odd: Tensor, score: Tensor, k: int) -> Tensor:
    """Return the next list: even tokens [..., E] by descending score without the first ones, then the odd ones."""
    surplus = even.shape[-1] + odd.shape[-1] - k
    order = even.gather(-1, score.sort(dim=-1, descending=True, stable=True).indices)
    return torch.cat([order[..., min(AT_ONCE, surplus, even.shape[-1]) :], odd], -1)


def _thin_by_neighbors(alike: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, k: int) -> Tensor:
    """Do `thin` for one image: the best odd token is the first one in a token's list of nearest neighbors. The lists
    are renewed when half of the tokens are gone; a token without an odd one in its list is compared with all."""
    while (count := len(tokens)) > k:
        near = []
        for part in torch.arange(count).split(STRIP):
            strip = alike(tokens[part], tokens).scatter_(-1, part[:, None], -torch.inf)
            near.append(strip.topk(min(WINDOW, count)))
        values, neighbors = (torch.cat(parts) for parts in zip(*near, strict=True))
        left = torch.arange(count)
        while len(left) > max(k, count // 2):
            even, odd = left[::2], left[1::2]
            hits = torch.zeros(count, dtype=torch.bool).index_fill_(0, odd, True)[neighbors[even]]
            score = values[even].gather(-1, hits.byte().argmax(-1, keepdim=True))[:, 0]
            missed = (~hits.any(-1)).nonzero()[:, 0]
            if len(missed):
                score[missed] = alike(tokens[even[missed]], tokens[odd]).amax(-1)
            left = _next_list(even, odd, score, k)
        tokens = tokens[left]
    return tokens
