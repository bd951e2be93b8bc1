"""VisPruner: half of the tokens by attention, half by dissimilarity."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import can_read_without_sync, exporting, gather_tokens, map_images, stable_topk
from clustrs.ops.diversity import (
    NEAR,
    STRIP,
    ExactCosines,
    cosines,
    double_cosines,
    paired_cosines,
    rough_products,
    rough_rows,
    rounding,
)
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register

AT_ONCE = 8  # tokens that one round drops at most
WINDOW = 48  # nearest neighbors that are remembered of each token
HELD = 8192  # tokens whose cosines are held in float64 at most
DIRECT = 1024  # up to this many tokens each round looks at all cosines; beyond, remembering neighbors is quicker


@register
@dataclass(frozen=True)
class VisPruner(Pruner):
    """Keep the most attended tokens, and of the others those that resemble each other least.

    VisPruner (https://arxiv.org/abs/2412.01818), the successor of FasterVLM.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        important: Share of the budget that goes by attention.

    Examples:
        >>> VisPruner(keep=4).select(torch.rand(9, 8), torch.rand(9), hidden=torch.rand(1 + 9, 4)).indices.shape
        torch.Size([4])
    """

    name = "vispruner"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("scores", "hidden")
    exportable = True

    important: float = field(default=0.5, metadata=accepts(validation.number, 0, 1))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        rank = stable_topk(inputs["scores"], inputs.tokens.shape[1])
        important = int(k * self.important)
        if important == k:
            return rank[:, :k]
        diverse = thin(inputs["patch_hidden"], rank[:, important:], k - important)
        return torch.cat([rank[:, :important], diverse], -1)


def thin(features: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Drop tokens from the lists [B, R] until k remain, by the cosines of their features [B, N, H].

    A round splits a list into even and odd positions, scores each even token by its largest similarity to an odd one
    and drops the most similar even ones, at most 8; the list continues with the other even ones, by descending score,
    and then the odd ones.
    """
    readable = can_read_without_sync(features)
    if tokens.shape[1] > HELD and readable:
        return map_images(lambda rows, image: _certain_thin(rows, image, k), features, tokens)
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


def _in_parts(compare: Callable[[Tensor, Tensor], Tensor], features: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compare the rows of [N, D] at indices [P] and [P], some at a time; a row of zeros is like nothing."""
    pairs = zip(left.split(DIRECT), right.split(DIRECT), strict=True)
    return torch.cat([compare(features[one], features[other]) for one, other in pairs]).nan_to_num_(0)


def _certain_thin(features: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Do `thin` for many tokens of one image: rough cosines, whose error is bounded, find the neighbors of each token,
    float64 decides between those, and exact cosines where that leaves several or a round's scores are too close."""
    (rows, norms), error, width = rough_rows(features), rounding(features.shape[-1]), WINDOW
    while (count := len(tokens)) > k:
        own, length, near = rows[tokens], norms[tokens], []
        for part in torch.arange(count).split(STRIP):
            strip = rough_products(own[part], own).div_(length[part]).div_(length.T)
            near.append(strip.scatter_(-1, part[:, None], -torch.inf).topk(min(width, count)))
        values, neighbors = (torch.cat(parts) for parts in zip(*near, strict=True))
        fine = torch.full_like(values, torch.nan, dtype=torch.float64)
        exact = torch.zeros_like(neighbors, dtype=torch.bool)
        left, searches = torch.arange(count), 2 * count
        while len(left) > max(k, count // 2):
            even, odd = left[::2], left[1::2]
            hits = torch.zeros(count, dtype=torch.bool).index_fill_(0, odd, True)[neighbors[even]]
            rough = values[even].masked_fill_(~hits, -torch.inf)
            edge = rough.amax(-1, keepdim=True) - 2 * error
            likely = rough >= edge
            row, column = (likely & fine[even].isnan()).nonzero().unbind(-1)
            row = even[row]
            fine[row, column] = _in_parts(double_cosines, features, tokens[row], tokens[neighbors[row, column]])
            missed = (~(edge > values[even, -1:])).nonzero()[:, 0] if count > width else even[:0]
            searches -= len(missed)
            if searches < 0:  # too many near-ties
                return _thin_by_neighbors(ExactCosines(features), tokens[left], k)
            score = torch.where(likely, fine[even], -torch.inf).amax(-1)
            if len(missed):
                score[missed] = ExactCosines(features)(tokens[even[missed]], tokens[odd]).amax(-1)
            ordered, order = score.sort()
            close = ordered.diff() <= NEAR
            unsure = order[torch.nn.functional.pad(close, (0, 1)) | torch.nn.functional.pad(close, (1, 0))]
            likely[missed] = False  # their scores are exact
            best = likely[unsure] & (fine[even[unsure]] >= score[unsure, None] - NEAR)
            row, column = (best & ~exact[even[unsure]]).nonzero().unbind(-1)
            row = even[unsure[row]]
            fine[row, column] = _in_parts(paired_cosines, features, tokens[row], tokens[neighbors[row, column]])
            exact[row, column] = True
            settled = torch.where(best, fine[even[unsure]], -torch.inf).amax(-1)
            score[unsure] = torch.where(best.any(-1), settled, score[unsure])
            left = _next_list(even, odd, score, k)
        tokens = tokens[left]
    return tokens


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
