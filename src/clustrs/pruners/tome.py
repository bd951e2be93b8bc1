"""ToMe: similar tokens merged in pairs, round by round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.distances import map_images, stable_topk, upcast_half
from clustrs.ops.diversity import nearest_cosines, paired_cosines
from clustrs.ops.kmeans import cluster_sizes, weighted_sums
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class ToMe(Pruner):
    """Merge the most similar tokens into their means, in rounds of pairs, until k are left.

    Token Merging (https://arxiv.org/abs/2210.09461). Each round links every token at an even position to its most
    similar one at an odd position, by the cosine of the keys, or of the tokens where there are no keys, and merges the
    most similar pairs: at most half of what is left.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> import torch
        >>> from clustrs import ToMe
        >>> selection = ToMe(keep=2).select(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        >>> selection.labels.tolist(), selection.merged.tolist()
        ([0, 0, 1], [True, False])
    """

    name = "tome"
    paper = "https://arxiv.org/abs/2210.09461"
    merges = True

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        if check:
            check_finite("tokens", inputs.tokens)
            if inputs.keys is not None:
                check_finite("keys", inputs.keys)
        batch, n, _ = inputs.tokens.shape
        features = (inputs.tokens if inputs.patch_keys is None else inputs.patch_keys).double()
        first = labels = torch.arange(n, device=features.device).repeat(batch, 1)
        with torch.no_grad():
            while (left := first.shape[1]) > k:
                labels, first = merge_round(features, labels, first, min(left // 2, left - k))
            sizes = cluster_sizes(labels, k)
        tokens = upcast_half(inputs.tokens)
        share = sizes.to(tokens.dtype).reciprocal().gather(-1, labels)
        means = weighted_sums(tokens, labels, share, sizes).to(inputs.tokens.dtype)
        return Selection(means, first, labels, merged=sizes > 1)


def merge_round(features: Tensor, labels: Tensor, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Merge `count` groups at even positions into the most similar ones at odd positions.

    `labels` [B, N] is the group of each token, `first` [B, R] the first token of each group, ascending. Groups are
    compared by the means of their tokens' features: of duplicates that is the same to the last bit.
    """
    left = first.shape[1]
    means = features
    if left < labels.shape[1]:
        sizes = cluster_sizes(labels, left)
        sums = weighted_sums(features, labels, torch.ones_like(labels, dtype=features.dtype), sizes)
        means = sums / sizes.unsqueeze(-1)
    even, odd = means[:, ::2], means[:, 1::2]
    links = nearest_cosines(even, odd)[..., 0]
    source = torch.arange(count, device=labels.device).expand(len(labels), -1)
    if count < even.shape[1]:
        alike = map_images(lambda one, other, link: paired_cosines(one, other.index_select(0, link)), even, odd, links)
        source = stable_topk(alike, count)
    group = torch.arange(left, device=labels.device).repeat(len(labels), 1)
    parent = group.scatter(-1, source * 2, links.gather(-1, source) * 2 + 1)
    first = first.scatter_reduce(-1, parent, first, "amin").masked_fill(parent != group, labels.shape[1])
    first, order = first.sort(-1)
    rank = torch.empty_like(order).scatter_(-1, order, group)
    return rank.gather(-1, parent.gather(-1, labels)), first[:, : left - count]
