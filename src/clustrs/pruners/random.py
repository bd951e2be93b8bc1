"""Random: a floor that every method must beat."""

from dataclasses import dataclass

from torch import Tensor

from clustrs import validation
from clustrs.ops.noise import uniform
from clustrs.ops.picking import top
from clustrs.pruners.base import Pruner, single
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates


@register
@dataclass(frozen=True)
class Random(Pruner):
    """Keep k tokens drawn uniformly without replacement: the same places in every image, for one seed."""

    name = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("seed", self.seed, 0)

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        draws = uniform(self.seed, 1, tokens.shape[1], like=single(tokens))
        return top(draws, k).repeat(len(tokens), 1)
