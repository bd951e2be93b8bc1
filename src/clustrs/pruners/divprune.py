"""DivPrune: the most diverse tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.geometry import cosines
from clustrs.ops.maxmin import max_min
from clustrs.pruners.base import Pruner, single
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates


@register
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Greedily keep the token whose largest cosine to those kept already is smallest."""

    name = "divprune"
    paper = "https://arxiv.org/abs/2503.02175"

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        return max_min(cosines(single(tokens)), k)
