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

from clustrs.ops.distances import can_read_without_sync, edges, exporting, gather_tokens, gram, map_images, upcast_half

HIGH_BITS, LOW_BITS = 26, 20
LARGEST_EXPONENT = 900  # rows whose norm lies beyond 2^±900 are out of range: none that `select` accepts
SMALLEST = 2.0**-400  # rows of float64 numbers below this are multiplied by a power of two before they are squared
NOT_A_NUMBER = 2.0  # stands for a cosine that is NaN: more than any other, so that its tokens come last
LARGEST_SIMILARITY = 2.0**127  # stands for an infinite one: less than that to itself, and every exporter can write it
CHUNK = 512  # features that are added up in float32 at once: the fewer, the smaller the error
NEAR = 1e-11  # cosines in float64 differ by less from the exact ones
EAGER = 48  # candidates whose coverage is computed anew at once
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


def unit_rows(rows: Tensor) -> Tensor:
    """Return the rows of [..., D] with norm 1, in float64; zeros stay zeros."""
    rows = raise_tiny(upcast_half(rows)).to(torch.float64, copy=True)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows.div_(torch.where(norms > 0, norms, 1))


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
    norms = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float64)

    def in_double(left: Tensor, right: Tensor) -> Tensor:
        return vecdot(tokens[left].double(), tokens[right].double()) / (norms[left] * norms[right])

    def exact(left: Tensor, right: Tensor) -> Tensor:
        return paired_cosines(tokens[left], tokens[right])

    ways = (in_double, exact) if norms.amin().item() > SMALLEST else (exact,)
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
                for compare in ways:
                    alike = compare(likely[candidate], others[other])
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


def nearest_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Return for each row of [B, M, D] which row of [B, N, D] has the largest exact cosine, the first of equal ones:
    [B, M]. Where values can be read, exact cosines are computed only of pairs that rough ones cannot tell apart."""
    if right[0].numel() <= SMALL or not can_read_without_sync(left):
        return cosines(left, right).argmax(-1)

    def nearest(one: Tensor, other: Tensor) -> Tensor:
        (a, b), parts = map(_unit_rows, (one, other)), 0
        total = a.new_zeros(len(one), len(other))
        for part, own in zip(a.split(CHUNK, -1), b.split(CHUNK, -1), strict=True):
            total.addmm_(part, own.T)
            parts += 1
        slack = 2 * _rounding(parts)
        best = total.amax(-1, keepdim=True)
        close = total >= best - slack
        index = close.byte().argmax(-1)
        unsure = (close.sum(-1) != 1).nonzero()[:, 0]  # also where there is NaN
        if not len(unsure):
            return index
        row, column = close[unsure].nonzero().unbind(-1)
        if len(row) > 2 * len(one):
            return cosines(one[None], other[None])[0].argmax(-1)
        exact = paired_cosines(one[unsure[row]], other[column])
        largest = exact.new_full((len(unsure),), -torch.inf).scatter_reduce_(0, row, exact, "amax")
        column = torch.where(exact == largest[row], column, len(other) - 1)
        first = torch.full_like(unsure, len(other) - 1).scatter_reduce_(0, row, column, "amin")
        return index.index_copy(0, unsure, first)

    return map_images(nearest, left, right)


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

    Gains only shrink, so an old gain is a bound: new ones are computed where the bound comes near the best."""
    alike, n = gram(unit_rows(features)), len(features)
    covered, chosen = torch.zeros_like(alike[0]), torch.empty(k, dtype=torch.long)
    gain, slack = torch.full_like(weight, n), NEAR * n
    for step in range(k):
        fresh, some = torch.zeros(n, dtype=torch.bool), min(n, EAGER) if step > 1 else n
        while True:
            ahead = (gain * weight).topk(some).indices
            gain[ahead] = (alike[ahead] - covered).clamp_(min=0).sum(-1)
            gain[chosen[:step]] = -n
            fresh[ahead] = True
            best = (gain * weight).argmax()
            rivals = ((gain + slack) * weight >= (gain[best] - slack) * weight[best]).nonzero()[:, 0]
            if fresh[rivals].all():
                break
            some = min(n, 4 * some)
        if len(rivals) != 1:  # a near-tie, or NaN
            return chosen[:step]
        chosen[step] = best
        covered = torch.maximum(covered, alike[best])
    return chosen


def rough_cosines(tokens: Tensor) -> tuple[Tensor, float]:
    """Return cosines [N, N] in float32, and how far they may be from the true ones."""
    total, *others = (gram(part.contiguous()) for part in _unit_rows(tokens).split(CHUNK, -1))
    for part in others:
        total.add_(part)
    return total, _rounding(1 + len(others))


def _rounding(chunks: int) -> float:
    """A float32 sum of m products is off by m 2^-24 of the sum of their magnitudes at most, which is 1 here; adding the
    chunks up and normalizing the tokens costs a few roundings more."""
    return (CHUNK + chunks + 16) * 2.0**-24


def _unit_rows(tokens: Tensor) -> Tensor:
    """Return rows [N, D] of length 1 in float32; a row of zeros stays."""
    features = raise_tiny(upcast_half(tokens))
    norms = torch.linalg.vector_norm(features, dim=-1, keepdim=True, dtype=torch.float64)
    if features.dtype == torch.float32 and norms.amin().item() < torch.finfo(torch.float32).tiny:
        features = features.double()  # as a float32, a norm that small would be a denormal number
    return (features / torch.where(norms > 0, norms, 1).to(features.dtype)).float()


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
