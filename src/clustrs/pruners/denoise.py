"""Denoise: residual shrinkage (RRS) around any method that keeps tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.dispatch import steps
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.clustrs import Chosen, select_clusters, token_weights
from clustrs.pruners.inputs import PrunerInputs, Selection
from clustrs.pruners.registry import as_method, register


@register
@dataclass(frozen=True)
class Denoise(Pruner):
    """Keep what another method keeps, and pull each kept token towards the center of its cluster.

    Residual shrinkage (RRS) of ClustRS; where the method has no clusters, a token belongs to the nearest kept one.

    Args:
        inner: The method that chooses, its name, or what its `to_dict` returned.
        keep: Budget, if not the one that `inner` has.
        clip: Bounds of the shrink factor alpha.
        salience: As in ClustRS; None means as `inner` has it.

    Raises:
        ValueError: `inner` merges tokens, or a parameter has a bad value.

    Examples:
        >>> Denoise(DivPrune(keep=4)).select(torch.rand(9, 8), torch.rand(9)).alpha.shape
        torch.Size([4])
    """

    name = "denoise"
    paper = "Clustering and Token Denoising for Faster and More Robust VLMs"
    needs = ("scores",)
    clusters = True
    exportable = True

    keep: int | float = field(default=None, kw_only=True)  # type: ignore[assignment]
    inner: Pruner = field(default="fastervlm")  # type: ignore[assignment]
    clip: tuple[float, float] = field(default=(0.10, 0.95), metadata=accepts(validation.interval, 0, 1))
    salience: bool | None = field(default=None, metadata=accepts(validation.choice, (True, False, None)))

    def __post_init__(self) -> None:
        inner = as_method("inner", self.inner, {}, {} if self.keep is None else {"keep": self.keep})
        validation.check(inner.where == "encoder", "inner", "a method that prunes in the encoder", inner.name)
        what = "a method that only drops tokens"
        validation.check(not inner.merges, "inner", what, inner.name, ", which merges tokens")
        self.__dict__.update(inner=inner, keep=inner.keep)
        for name in ("exportable", "servable"):  # what the inner method cannot do, neither can this one
            self.__dict__[name] = getattr(type(self), name) and getattr(inner, name)
        super().__post_init__()

    def requirements(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.needs, *self.inner.requirements())))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        chosen = self.inner._select(inputs, k, check)
        with_salience = getattr(self.inner, "salience", None) if self.salience is None else self.salience
        with torch.no_grad():
            weight = token_weights(inputs, with_salience, getattr(self.inner, "attention_power", 1.0))

        step = steps(inputs.tokens, k)

        def choose(distances: Any, scale: Tensor, weight: Tensor, images: slice, exponent: int) -> Chosen:
            indices = chosen.indices[images]
            if chosen.labels is not None:
                return indices, chosen.labels[images]
            labels, _ = step.refine(distances, scale, weight, indices, rounds=1, tolerance=0, tau=None)
            own = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
            return indices, labels.scatter(-1, indices, own)  # a kept token is its own nearest

        return select_clusters(step, inputs.tokens, weight, self.clip, choose)
