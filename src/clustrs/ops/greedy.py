"""Greedy choices by cosines: max-min diversity (DivPrune, MMR) and coverage (SCOPE), as exact cosines decide them.

Rough cosines, whose error is bounded, rule most tokens out; float64 and then exact cosines decide between the others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clustrs.ops.distances import can_read_without_sync, gram, map_images, upcast_half
from clustrs.ops.diversity import (
    MANY,
    NEAR,
    SMALL,
    STRIP,
    USUAL,
    ExactCosines,
    cosines,
    double_cosines,
    double_rows,
    paired_cosines,
    rough_cosines,
    rough_gram,
    rough_products,
    rough_rows,
    rounding,
)

NOT_A_NUMBER = 2.0  # stands for a cosine that is NaN: more than any other, so that its tokens come last
LARGEST_SIMILARITY = 2.0**127  # stands for an infinite one: less than that to itself, and every exporter can write it
FEW = 16  # of more than one in so many tokens, the coverage is computed in float64 from the start
FINE_CHUNK = 64  # features that are added up in float32 at once, where the errors of all cosines add up
LARGE = 2048  # rows that are converted to float64 at a time
LEADERS = 32  # tokens that are compared with newly chosen ones at first; four times as many each time


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


def best_covering(features: Tensor, weight: Tensor, k: int) -> Tensor:
    """Choose k tokens of [B, N, H] one by one, each with the largest `weight` [B, N] times what it adds to coverage:
    sum_i max(0, cos_ij - c_i), c_i the largest cosine to a chosen token: [B, k].

    The cosines are rounded to so many bits that float64 adds N of them without rounding, in any order."""
    batch, n, _ = features.shape
    if can_read_without_sync(features) and batch > 1:
        return torch.cat([best_covering(*image, k) for image in zip(features.split(1), weight.split(1), strict=True)])
    chosen: list[Tensor] = []
    if can_read_without_sync(features) and n >= MANY:
        return _coverage_of_many(features[0], weight[0], k)[None]
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
    """Return the first tokens that `best_covering` chooses of one image [N, H], as long as float64 can tell which: few
    are chosen by rough cosines, and by rows of float64 ones where these leave several candidates.

    A chosen token covers some others better than before: only these change the gains."""
    rows, scale = double_rows(features)
    if k * FEW > len(rows):
        alike, error = gram(rows).mul_(scale).mul_(scale[:, None]), NEAR
    else:
        usual = scale.amin().item() > 1 / USUAL and scale.amax().item() < USUAL
        single = upcast_half(features) if usual else rows * scale[:, None]
        norms = scale.reciprocal() if usual else torch.ones_like(scale)
        alike = rough_gram(single.float(), norms[:, None].float(), FINE_CHUNK)
        error = (FINE_CHUNK + rows.shape[-1] / FINE_CHUNK + 10) * 2.0**-24
    n, weights = len(alike), weight.tolist()
    covered, chosen, gain = torch.zeros_like(alike[0]), list[int](), alike.clamp(min=0).sum(0)
    slack = 2 * n * error + (n + k) * torch.finfo(alike.dtype).eps * gain.amax().item()
    for _ in range(k):
        if chosen:
            row = alike[chosen[-1]]
            better = (row > covered).nonzero()[:, 0]
            old, new = covered[better, None], row[better, None]
            gain -= torch.minimum(alike.index_select(0, better), new).sub_(old).clamp_(min=0).sum(0)
            gain[chosen[-1]] = -n
            covered = torch.maximum(covered, row)
        value = (gain + slack) * weight
        (first, second), (best, _) = (part.tolist() for part in value.topk(2))
        edge = first - 2 * slack * weights[best]
        if not second < edge:  # a near-tie, or NaN
            likely, before = (value >= edge).nonzero()[:, 0], torch.tensor(chosen, dtype=torch.long)
            if error == NEAR or len(likely) < 2:
                break
            active = (alike[likely] > covered - 2.5 * error).any(0).nonzero()[:, 0]
            needed = torch.cat([likely, before])
            fine = (rows[needed] @ rows[active].T).mul_(scale[needed, None]).mul_(scale[active])
            gains = fine[: len(likely)].sub(fine[len(likely) :].amax(0).clamp_(min=0) if chosen else 0).clamp_(min=0)
            exact = (gains.sum(-1) + NEAR * n) * weight[likely]
            (first, second), (best, _) = (part.tolist() for part in exact.topk(2))
            best = int(likely[best])
            if not second < first - 2 * NEAR * n * weights[best]:
                break
        chosen.append(best)
    return torch.tensor(chosen, dtype=torch.long)


def _coverage_of_many(features: Tensor, weight: Tensor, k: int) -> Tensor:
    """Do `best_covering` for one image [N, H] with its cosines in float32. Where they cannot tell which token comes
    next, exact cosines of those that may decide."""
    n, exact = len(features), ExactCosines(features)
    alike, everything = torch.empty(n, n), torch.arange(n)
    for one in range(0, n, LARGE):
        rows, scale = double_rows(features[one : one + LARGE])
        for start in range(0, n, STRIP):
            others, own = double_rows(features[start : start + STRIP])
            alike[start : start + STRIP, one : one + LARGE] = (others @ rows.T).mul_(scale).mul_(own[:, None]).float()
    del rows, others
    gain = torch.stack([strip.clamp(min=0).sum(0, dtype=torch.float64) for strip in alike.split(STRIP)]).sum(0)
    error, unit = n * 2.0**-24, 2.0 ** (52 - n.bit_length())
    covered, left = torch.zeros_like(gain), torch.ones(n, dtype=torch.bool)
    chosen = []
    for _ in range(k):
        surely = ((gain - error) * weight).masked_fill_(~left, -torch.inf).amax()
        likely = (((gain + error) * weight >= surely) & left).nonzero()[:, 0]
        if len(likely) != 1:
            sums = []
            likely = likely if len(likely) else left.nonzero()[:, 0]  # none where there is NaN
            for part in likely.split(STRIP):
                added = exact(part, everything).mul_(unit).round_().sub_(covered).clamp_(min=0)
                sums.append(added.sum(-1) * weight[part])
            likely = likely[torch.cat(sums).argmax()][None]
        chosen.append(likely)
        left[likely] = False
        row = exact(likely, everything)[0].mul_(unit).round_()
        better = (row > covered).nonzero()[:, 0]
        for part in better.split(STRIP):
            old, new = (value[part, None].div(unit).float() for value in (covered, row))
            gain -= torch.minimum(alike[part], new).sub_(old).clamp_(min=0).sum(0, dtype=torch.float64)
        error += len(better) * 2.0**-23
        covered = torch.maximum(covered, row)
    return torch.cat(chosen)
