"""FasterVLM: the most attended tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.distances import top_set
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class FasterVLM(Pruner):
    """Keep the k tokens with the largest attention: FasterVLM (https://arxiv.org/abs/2412.01818).

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> FasterVLM(keep=2).select(torch.rand(4, 8), torch.tensor([0.1, 0.4, 0.2, 0.3])).indices
        tensor([1, 3])
    """

    name = "fastervlm"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("scores",)
    exportable = True

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        return top_set(inputs["scores"], k)
