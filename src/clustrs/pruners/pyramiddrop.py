"""PyramidDrop: the most attended tokens, fewer from layer to layer of the language model."""

from dataclasses import dataclass, field

from clustrs import validation
from clustrs.pruners.base import accepts
from clustrs.pruners.inside import InsidePruner
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class PyramidDrop(InsidePruner):
    """Keep the visual tokens that the last prompt token attends to most, fewer from layer to layer.

    With S layers to prune at, step i of S leaves N (k / N)^(i/S) of N tokens: by default 1/2, 1/4 and 1/8 of them.

    Args:
        keep: Budget for each image after the last step, a count (int) or a fraction (float).
        layers: Layers to prune at, as shares of the depth, ascending.
        compact: Count positions without gaps after each step, as published; else kept tokens keep their own.

    Examples:
        >>> from clustrs import PyramidDrop
        >>> PyramidDrop().schedule(n=576, layers=32)
        {8: 288, 16: 144, 24: 72}
    """

    name = "pyramiddrop"
    paper = "https://arxiv.org/abs/2410.17247"
    own_layer = True

    keep: int | float = 0.125
    layers: tuple[float, ...] = (0.25, 0.5, 0.75)
    compact: bool = field(default=False, metadata=accepts(validation.choice, (True, False)))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.layers
        shares = list(given) if isinstance(given, list | tuple) and all(map(validation.is_number, given)) else [1]
        accepted = len(shares) > 0 and shares == sorted(set(shares)) and shares[0] > 0 and shares[-1] < 1
        validation.check(accepted, "layers", "ascending shares of the depth between 0 and 1", given)
        object.__setattr__(self, "layers", tuple(map(float, shares)))

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        self._check_layer(1, layers)
        k, steps, found = self.count(n), len(self.layers), {}
        for step, share in enumerate(self.layers, 1):  # of steps that fall on one layer the last one counts
            found[max(1, int(share * layers))] = k if step == steps else max(k, round(n * (k / n) ** (step / steps)))
        return found
