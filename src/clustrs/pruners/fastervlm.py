"""FasterVLM: the most attended tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.picking import top
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates


@register
@dataclass(frozen=True)
class FasterVLM(Pruner):
    """Keep the k tokens with the largest attention."""

    name = "fastervlm"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("attention",)

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        assert attention is not None
        return top(attention, k)
