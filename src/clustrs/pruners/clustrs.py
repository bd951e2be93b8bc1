"""ClustRS: attention-weighted Huber k-means++ (C+H), then residual shrinkage (RRS)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops import kmeans
from clustrs.ops.clusters import partition, sums
from clustrs.ops.geometry import ROUNDING, squared_distances
from clustrs.ops.picking import rows_at
from clustrs.ops.salience import salience
from clustrs.ops.shrinkage import shrink_factors
from clustrs.pruners import checks
from clustrs.pruners.base import Pruner, single
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates, Selection


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

    tau: float = 1.0
    iterations: int = 3
    tolerance: float = 0.01
    distance: str = "huber"
    centroid: str = "mean"
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

    def _all(self, tokens: Tensor, check: bool) -> Selection:
        every = super()._all(tokens, check)
        alpha = torch.ones(tokens.shape[:2], dtype=single(tokens).dtype, device=tokens.device)
        return replace(every, labels=every.indices, centroids=tokens, alpha=alpha)

    def _select(
        self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int, check: bool
    ) -> Selection:
        assert attention is not None
        features = single(tokens)
        with torch.no_grad():
            weight = attention.to(features.dtype)
            if self.salience or (self.salience is None and not states.cls):
                weight = salience(features, weight)
            weight = kmeans.unit_scale(weight)
            distances, scale = squared_distances(features)
            if check:
                checks.finite("tokens", tokens, norms=scale.sqrt())
            tau = self.tau if self.distance == "huber" else None
            seeds = kmeans.seeding(distances, scale, weight, k, tau=tau, seed=self.seed)
            labels, _ = kmeans.refine(
                distances,
                scale,
                weight,
                seeds,
                iterations=self.iterations,
                tolerance=self.tolerance,
                huber_tau=self.tau if self.centroid == "huber" else None,
            )
            indices, labels = kmeans.representatives(labels, weight, k)
            clusters = partition(labels, k)
            shares = kmeans.mean_shares(kmeans.membership(labels, k), weight)
            if self.shrink:
                residuals = kmeans.own(kmeans.to_means(distances, shares), labels)
                residuals = residuals.masked_fill_(residuals <= ROUNDING * scale, 0).sqrt_()
                alpha = shrink_factors(residuals, indices, clusters, self.clip)
            else:
                alpha = torch.ones_like(indices, dtype=features.dtype)
            share = kmeans.own(shares, labels)
        centroids = sums(clusters, features, share)
        kept = rows_at(tokens, indices)
        if self.shrink:
            kept = single(kept).lerp_(centroids, 1 - alpha[..., None]).to(tokens.dtype)
        return Selection(kept, indices, labels, centroids.to(tokens.dtype), alpha)
