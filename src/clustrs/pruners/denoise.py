"""Denoise: residual shrinkage (RRS) around any method that keeps tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.dispatch import PLAIN, steps
from clustrs.ops.distances import ROUNDING, tiny_images
from clustrs.ops.indexing import can_read_without_sync, gather_tokens, upcast_half
from clustrs.ops.kmeans import nearest
from clustrs.pruners.base import Pruner
from clustrs.pruners.clustrs import select_rescaled, token_weights
from clustrs.pruners.inputs import PrunerInputs, Selection
from clustrs.pruners.registry import from_dict, parse_method, register


@register
@dataclass(frozen=True)
class Denoise(Pruner):
    """Keep what another method keeps, and pull each kept token towards the center of its cluster.

    Residual shrinkage (RRS) of ClustRS around any method that drops tokens: alpha v + (1 - alpha) c. The clusters are
    those of the inner method; where it has none, each token belongs to the nearest kept one.

    Args:
        inner: The method that chooses, its name, or what its `to_dict` returned.
        keep: Budget, if not the one that `inner` has.
        clip: Bounds of the shrink factor alpha.
        salience: As in ClustRS; None means as `inner` has it. The power of the attention is that of `inner`, too.

    Raises:
        ValueError: `inner` merges tokens, or a parameter has a bad value.

    Examples:
        >>> import torch
        >>> from clustrs import Denoise, DivPrune
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
    clip: tuple[float, float] = (0.10, 0.95)
    salience: bool | None = None

    def __post_init__(self) -> None:
        inner = resolve_inner(self.inner, self.keep)
        if inner.merges:
            raise ValueError(
                f"inner must be a method that only drops tokens, got {inner.name!r}, which merges tokens "
                "(shrinkage moves tokens that were kept)"
            )
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "keep", inner.keep)
        for attribute in ("exportable", "servable"):  # what the inner method cannot do, neither can this one
            object.__setattr__(self, attribute, getattr(type(self), attribute) and getattr(inner, attribute))
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
        implementation = steps(tokens)
        with torch.no_grad():
            distances, scale = implementation.squared_distances(upcast_half(tokens))
        if rescale and implementation is PLAIN and can_read_without_sync(scale) and (tiny := tiny_images(scale)):

            def shrink(image: int, scaled: Tensor, exponent: int) -> Selection:
                own = chosen.map(lambda part: part[image : image + 1])
                return self._shrink(scaled, own, weight[image : image + 1], rescale=False)

            return select_rescaled(tokens, tiny, shrink)
        with torch.no_grad():
            labels = chosen.labels
            if labels is None:
                labels = nearest_kept(distances, scale, chosen.indices)
        kept, centroids, alpha, shares = implementation.shrink_to_means(
            tokens, chosen.indices, labels, weight, distances, scale, self.clip
        )
        return Selection(kept, chosen.indices, labels, centroids, alpha, shares=shares)


def resolve_inner(inner: Any, keep: int | float | None) -> Pruner:
    """Return the inner method, from itself, its name, or a dict; with the budget `keep` if there is one."""
    if isinstance(inner, Pruner):
        return inner if keep is None else replace(inner, keep=keep)
    described = parse_method(inner) if isinstance(inner, str) else inner
    if not isinstance(described, Mapping):
        raise ValueError(f"inner must be a method, its name, or a dict with its name and parameters, got {inner!r}")
    return from_dict({**described, **({} if keep is None else {"keep": keep})})


def nearest_kept(distances: Tensor, scale: Tensor, indices: Tensor) -> Tensor:
    """Return the nearest kept token [B, N] of each token, the first of equally near ones; a kept token is its own."""
    labels = nearest(gather_tokens(distances, indices), (ROUNDING * scale)[:, None])
    own = torch.arange(indices.shape[-1], device=indices.device).expand_as(indices)
    return labels.scatter(-1, indices, own)
