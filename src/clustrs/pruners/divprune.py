"""DivPrune: the most diverse tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.diversity import most_diverse
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Greedily keep the token whose largest cosine to those kept already is smallest.

    DivPrune (https://arxiv.org/abs/2503.02175). Next token: argmin_i max_{j kept} cos(v_i, v_j); the first is the one
    least similar to its nearest neighbor.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> import torch
        >>> from clustrs import DivPrune
        >>> tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.9, 0.0]])
        >>> DivPrune(keep=2).select(tokens).indices
        tensor([0, 2])
    """

    name = "divprune"
    paper = "https://arxiv.org/abs/2503.02175"
    exportable = True

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        return most_diverse(inputs.tokens, k)
