"""FasterVLM: the most attended tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.indexing import stable_topk
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import PrunerInputs


@register
@dataclass(frozen=True)
class FasterVLM(Pruner):
    """Keep the k tokens with the largest attention."""

    name = "fastervlm"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("attention",)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        assert inputs.scores is not None
        return stable_topk(inputs.scores, k)
