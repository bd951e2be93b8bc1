"""Denoise: residual shrinkage (RRS) around any method that keeps tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops import fused
from clustrs.ops.geometry import ROUNDING, is_tiny
from clustrs.ops.indexing import gather_tokens
from clustrs.ops.kmeans import nearest
from clustrs.ops.precision import upcast_half, values_are_free
from clustrs.pruners.base import Pruner
from clustrs.pruners.clustrs import select_rescaled, token_weights
from clustrs.pruners.registry import from_dict, parse_method, register
from clustrs.pruners.selection import PrunerInputs, Selection


@register
@dataclass(frozen=True)
class Denoise(Pruner):
    """Keep what another method keeps, and pull each kept token towards the centre of its cluster.

    inner: the method that chooses, for example `Denoise(DivPrune(keep=16))`, or its name. Its clusters are used; where
    it has none, each token belongs to the nearest kept one. keep: the budget, if not the one that `inner` has. clip:
    bounds of the shrink factor alpha. salience: as in ClustRS; None means as `inner` has it. The power of the attention
    is that of `inner`, too.
    """

    name = "denoise"
    paper = "Clustering and Token Denoising for Faster and More Robust VLMs"
    needs = ("attention",)
    clusters = True

    keep: int | float = field(default=None, kw_only=True)  # type: ignore[assignment]
    inner: Pruner = field(default="fastervlm")  # type: ignore[assignment]
    clip: tuple[float, float] = (0.10, 0.95)
    salience: bool | None = None

    def __post_init__(self) -> None:
        inner = resolve_inner(self.inner, self.keep)
        if inner.merges:
            raise ValueError(
                f"inner={inner.name!r}: it merges tokens, but shrinkage moves tokens that were kept; give a method "
                "that only drops some"
            )
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "keep", inner.keep)
        object.__setattr__(self, "clip", validation.interval("clip", self.clip, 0, 1))
        validation.choice("salience", self.salience, (True, False, None))
        super().__post_init__()

    def requirements(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.needs, *self.inner.requirements())))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        chosen = self.inner._select(inputs, k, check)
        with_salience = getattr(self.inner, "salience", None) if self.salience is None else self.salience
        with torch.no_grad():
            weight = token_weights(inputs, with_salience, getattr(self.inner, "attention_power", 1.0))
        return self._shrink(inputs.tokens, chosen, weight)

    def _shrink(self, tokens: Tensor, chosen: Selection, weight: Tensor, rescale: bool = True) -> Selection:
        """Shrink the chosen tokens, given the weights [B, N]; `rescale` as in ClustRS."""
        steps = fused.steps(tokens)
        with torch.no_grad():
            distances, scale = steps.squared_distances(upcast_half(tokens))
        if rescale and values_are_free(scale) and (tiny := is_tiny(scale)).any():

            def shrink(image: int, scaled: Tensor, exponent: int) -> Selection:
                own = chosen.map(lambda part: part[image : image + 1])
                return self._shrink(scaled, own, weight[image : image + 1], rescale=False)

            return select_rescaled(tokens, tiny, shrink)
        with torch.no_grad():
            labels = chosen.labels
            if labels is None:
                labels = nearest_kept(distances, scale, chosen.indices)
        kept, centroids, alpha, shares = steps.shrink_to_means(
            tokens, chosen.indices, labels, weight, distances, scale, self.clip
        )
        return Selection(kept, chosen.indices, labels, centroids, alpha, shares=shares)


def resolve_inner(inner: Any, keep: int | float | None) -> Pruner:
    """The inner method, from itself, its name, or what `to_dict` returned; with the budget `keep` if there is one."""
    if isinstance(inner, Pruner):
        return inner if keep is None else replace(inner, keep=keep)
    described = parse_method(inner) if isinstance(inner, str) else inner
    if not isinstance(described, Mapping):
        raise ValueError(f"inner={inner!r}: give a method, its name, or a dict with its name and parameters")
    return from_dict({**described, **({} if keep is None else {"keep": keep})})


def nearest_kept(distances: Tensor, scale: Tensor, indices: Tensor) -> Tensor:
    """The nearest kept token [B, N] of each token, the first of equally near ones; a kept token is its own."""
    labels = nearest(gather_tokens(distances, indices), (ROUNDING * scale)[:, None])
    own = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
    return labels.scatter(-1, indices, own)
