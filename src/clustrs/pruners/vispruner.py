"""VisPruner: half the tokens by attention, half by dissimilarity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.cosines import cosines
from clustrs.ops.indexing import stable_topk
from clustrs.ops.thinning import thin
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import PrunerInputs


@register
@dataclass(frozen=True)
class VisPruner(Pruner):
    """Keep the most attended tokens, and of the others those that resemble each other least.

    important: share of the budget that goes by attention.
    """

    name = "vispruner"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("attention", "hidden")

    important: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.number("important", self.important, 0, 1)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        assert inputs.scores is not None
        assert inputs.patch_hidden is not None
        rank = stable_topk(inputs.scores, inputs.tokens.shape[1])
        important = int(k * self.important)
        if important == k:
            return rank[:, :k]
        diverse = thin(cosines(inputs.patch_hidden), rank[:, important:], k - important)
        return torch.cat([rank[:, :important], diverse], -1)
