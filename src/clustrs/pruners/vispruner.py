"""VisPruner: half the tokens by attention, half by dissimilarity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.geometry import cosines
from clustrs.ops.picking import top
from clustrs.pruners.base import Pruner, single
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates

AT_ONCE = 8


@register
@dataclass(frozen=True)
class VisPruner(Pruner):
    """Keep the most attended tokens, and of the others those that resemble each other least.

    important: share of the budget that goes by attention.
    """

    name = "vispruner"
    paper = "https://arxiv.org/abs/2412.01818"
    needs = ("attention", "hidden")

    important: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.number("important", self.important, 0, 1)

    def _choose(self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int) -> Tensor:
        assert attention is not None
        assert states.hidden is not None
        rank = top(attention, tokens.shape[1])
        important = int(k * self.important)
        if important == k:
            return rank[:, :k]
        alike = cosines(single(states.hidden[:, int(states.cls) :]))
        rest = rank[:, important:]
        while (surplus := rest.shape[1] - (k - important)) > 0:
            even, odd = rest[:, ::2], rest[:, 1::2]
            closest = likeness(alike, even, odd)
            order = even.gather(-1, closest.sort(dim=-1, descending=True, stable=True).indices)
            rest = torch.cat([order[:, min(AT_ONCE, surplus, even.shape[1]) :], odd], -1)
        return torch.cat([rank[:, :important], rest], -1)


def likeness(alike: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """The largest of the cosines [B, N, N] of each even token [B, E] to an odd one [B, O]: [B, E]."""
    images = zip(alike.unbind(0), even.unbind(0), odd.unbind(0), strict=True)
    return torch.stack([cosines.index_select(0, e).index_select(1, o).amax(-1) for cosines, e, o in images])
