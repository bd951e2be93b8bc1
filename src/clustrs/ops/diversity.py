"""Exact cosines, and the choices that are made by them: max-min diversity (DivPrune) and thinning (VisPruner).

A near-tie of cosines decides which token survives. Here they are the same to the last bit for every batch, thread
count, memory layout, compiler and device, because they come from integers: each row is scaled by a power of two and
split into a `high` part of 26 bits and a `low` part of 20 more. By Cauchy and Schwarz every sum of products of these
stays below 2^53, so float64 adds them without any rounding, in any order. What is left out (the product of two low
parts, and bits below the 46th) is below float64's own rounding for float32 input of usual range.
"""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from clustrs.ops.distances import can_read_without_sync, edges, exporting, gather_tokens, gram, map_images, upcast_half

HIGH_BITS, LOW_BITS = 26, 20
LARGEST_EXPONENT = 900  # rows whose norm lies beyond 2^±900 are out of range: none that `select` accepts
SMALLEST = 2.0**-400  # rows of float64 numbers below this are multiplied by a power of two before they are squared
NOT_A_NUMBER = 2.0  # stands for a cosine that is NaN: more than any other, so that its tokens come last
LARGEST_SIMILARITY = 2.0**127  # stands for an infinite one: less than that to itself, and every exporter can write it
CHUNK = 512  # features that are added up in float32 at once: the fewer, the smaller the error
SMALL = 128 * 256  # up to this many numbers an image has, exact cosines of everything are quicker
AT_ONCE = 8  # tokens that one round drops at most
WINDOW = 48  # nearest neighbors that are remembered of each token
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
    a, b = fixed_point(left), fixed_point(right)
    return _divide(_inner(a, b, vecdot), _inner(a, a, vecdot) * _inner(b, b, vecdot))


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


def most_diverse(tokens: Tensor, k: int) -> Tensor:
    """Choose k tokens of [B, N, D], each as unlike the chosen ones as possible in cosine: [B, k]. The first is the
    one least similar to its nearest neighbor."""
    if tokens[0].numel() <= SMALL or not can_read_without_sync(tokens):
        return max_min(cosines(tokens), k)
    return map_images(lambda image: _certain_max_min(image, k), tokens)


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Choose by similarities [B, N, N], which are overwritten: [B, k], distinct whatever the numbers are."""
    batch, n, _ = similarity.shape
    offset = torch.arange(batch, device=similarity.device) * n
    itself = torch.eye(n, dtype=torch.bool, device=similarity.device)
    similarity.nan_to_num_(NOT_A_NUMBER, LARGEST_SIMILARITY, -LARGEST_SIMILARITY).masked_fill_(itself, -torch.inf)
    chosen = [similarity.amax(-1).argmin(-1)]
    similarity.masked_fill_(itself, torch.inf)
    rows = similarity.view(-1, n)
    closeness = similarity.new_full((batch, n), -torch.inf)
    for _ in range(k - 1):
        closeness = torch.maximum(closeness, rows.index_select(0, chosen[-1] + offset))
        chosen.append(closeness.argmin(-1))
    return torch.stack(chosen, -1)


def _certain_max_min(tokens: Tensor, k: int) -> Tensor:
    """Choose for one image [N, D] as exact cosines do: by rough ones, whose error is bounded, where they leave one
    candidate, and by the exact cosines in question where they leave several."""
    n = len(tokens)
    rough, error = rough_cosines(tokens)
    pairs_left = 2 * n
    chosen = torch.empty(k, dtype=torch.long)
    rough.fill_diagonal_(-torch.inf)
    closeness = rough.amax(-1)
    for step in range(k):
        likely = (closeness <= closeness.amin() + 2 * error).nonzero()[:, 0]
        if len(likely) != 1:
            others = chosen[:step] if step else torch.arange(n)
            near = rough[likely][:, others]
            candidate, other = (near >= near.amax(-1, keepdim=True) - 2 * error).nonzero().unbind(-1)
            pairs_left -= len(candidate)
            if pairs_left < 0 or not len(likely):  # too many near-ties, or NaN
                return max_min(cosines(tokens[None]), k)[0]
            exact = paired_cosines(tokens[likely[candidate]], tokens[others[other]])
            largest = exact.new_full((len(likely),), -torch.inf).scatter_reduce_(0, candidate, exact, "amax")
            likely = likely[largest.argmin()]
        chosen[step] = likely
        row = rough[chosen[step]]
        closeness = torch.maximum(closeness, row) if step else row.clone()
        closeness[chosen[: step + 1]] = torch.inf
    return chosen


def rough_cosines(tokens: Tensor) -> tuple[Tensor, float]:
    """Return cosines [N, N] in float32, and how far they may be from the true ones.

    A float32 sum of m products is off by m 2^-24 of the sum of their magnitudes at most, which is 1 here; adding the
    chunks up and normalizing the tokens costs a few roundings more.
    """
    features = raise_tiny(upcast_half(tokens))
    norms = torch.linalg.vector_norm(features, dim=-1, keepdim=True, dtype=torch.float64)
    if features.dtype == torch.float32 and norms.amin().item() < torch.finfo(torch.float32).tiny:
        features = features.double()  # as a float32, a norm that small would be a denormal number
    unit = (features / torch.where(norms > 0, norms, 1).to(features.dtype)).float()
    total, *others = (gram(part.contiguous()) for part in unit.split(CHUNK, -1))
    for part in others:
        total.add_(part)
    return total, (min(CHUNK, tokens.shape[1]) + 1 + len(others) + 16) * 2.0**-24


def thin(similarity: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Drop tokens from the lists [B, R] until k remain, given the similarities [B, N, N] of all N tokens.

    A round splits a list into even and odd positions, scores each even token by its largest similarity to an odd one
    and drops the most similar even ones, at most 8; the list continues with the other even ones, by descending score,
    and then the odd ones.
    """
    if tokens.shape[1] > DIRECT and can_read_without_sync(similarity):
        return map_images(lambda matrix, image: _thin_by_neighbors(matrix, image, k), similarity, tokens)

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


def _thin_by_neighbors(similarity: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Do `thin` for one image: the best odd token is the first one in a token's list of nearest neighbors. The lists
    are renewed when half of the tokens are gone; a token without an odd one in its list is compared with all."""
    while (count := len(tokens)) > k:
        local = similarity.index_select(0, tokens).index_select(1, tokens)
        local.fill_diagonal_(-torch.inf)
        values, neighbors = local.topk(min(WINDOW, count))
        left = torch.arange(count)
        while len(left) > max(k, count // 2):
            even, odd = left[::2], left[1::2]
            hits = torch.zeros(count, dtype=torch.bool).index_fill_(0, odd, True)[neighbors[even]]
            score = values[even].gather(-1, hits.byte().argmax(-1, keepdim=True))[:, 0]
            missed = (~hits.any(-1)).nonzero()[:, 0]
            if len(missed):
                score[missed] = local.index_select(0, even[missed]).index_select(1, odd).amax(-1)
            left = _next_list(even, odd, score, k)
        tokens = tokens[left]
    return tokens
