"""FastV: attention of the last prompt token in an early layer of the language model."""

from dataclasses import dataclass

from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import stable_topk
from clustrs.pruners.inside import InsidePruner, LayerState
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class FastV(InsidePruner):
    """Keep the visual tokens that the last prompt token attends to most in the layer before `layer`.

    Args:
        keep: Budget for each image, a count (int) or a fraction (float).
        layer: Index of the first layer that reads the shorter prompt.

    Examples:
        >>> from clustrs import FastV
        >>> FastV(keep=64).schedule(n=576, layers=32)
        {2: 64}
    """

    name = "fastv"
    paper = "https://arxiv.org/abs/2403.06764"

    layer: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.integer("layer", self.layer, 1)

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        self._check_layer(self.layer, layers)
        return {self.layer: self.count(n)}

    def choose(self, state: LayerState, k: int) -> Tensor:
        return stable_topk(state.attention[None], k)[0]
