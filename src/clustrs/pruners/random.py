"""Random: a floor that every method must beat."""

from dataclasses import dataclass

from torch import Tensor

from clustrs import validation
from clustrs.ops.indexing import stable_topk
from clustrs.ops.noise import uniform
from clustrs.ops.precision import upcast_half
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import PrunerInputs


@register
@dataclass(frozen=True)
class Random(Pruner):
    """Keep k tokens drawn uniformly without replacement: the same positions in every image, for one seed."""

    name = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("seed", self.seed, 0)

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        batch, n, _ = inputs.tokens.shape
        draws = uniform(self.seed, 1, n, like=upcast_half(inputs.tokens[:, :1]))
        return stable_topk(draws, k).repeat(batch, 1)
