"""DivPrune: the most diverse tokens."""

from dataclasses import dataclass

from torch import Tensor

from clustrs.ops.maxmin import most_diverse
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import PrunerInputs


@register
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Greedily keep the token whose largest cosine to those kept already is smallest."""

    name = "divprune"
    paper = "https://arxiv.org/abs/2503.02175"

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        return most_diverse(inputs.tokens, k)
