"""FastV: the most attended tokens, from one layer of the language model on."""

from dataclasses import dataclass

from clustrs.pruners.inside import OneLayerPruner
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class FastV(OneLayerPruner):
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
