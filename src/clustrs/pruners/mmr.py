"""MMR (maximal marginal relevance): attention against redundancy."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import stable_topk
from clustrs.ops.diversity import most_diverse
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class MMR(Pruner):
    """Greedily keep the token with the most attention and the least resemblance to those kept already.

    Maximal marginal relevance, the rule of IDPruner (https://arxiv.org/abs/2602.13315) with attention as importance:
    argmax_i lambda s_i - (1 - lambda) max_{j kept} cos(v_i, v_j), s the attention scaled to [0, 1]. The first is the
    most attended token.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        importance: Weight lambda of the attention, from 0 to 1.

    Examples:
        >>> import torch
        >>> from clustrs import MMR
        >>> tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, 0.0]])
        >>> MMR(keep=2).select(tokens, torch.tensor([0.5, 0.4, 0.3, 0.1])).indices
        tensor([0, 2])
    """

    name = "mmr"
    paper = "https://arxiv.org/abs/2602.13315"
    needs = ("scores",)
    exportable = True

    importance: float = field(default=0.5, metadata=accepts(validation.number, 0, 1))

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        if self.importance == 1:
            return stable_topk(inputs["scores"], k)
        scores = inputs["scores"].double()
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        scaled = (scores - low) / torch.where(high > low, high - low, 1)
        return most_diverse(inputs.tokens, k, self.importance * scaled, 1 - self.importance)
