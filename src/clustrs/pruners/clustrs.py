"""ClustRS: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops import kmeans
from clustrs.ops.dispatch import PLAIN, steps
from clustrs.ops.distances import multiply_power, spread_exponent, tiny_images
from clustrs.ops.indexing import can_read_without_sync, upcast_half
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register

SWITCHES = ("representative", "attention_power")
"""Parameters beyond the paper, off at their defaults."""


@register
@dataclass(frozen=True)
class ClustRS(Pruner):
    """Cluster the tokens, keep the most attended of each cluster, and pull it towards the cluster's center.

    The paper's method: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS). Seeds are drawn with
    probability ~ a_i min_j h_tau(|v_i - c_j|). A kept token v of a cluster with center c becomes alpha v + (1 - alpha)
    c, alpha = delta^2 / (|v - c|^2 + delta^2), delta the median distance to the center in the cluster.

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
        representative: Keep the member with the most "attention", or the "medoid", which is nearest to the center.
            Beyond the paper.
        attention_power: Weight of a token: its attention to this power. Beyond the paper.

    Examples:
        >>> import torch
        >>> from clustrs import ClustRS
        >>> selection = ClustRS(keep=16).select(torch.rand(2, 576, 64), torch.rand(2, 576))
        >>> selection.tokens.shape, selection.alpha.shape
        (torch.Size([2, 16, 64]), torch.Size([2, 16]))
    """

    name = "clustrs"
    paper = "Clustering and Token Denoising for Faster and More Robust VLMs"
    needs = ("scores",)
    clusters = True
    exportable = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "no-rrs": {"shrink": False},
        "clustering": {"distance": "euclidean", "shrink": False},
    }
    """The paper's ablation: "C+H" and "Clustering"."""

    tau: float = 1.0
    iterations: int = 3
    tolerance: float = 0.01
    distance: Literal["huber", "euclidean"] = "huber"
    centroid: Literal["mean", "huber"] = "mean"
    shrink: bool = True
    clip: tuple[float, float] = (0.10, 0.95)
    salience: bool | None = None
    seed: int = 0
    representative: Literal["attention", "medoid"] = "attention"
    attention_power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validation.above("tau", self.tau, 0)
        validation.integer("iterations", self.iterations, 1)
        validation.number("tolerance", self.tolerance, 0, 1)
        validation.choice("distance", self.distance, ("huber", "euclidean"))
        validation.choice("centroid", self.centroid, ("mean", "huber"))
        validation.choice("shrink", self.shrink, (True, False))
        object.__setattr__(self, "clip", validation.interval("clip", self.clip, 0, 1))
        validation.choice("salience", self.salience, (True, False, None))
        validation.integer("seed", self.seed, 0)
        validation.choice("representative", self.representative, ("attention", "medoid"))
        validation.above("attention_power", self.attention_power, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the method as a dict, without parameters beyond the paper that are off, so that older runs match."""
        off = {name for name in SWITCHES if getattr(self, name) == getattr(ClustRS, name)}
        return {key: value for key, value in super().to_dict().items() if key not in off}

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        with torch.no_grad():
            weight = token_weights(inputs, self.salience, self.attention_power)
        return self._select_weighted(inputs.tokens, weight, k, check)

    def _select_weighted(self, tokens: Tensor, weight: Tensor, k: int, check: bool, rescale: bool = True) -> Selection:
        """Select, given the weights [B, N] of the tokens; `rescale` images whose distances are too small to square."""
        implementation = steps(tokens) if self.representative == "attention" else PLAIN
        with torch.no_grad():
            distances, scale = implementation.squared_distances(upcast_half(tokens))
            if check:
                check_finite("tokens", tokens, norms=scale.sqrt())
        if rescale and implementation is PLAIN and can_read_without_sync(scale) and (tiny := tiny_images(scale)):

            def select(image: int, scaled: Tensor, exponent: int) -> Selection:
                largest = math.ldexp(1.0, exponent + 60)  # beyond all distances, so that tau cannot overflow
                method = replace(self, tau=math.ldexp(min(self.tau, largest), -exponent)) if exponent else self
                return method._select_weighted(scaled, weight[image : image + 1], k, False, rescale=False)

            return select_rescaled(tokens, tiny, select)
        with torch.no_grad():
            tau = self.tau if self.distance == "huber" else None
            seeds = implementation.seeding(distances, scale, weight, k, tau=tau, seed=self.seed)
            tau = self.tau if self.centroid == "huber" else None
            rounds = {"iterations": self.iterations, "tolerance": self.tolerance, "tau": tau}
            labels, _ = implementation.refine(distances, scale, weight, seeds, **rounds)
            if self.representative == "medoid":
                indices, labels = kmeans.medoids(labels, distances, scale, weight, k)
            else:
                indices, labels = implementation.representatives(labels, weight, k)
        clip = self.clip if self.shrink else None
        kept, centroids, alpha, shares = implementation.shrink_to_means(
            tokens, indices, labels, weight, distances, scale, clip
        )
        return Selection(kept, indices, labels, centroids, alpha, shares=shares)


def select_rescaled(tokens: Tensor, tiny: list[int], select: Callable[[int, Tensor, int], Selection]) -> Selection:
    """Select image by image, with those that are `tiny` multiplied by a power of two, and their output divided by
    it, which is exact.

    `select` gets the number of an image, its tokens [1, N, D] divided by 2 ** exponent, and the exponent.
    """
    parts = []
    for number, image in enumerate(tokens.split(1)):
        exponent = spread_exponent(upcast_half(image[0].detach())) if number in tiny else 0
        chosen = select(number, multiply_power(image, -exponent), exponent)
        assert chosen.centroids is not None
        centroids = multiply_power(chosen.centroids, exponent)
        parts.append(replace(chosen, tokens=multiply_power(chosen.tokens, exponent), centroids=centroids))
    return parts[0].map(lambda *images: torch.cat(images), *parts[1:])


def token_weights(inputs: PrunerInputs, with_salience: bool | None, power: float = 1.0) -> Tensor:
    """Return the weight [B, N] of each token: its attention, with salience (None: if there is no CLS), to a power."""
    assert inputs.scores is not None
    features = upcast_half(inputs.tokens)
    weight = inputs.scores.to(features.dtype)
    if with_salience or (with_salience is None and not inputs.cls):
        weight = kmeans.salience(features, weight)
    weight = kmeans.unit_scale(weight)
    return weight if power == 1 else kmeans.pow_weights(weight, power)
