"""DART: pivots and the tokens least like them, from one layer of the language model on."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import stable_topk
from clustrs.pruners.base import accepts
from clustrs.pruners.inside import LayerState, OneLayerPruner
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class DART(OneLayerPruner):
    """Keep pivots, and for each pivot the visual tokens that are least like it (Duplication-Aware Reduction of Tokens).

    Pivots are the tokens of the image and of the text after it whose keys have the largest L1 norm in the layer before
    `layer`. Each pivot in turn takes an equal part of the budget.

    Args:
        keep: Budget for each image, a count (int) or a fraction (float).
        layer: Index of the first layer that reads the shorter prompt.
        image_pivots: Pivots in the image; they are kept.
        text_pivots: Pivots in the text after it.

    Examples:
        >>> from clustrs import DART
        >>> DART(keep=0.25).schedule(n=576, layers=28)
        {2: 144}
    """

    name = "dart"
    paper = "https://arxiv.org/abs/2502.11494"
    reads_hidden = True

    image_pivots: int = field(default=4, metadata=accepts(validation.integer, 1))
    text_pivots: int = field(default=4, metadata=accepts(validation.integer, 0))

    def choose(self, state: LayerState, k: int) -> Tensor:
        assert state.hidden is not None
        norms = state.keys.float().abs().sum((0, 2))
        own = stable_topk(norms[state.image][None], min(self.image_pivots, k))[0]
        text = stable_topk(norms[state.text][None], self.text_pivots)[0]
        pivots = torch.cat([state.image[own], state.text[text]])
        hidden = torch.nn.functional.normalize(state.hidden.double(), dim=-1)
        likeness = hidden[pivots] @ hidden[state.image].mT
        taken = torch.zeros_like(state.image, dtype=torch.bool)
        taken[own] = True
        found, share = [own], -(-(k - len(own)) // len(pivots))
        for row in likeness:
            least = stable_topk(-row.masked_fill(taken, torch.inf)[None], share)[0]
            least = least[: int((~taken).sum())]
            taken[least] = True
            found.append(least)
        return torch.cat(found)[:k]
