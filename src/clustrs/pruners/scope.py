"""SCOPE: coverage of all tokens times attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import can_read_without_sync, gram, map_images, upcast_half
from clustrs.ops.diversity import MANY, NEAR, SMALL, STRIP, USUAL, ExactCosines, cosines, double_rows, rough_gram
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register

FEW = 16  # of more than one in so many tokens, the coverage is computed in float64 from the start
FINE_CHUNK = 64  # features that are added up in float32 at once, where the errors of all cosines add up
LARGE = 2048  # rows that are converted to float64 at a time


@register
@dataclass(frozen=True)
class SCOPE(Pruner):
    """Greedily keep the token that adds most coverage of all tokens, times its attention.

    SCOPE (https://arxiv.org/abs/2510.24214). Next token: argmax_j a_j^alpha sum_i max(0, S_ij - c_i), S the cosines of
    the hidden states that the projector reads (of the tokens where there are none), c_i the largest S_ij of a kept j.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        alpha: Exponent of the attention; 0 goes by coverage alone.

    Examples:
        >>> import torch
        >>> from clustrs import SCOPE
        >>> tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, 0.0]])
        >>> SCOPE(keep=2).select(tokens, torch.full((4,), 0.25)).indices
        tensor([1, 2])
    """

    name = "scope"
    paper = "https://arxiv.org/abs/2510.24214"
    needs = ("scores",)
    exportable = True

    alpha: float = field(default=1.0, metadata=accepts(validation.number, 0, 16))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        if check and inputs.hidden is not None:
            check_finite("hidden", inputs.hidden)
        return super()._select(inputs, k, check)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        features = inputs.tokens if inputs.patch_hidden is None else inputs.patch_hidden
        weight = inputs["scores"].double()
        if self.alpha != 1:
            weight = (weight / weight.amax(-1, keepdim=True).clamp(min=1e-300)).pow(self.alpha)
        return best_covering(features, weight, k)


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
