"""Thinning a list of tokens by likeness, as VisPruner does it."""

import torch
from torch import Tensor

from clustrs.ops.indexing import gather_tokens
from clustrs.ops.precision import exporting, values_are_free

AT_ONCE = 8
"""Tokens that one round drops at most."""
WINDOW = 48
"""Nearest neighbours that are remembered of each token."""
DIRECT = 1024
"""Up to this many tokens each round looks at all cosines; beyond, remembering neighbours is quicker on a CPU."""


def thin(similarity: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Drop tokens from the lists [B, R] until k remain, given the similarities [B, N, N] of all N tokens.

    A round splits a list into even and odd positions, scores each even token by its largest similarity to an odd one
    and drops the most similar even ones, at most 8; the list continues with the other even ones, by descending score,
    and then the odd ones.
    """
    if tokens.shape[1] > DIRECT and values_are_free(similarity):
        pairs = zip(similarity.unbind(0), tokens.unbind(0), strict=True)
        return torch.stack([_thin_by_neighbours(matrix, image, k) for matrix, image in pairs])
    while tokens.shape[1] > k:
        even, odd = tokens[:, ::2], tokens[:, 1::2]
        tokens = _next_list(even, odd, _largest(similarity, even, odd), k)
    return tokens


def _largest(similarity: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """The largest similarity [B, E] of each even token [B, E] to an odd one [B, O]; image by image is quickest."""
    if exporting():
        rows = gather_tokens(similarity, even)
        return rows.gather(-1, odd[:, None].expand(-1, even.shape[1], -1)).amax(-1)
    images = zip(similarity.unbind(0), even.unbind(0), odd.unbind(0), strict=True)
    return torch.stack([matrix.index_select(0, e).index_select(1, o).amax(-1) for matrix, e, o in images])


def _next_list(even: Tensor, odd: Tensor, score: Tensor, k: int) -> Tensor:
    """The list after a round: even tokens [..., E] by descending score without the first ones, then the odd ones."""
    surplus = even.shape[-1] + odd.shape[-1] - k
    order = even.gather(-1, score.sort(dim=-1, descending=True, stable=True).indices)
    return torch.cat([order[..., min(AT_ONCE, surplus, even.shape[-1]) :], odd], -1)


def _thin_by_neighbours(similarity: Tensor, tokens: Tensor, k: int) -> Tensor:
    """`thin` for one image: the best odd token is the first one in a token's list of nearest neighbours.

    The lists are renewed when half of the tokens are gone. A token without an odd neighbour in its list is compared
    with all of them.
    """
    while (count := len(tokens)) > k:
        local = similarity.index_select(0, tokens).index_select(1, tokens)
        local.fill_diagonal_(-torch.inf)
        values, neighbours = local.topk(min(WINDOW, count))
        left = torch.arange(count)
        while len(left) > max(k, count // 2):
            even, odd = left[::2], left[1::2]
            hits = torch.zeros(count, dtype=torch.bool).index_fill_(0, odd, True)[neighbours[even]]
            score = values[even].gather(-1, hits.byte().argmax(-1, keepdim=True))[:, 0]
            missed = (~hits.any(-1)).nonzero()[:, 0]
            if len(missed):
                score[missed] = local.index_select(0, even[missed]).index_select(1, odd).amax(-1)
            left = _next_list(even, odd, score, k)
        tokens = tokens[left]
    return tokens
