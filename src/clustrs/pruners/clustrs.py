"""ClustRS: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops import kmeans
from clustrs.ops.dispatch import FUSED, LINEAR, PLAIN, Steps, steps
from clustrs.ops.distances import can_read_without_sync, center, gather_tokens, multiply_power, upcast_half
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register

SWITCHES = ("representative", "attention_power")  # parameters beyond the paper, off at their defaults
Chosen = tuple[Tensor, Tensor]
Distance = Literal["huber", "euclidean"]
Centroid = Literal["mean", "huber"]
Kept = Literal["attention", "medoid"]


@register
@dataclass(frozen=True)
class ClustRS(Pruner):
    """Cluster the tokens, keep the most attended of each cluster, and pull it towards the cluster's center.

    The paper's method: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS).

    Args:
        keep: Budget, a count (int) or a fraction (float).
        tau: Huber threshold.
        iterations: Rounds of refinement at most.
        tolerance: Stop when a smaller share of the tokens changes cluster.
        distance: Cost in the seeding, "huber" or "euclidean".
        centroid: "mean", or one step of the "huber" M-estimate a round.
        shrink: Apply RRS.
        clip: Bounds of the shrink factor alpha.
        salience: Add the norm to the attention; None means only for encoders without a CLS token.
        seed: Seed of the draws in the seeding.
        representative: Keep the member with the most "attention", or the "medoid", nearest to the center (ours).
        attention_power: Weight of a token: its attention to this power (ours).

    Examples:
        >>> selection = ClustRS(keep=16).select(torch.rand(2, 576, 64), torch.rand(2, 576))
        >>> selection.tokens.shape, selection.alpha.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16]))
    """

    name = "clustrs"
    paper = "Clustering and Token Denoising for Faster and More Robust VLMs"
    needs = ("scores",)
    clusters = True
    exportable = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # the paper's ablation: "C+H" and "Clustering"
        "no-rrs": {"shrink": False},
        "clustering": {"distance": "euclidean", "shrink": False},
    }

    tau: float = field(default=1.0, metadata=accepts(validation.above, 0))
    iterations: int = field(default=3, metadata=accepts(validation.integer, 1))
    tolerance: float = field(default=0.01, metadata=accepts(validation.number, 0, 1))
    distance: Distance = field(default="huber", metadata=accepts(validation.choice, get_args(Distance)))
    centroid: Centroid = field(default="mean", metadata=accepts(validation.choice, get_args(Centroid)))
    shrink: bool = field(default=True, metadata=accepts(validation.choice, (True, False)))
    clip: tuple[float, float] = field(default=(0.10, 0.95), metadata=accepts(validation.interval, 0, 1))
    salience: bool | None = field(default=None, metadata=accepts(validation.choice, (True, False, None)))
    seed: int = field(default=0, metadata=accepts(validation.integer, 0))
    representative: Kept = field(default="attention", metadata=accepts(validation.choice, get_args(Kept)))
    attention_power: float = field(default=1.0, metadata=accepts(validation.above, 0))

    def to_dict(self) -> dict[str, Any]:
        """Return the method as a dict, without parameters beyond the paper that are off, so that older runs match."""
        off = {name for name in SWITCHES if getattr(self, name) == getattr(ClustRS, name)}
        return {key: value for key, value in super().to_dict().items() if key not in off}

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        with torch.no_grad():
            weight = token_weights(inputs, self.salience, self.attention_power)
        return self._select_weighted(inputs.tokens, weight, k, check)

    def _select_weighted(self, tokens: Tensor, weight: Tensor, k: int, check: bool) -> Selection:
        medoid = self.representative == "medoid"
        step = steps(tokens, k)
        step = PLAIN if medoid and step is FUSED else step

        def choose(distances: Any, scale: Tensor, weight: Tensor, images: slice, exponent: int) -> Chosen:
            tau = math.ldexp(min(self.tau, math.ldexp(1.0, exponent + 60)), -exponent) if exponent else self.tau
            cost, estimate = (tau if kind == "huber" else None for kind in (self.distance, self.centroid))
            seeds = step.seeding(distances, scale, weight, k, tau=cost, seed=self.seed)
            limits = {"rounds": self.iterations, "tolerance": self.tolerance, "tau": estimate}
            labels, _ = step.refine(distances, scale, weight, seeds, **limits)
            if medoid:
                return step.medoids(labels, distances, scale, weight, k)
            return step.representatives(labels, weight, k)

        return select_clusters(step, tokens, weight, self.clip if self.shrink else None, choose, check=check)


def select_clusters(
    step: Steps,
    tokens: Tensor,
    weight: Tensor,
    clip: kmeans.Clip | None,
    choose: Callable[[Any, Tensor, Tensor, slice, int], Chosen],
    *,
    check: bool = False,
    images: slice | None = None,
    exponent: int = 0,
) -> Selection:
    """Choose tokens of [B, N, D] and their clusters, and pull them towards the weighted means of these (RRS).

    `choose` gets squared distances, their means, weights, the images that these are of, and an exponent; it returns
    indices [B, k] and labels [B, N]. An image with distances too small to be squared is divided by 2 ** exponent first.
    """
    with torch.no_grad():
        distances, scale = step.squared_distances(tokens if step is LINEAR else upcast_half(tokens))
        if check:
            check_finite("tokens", tokens, norms=scale.sqrt())
    least = torch.finfo(scale.dtype).tiny * 2.0**46  # smaller squares lose bits or vanish
    largest: list[float] = []
    if images is None and step is not FUSED and can_read_without_sync(scale):
        largest = [scale.amax().item()] if len(scale) == 1 else scale.amax(-1).tolist()
    if any(value < least for value in largest):
        parts = []
        for i, image in enumerate(tokens.split(1)):
            features = upcast_half(image[0].detach())
            spread = (features - center(features)).abs().amax().item()
            exponent = math.frexp(spread)[1] if scale[i].amax() < least else 0
            own, scaled = slice(i, i + 1), multiply_power(image, -exponent)
            part = select_clusters(step, scaled, weight[own], clip, choose, images=own, exponent=exponent)
            assert part.centroids is not None
            tokens, centroids = (multiply_power(value, exponent) for value in (part.tokens, part.centroids))
            parts.append(replace(part, tokens=tokens, centroids=centroids))
        return parts[0].map(lambda *images: torch.cat(images), *parts[1:])
    with torch.no_grad():
        indices, labels = choose(distances, scale, weight, images or slice(None), exponent)
    features = upcast_half(tokens)
    centroids, alpha, shares = step.weighted_means(features, indices, labels, weight, distances, scale, clip)
    kept = gather_tokens(tokens, indices)
    if clip is not None:
        kept = upcast_half(kept).lerp_(centroids, 1 - alpha.unsqueeze(-1)).to(tokens.dtype)
    return Selection(kept, indices, labels, centroids.to(tokens.dtype), alpha, shares=shares)


def token_weights(inputs: PrunerInputs, with_salience: bool | None, power: float = 1.0) -> Tensor:
    """Return the weight [B, N] of each token: its attention, with salience (None: if there is no CLS), to a power."""
    features = upcast_half(inputs.tokens)
    weight = inputs["scores"].to(features.dtype)
    if with_salience or (with_salience is None and not inputs.cls):
        weight = kmeans.salience(features, weight)
    weight = kmeans.unit_scale(weight)
    return weight if power == 1 else kmeans.pow_weights(weight, power)
