"""Weighted sums and medians over the clusters of a partition, in one pass over the tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from clustrs.ops.precision import exporting


@dataclass(frozen=True)
class Clusters:
    """A partition into k clusters, none of them empty.

    `labels` [B, N] in 0 .. k-1, `sizes` [B, k], and `order` [B, N]: the tokens, cluster by cluster.
    """

    labels: Tensor
    sizes: Tensor
    order: Tensor


def partition(labels: Tensor, k: int) -> Clusters:
    """The clusters that `labels` describe. Inside a cluster the tokens stay in their order."""
    sizes = labels.new_zeros(labels.shape[0], k).scatter_add_(-1, labels, torch.ones_like(labels))
    return Clusters(labels, sizes, labels.argsort(dim=-1, stable=True))


def weighted_sums(clusters: Clusters, tokens: Tensor, factors: Tensor) -> Tensor:
    """Sums of `factors` [B, N] times `tokens` [B, N, D] over each cluster, [B, k, D].

    In an exported graph they are one product: other runtimes loop over the bags.
    """
    if exporting():
        cluster = torch.arange(clusters.sizes.shape[-1], device=tokens.device)[:, None]
        return torch.where(clusters.labels[:, None] == cluster, factors[:, None], 0) @ tokens
    batch, n, width = tokens.shape
    slots = clusters.order + torch.arange(batch, device=tokens.device)[:, None] * n
    sizes = clusters.sizes.flatten()
    total = functional.embedding_bag(
        slots.flatten(),
        tokens.reshape(batch * n, width),
        sizes.cumsum(0) - sizes,
        mode="sum",
        per_sample_weights=factors.gather(-1, clusters.order).flatten(),
    )
    return total.view(batch, -1, width)


def medians(clusters: Clusters, values: Tensor) -> Tensor:
    """Median of `values` [B, N] in each cluster, [B, k]; for an even count the mean of the two middle ones."""
    by_value = values.argsort(-1)
    key = clusters.labels.gather(-1, by_value)
    if exporting():  # no two keys are equal then, so that a runtime whose sort is not stable gets the same order
        key = key * values.shape[-1] + torch.arange(values.shape[-1], device=values.device)
    by_label = key.argsort(dim=-1, stable=True)
    ordered = values.gather(-1, by_value.gather(-1, by_label))
    starts = clusters.sizes.cumsum(-1) - clusters.sizes
    low = ordered.gather(-1, starts + (clusters.sizes - 1) // 2)
    high = ordered.gather(-1, starts + clusters.sizes // 2)
    return (low + high) / 2
