"""VisPruner: half of the tokens by attention, half by dissimilarity."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import stable_topk
from clustrs.ops.diversity import thin
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register


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
