"""ClusterMeans: the weighted mean of each cluster, in the place where the cluster lies."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clustrs import validation
from clustrs.ops.distances import gather_tokens
from clustrs.ops.kmeans import cluster_sizes, membership
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.clustrs import ClustRS, token_weights
from clustrs.pruners.inputs import PrunerInputs, Selection, count_frames, grid_layout
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class ClusterMeans(Pruner):
    """Cluster the tokens as ClustRS does, and replace each cluster by its weighted mean.

    A mean takes the slot of the member nearest to the mean place of its cluster. Meant for
    `attach(positions="original", attention="proportional")`. Ours, not the paper's.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        power: Exponent of the attention in the weights; 0 weighs all tokens alike.
        tau: Huber threshold of the seeding.
        iterations: Rounds of refinement at most.
        tolerance: Stop when a smaller share of the tokens changes cluster.
        salience: Add the norm to the attention; None means only for encoders without a CLS token.
        seed: Seed of the draws in the seeding.
        across_frames: In a video, place a cluster at its mean place in time, too, not in the frame with most of it.

    Examples:
        >>> selection = ClusterMeans(keep=4).select(torch.rand(9, 8), torch.rand(9), sizes=True)
        >>> int(selection.sizes.sum())
        9
    """

    name = "clustermeans"
    needs = ("scores",)
    merges = True
    exportable = True

    power: float = field(default=0.1, metadata=accepts(validation.number, 0, 16))
    tau: float = 1.0
    iterations: int = 3
    tolerance: float = 0.01
    salience: bool | None = None
    seed: int = 0
    across_frames: bool = field(default=False, metadata=accepts(validation.choice, (True, False)))

    def to_dict(self) -> dict[str, Any]:
        """Return the method as a dict, without `across_frames` where it is off, so that older runs match."""
        return {key: value for key, value in super().to_dict().items() if key != "across_frames" or value}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clustering  # noqa: B018 - checks the parameters; torch.compile cannot trace the checks

    @cached_property
    def _clustering(self) -> ClustRS:
        shared = {name: getattr(self, name) for name in ("keep", "tau", "iterations", "tolerance", "salience", "seed")}
        return ClustRS(**shared, shrink=False)

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        with torch.no_grad():
            weight = token_weights(inputs, self.salience, self.power)
        chosen = self._clustering._select_weighted(inputs.tokens, weight, k, check)
        assert chosen.labels is not None
        assert chosen.centroids is not None
        assert chosen.shares is not None
        with torch.no_grad():
            slots, order = cluster_slots(chosen.labels, chosen.shares, inputs, k, self.across_frames).sort(-1)
            labels = order.argsort(-1).gather(-1, chosen.labels)
        means = gather_tokens(chosen.centroids, order)
        return Selection(means, slots, labels, merged=cluster_sizes(labels, k) > 1, shares=chosen.shares)


def cluster_slots(labels: Tensor, shares: Tensor, inputs: PrunerInputs, k: int, across_frames: bool = False) -> Tensor:
    """Return the member [B, k] of each cluster that is nearest to its weighted mean place, of equally near ones the
    first. In images of several tiles only the members in the tile with most of the cluster's weight count; in a video
    whose clusters lie `across_frames` the frame is a third axis."""
    layout = inputs.layout or grid_layout(inputs.tokens)
    members = membership(labels, k)
    weight = (members * shares.unsqueeze(1)).double()
    axes = [layout.y, layout.x]
    if across_frames and layout.frame is not None:
        axes.append(count_frames(layout, inputs.tokens))
    elif inputs.layout is not None:  # a tile's number is its first place among the sorted ones: below N
        tile = torch.searchsorted(layout.tile.sort(-1).values, layout.tile.contiguous()).unsqueeze(1)
        tiles = torch.zeros_like(weight).scatter_add_(-1, tile.expand_as(weight), weight)
        members = members & (tile == tiles.argmax(-1, keepdim=True))
        weight = weight * members
    total = weight.sum(-1, keepdim=True)
    far = torch.zeros_like(weight)
    for axis in axes:
        place = axis.unsqueeze(1).double()
        far += (place - (weight * place).sum(-1, keepdim=True) / total).square()
    far = far.masked_fill_(~members, torch.inf)
    near = far <= far.amin(-1, keepdim=True) + 1e-9
    index = torch.arange(labels.shape[-1], device=labels.device)
    return torch.where(near, index, labels.shape[-1]).amin(-1)
