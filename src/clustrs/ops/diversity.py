"""Exact cosines, and the choices that are made by them: max-min diversity (DivPrune, MMR), coverage (SCOPE) and
thinning (VisPruner).

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

from clustrs.ops.distances import (
    can_read_without_sync,
    edges,
    exporting,
    gather_tokens,
    gram,
    map_images,
    stable_topk,
    upcast_half,
)

HIGH_BITS, LOW_BITS = 26, 20
LARGEST_EXPONENT = 900  # rows whose norm lies beyond 2^±900 are out of range: none that `select` accepts
SMALLEST = 2.0**-400  # rows of float64 numbers below this are multiplied by a power of two before they are squared
NOT_A_NUMBER = 2.0  # stands for a cosine that is NaN: more than any other, so that its tokens come last
LARGEST_SIMILARITY = 2.0**127  # stands for an infinite one: less than that to itself, and every exporter can write it
CHUNK = 256  # features that are added up in float32 at once: the fewer, the smaller the error
USUAL = 1e15  # rows with norms between 1 / USUAL and this are multiplied as they are
NEAR = 1e-11  # cosines in float64 differ by less from the exact ones
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


def _double_cosines(left: Tensor, right: Tensor) -> Tensor:
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


def most_diverse(tokens: Tensor, k: int, bonus: Tensor | None = None, weight: float = 1.0) -> Tensor:
    """Choose k tokens of [B, N, D] one by one, each with the least `weight` times largest cosine to the chosen ones,
    minus its `bonus` [B, N]: [B, k]. The first has the largest bonus; without one, the smallest cosine to its nearest
    neighbor."""
    if tokens[0].numel() <= SMALL or not can_read_without_sync(tokens):
        return max_min(cosines(tokens), k, bonus, weight)
    if bonus is None:
        return map_images(lambda image: _certain_max_min(image, k, None, weight), tokens)
    return map_images(lambda image, own: _certain_max_min(image, k, own, weight), tokens, bonus)


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
                for compare in (_double_cosines, paired_cosines):
                    alike = compare(tokens[likely[candidate]], tokens[others[other]])
                    largest = alike.new_full((len(likely),), -torch.inf).scatter_reduce_(0, candidate, alike, "amax")
                    value = largest if bonus is None else largest * weight - bonus[likely]
                    pick = likely[value.argmin()]
                    if (value <= value.amin() + NEAR).sum() == 1:
                        break
        chosen[step] = pick
        row = rough[pick]
        closeness = torch.maximum(closeness, row) if step else row.clone()
        closeness[pick] = torch.inf
    return chosen


def nearest_cosines(left: Tensor, right: Tensor, count: int = 1, skip: Tensor | None = None) -> Tensor:
    """Return the `count` rows of [B, N, D] with the largest exact cosines to each row of [B, M, D], the first of equal
    ones, never the row `skip` [B, M]: [B, M, count] in any order. Where values can be read, exact cosines are computed
    only of pairs that rough ones cannot tell apart."""

    def best(alike: Tensor, skipped: Tensor | None) -> Tensor:
        alike = alike if skipped is None else alike.scatter(-1, skipped.unsqueeze(-1), -torch.inf)
        return alike.argmax(-1, keepdim=True) if count == 1 else stable_topk(alike, count)

    def nearest(one: Tensor, other: Tensor, skipped: Tensor | None = None) -> Tensor:
        (rows, length), (others, lengths) = _rough_rows(one, one.shape[-1]), _rough_rows(other)
        total = _rough_products(rows, others).div_(lengths.T)
        if skipped is not None:
            total.scatter_(-1, skipped.unsqueeze(-1), -torch.inf)
        values, index = total.max(-1, keepdim=True) if count == 1 else total.topk(count)
        edge = values[:, -1:]
        close = (total - edge).abs_() <= 2.01 * _rounding(one.shape[-1]) * length
        unsure = (close.sum(-1) != 1).nonzero()[:, 0]  # also where there is NaN
        if not len(unsure):
            return index
        row, column = close[unsure].nonzero().unbind(-1)
        if len(row) > 2 * len(one):
            return best(cosines(one[None], other[None])[0], skipped)
        score = torch.where(total[unsure] > edge[unsure], torch.inf, -torch.inf).double()
        for compare in (_double_cosines, paired_cosines):
            score[row, column] = compare(one[unsure[row]], other[column])
            last, next_one = score.topk(count + 1).values[:, -2:].unbind(-1)
            if (last - next_one > NEAR).all():
                break
        return index.index_copy(0, unsure, best(score, None))

    if right[0].numel() <= SMALL or not can_read_without_sync(left):
        return best(cosines(left, right), skip)
    return map_images(nearest, left, right, *(() if skip is None else (skip,)))


def best_covering(features: Tensor, weight: Tensor, k: int) -> Tensor:
    """Choose k tokens of [B, N, H] one by one, each with the largest `weight` [B, N] times what it adds to coverage:
    sum_i max(0, cos_ij - c_i), c_i the largest cosine to a chosen token: [B, k].

    The cosines are rounded to so many bits that float64 adds N of them without rounding, in any order."""
    batch, n, _ = features.shape
    if can_read_without_sync(features) and batch > 1:
        return torch.cat([best_covering(*image, k) for image in zip(features.split(1), weight.split(1), strict=True)])
    chosen: list[Tensor] = []
    if can_read_without_sync(features) and features.numel() > SMALL:
        chosen = list(_certain_coverage(features[0], weight[0], k)[:, None])
        if len(chosen) == k:
            return torch.stack(chosen, -1)
    similarity = cosines(features).mul_(2.0 ** (52 - n.bit_length())).round_()
    offset = torch.arange(batch, device=features.device) * n
    covered = torch.zeros_like(weight)
    for before in chosen:
        covered = torch.maximum(covered, similarity[0].index_select(0, before))
        weight = weight.scatter(-1, before[:, None], 1)
    for _ in range(k - len(chosen)):
        gain = map_images(lambda matrix, own: (matrix - own.unsqueeze(-2)).clamp_(min=0).sum(-1), similarity, covered)
        if chosen:
            gain = gain.scatter(-1, torch.stack(chosen, -1), -1)
            weight = weight.scatter(-1, chosen[-1][:, None], 1)
        chosen.append((gain * weight).argmax(-1))
        covered = torch.maximum(covered, similarity.view(-1, n).index_select(0, chosen[-1] + offset))
    return torch.stack(chosen, -1)


def _certain_coverage(features: Tensor, weight: Tensor, k: int) -> Tensor:
    """Return the first tokens that `best_covering` chooses of one image [N, H], as long as float64 can tell which.

    A chosen token covers some others better than before: only these change the gains."""
    rows, scale = double_rows(features)
    alike, n, weights = gram(rows).mul_(scale).mul_(scale[:, None]), len(rows), weight.tolist()
    covered, chosen, slack = torch.zeros_like(alike[0]), [], NEAR * n
    gain = alike.clamp(min=0).sum(0)
    for _ in range(k):
        (first, second), (best, _) = (part.tolist() for part in ((gain + slack) * weight).topk(2))
        if not second < first - 2 * slack * weights[best]:  # a near-tie, or NaN
            break
        chosen.append(best)
        better = (alike[best] > covered).nonzero()[:, 0]
        old, new = covered[better, None], alike[best, better, None]
        gain -= torch.minimum(alike.index_select(0, better), new).sub_(old).clamp_(min=0).sum(0)
        gain[best] = -n
        covered = torch.maximum(covered, alike[best])
    return torch.tensor(chosen, dtype=torch.long)


def rough_cosines(tokens: Tensor) -> tuple[Tensor, float]:
    """Return cosines [N, N] in float32, and how far they may be from the true ones."""
    rows, norms = _rough_rows(tokens)
    out = rows.new_empty(len(rows), len(rows))
    for start, stop in edges(rows):
        strip = _rough_products(rows[start:stop], rows[start:]).div_(norms[start:stop]).div_(norms[start:].T)
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    return out, _rounding(rows.shape[-1])


def _rough_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products [M, N] of rows in float32, added up in chunks: the smaller, the smaller the error."""
    total = left.new_zeros(len(left), len(right))
    for part, other in zip(left.split(CHUNK, -1), right.split(CHUNK, -1), strict=True):
        total.addmm_(part, other.T)
    return total


def _rounding(width: int) -> float:
    """A float32 sum of m products is off by m 2^-24 of the sum of their magnitudes at most, which is 1 here; adding the
    chunks up costs one rounding each, and both norms cost less than another chunk."""
    return (2 * CHUNK + 2 * width / CHUNK + 20) * 2.0**-24


def _rough_rows(tokens: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
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
