"""SCOPE: coverage of all tokens times attention."""

from dataclasses import dataclass, field

from torch import Tensor

from clustrs import validation
from clustrs.ops.greedy import best_covering
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register


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
