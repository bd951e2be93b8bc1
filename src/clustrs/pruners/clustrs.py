"""ClustRS: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops import fused, kmeans
from clustrs.ops.precision import upcast_half
from clustrs.ops.salience import salience
from clustrs.pruners import checks
from clustrs.pruners.base import Pruner
from clustrs.pruners.registry import register
from clustrs.pruners.selection import PrunerInputs, Selection


@register
@dataclass(frozen=True)
class ClustRS(Pruner):
    """Cluster the tokens, keep the most attended of each cluster, pull it towards the cluster's centre.

    tau: Huber threshold. iterations: rounds of refinement at most. tolerance: stop when a smaller share of the
    tokens changes cluster. distance: "huber" or "euclidean" cost in the seeding. centroid: "mean", or one step of
    the "huber" M-estimate a round. shrink: apply RRS. clip: bounds of the shrink factor alpha. salience: add the
    norm to the attention; None means only for encoders without a CLS token. seed: of the draws in the seeding.
    """

    name = "clustrs"
    paper = "Clustering and Token Denoising for Faster and More Robust VLMs"
    needs = ("attention",)
    clusters = True

    tau: float = 1.0
    iterations: int = 3
    tolerance: float = 0.01
    distance: Literal["huber", "euclidean"] = "huber"
    centroid: Literal["mean", "huber"] = "mean"
    shrink: bool = True
    clip: tuple[float, float] = (0.10, 0.95)
    salience: bool | None = None
    seed: int = 0

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

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        steps = fused.steps(inputs.tokens)
        with torch.no_grad():
            weight = token_weights(inputs, self.salience)
            distances, scale = steps.squared_distances(upcast_half(inputs.tokens))
            if check:
                checks.finite("tokens", inputs.tokens, norms=scale.sqrt())
            tau = self.tau if self.distance == "huber" else None
            seeds = steps.seeding(distances, scale, weight, k, tau=tau, seed=self.seed)
            labels, _ = steps.refine(
                distances,
                scale,
                weight,
                seeds,
                iterations=self.iterations,
                tolerance=self.tolerance,
                huber_tau=self.tau if self.centroid == "huber" else None,
            )
            indices, labels = steps.representatives(labels, weight, k)
        clip = self.clip if self.shrink else None
        moved = steps.shrink_to_means(inputs.tokens, indices, labels, weight, distances, scale, clip)
        kept, centroids, alpha, shares = moved
        return Selection(kept, indices, labels, centroids, alpha, shares=shares)


def token_weights(inputs: PrunerInputs, with_salience: bool | None) -> Tensor:
    """How much each token counts, [B, N]: its attention, with salience if asked for (None: if there is no CLS)."""
    assert inputs.scores is not None
    features = upcast_half(inputs.tokens)
    weight = inputs.scores.to(features.dtype)
    if with_salience or (with_salience is None and not inputs.cls):
        weight = salience(features, weight)
    return kmeans.unit_scale(weight)
