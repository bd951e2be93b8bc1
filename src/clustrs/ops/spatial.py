"""Distances between tokens that also count how far apart they lie on the grid of the image."""

import torch
from torch import Tensor

from clustrs.ops.geometry import map_images


def add_grid_distances(distances: Tensor, tile: Tensor, y: Tensor, x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Squared distances [B, N, N] plus those on the grid, and the mean of each token's, [B, N].

    `tile`, `y` and `x` [B, N] say where the tokens lie. The unit of the grid is the longest side that their positions
    span; at weight 1 two tokens that far apart gain the median distance between all pairs of tokens. Those of
    different tiles, whose places in the image are not known, lie one unit farther apart. As sums of squared Euclidean
    distances the results are some, too, which is all that k-means asks for.
    """
    side = torch.maximum(span(y), span(x)).to(distances.dtype)[:, None, None]
    grid = (squared_differences(y) + squared_differences(x)).to(distances.dtype) / side.square()
    grid = grid + (tile[:, :, None] != tile[:, None, :])
    unit = median_distance(distances)[:, None, None] * weight
    total = distances + unit.square() * grid
    return total, map_images(lambda matrix: matrix.mean(-1), total)


def span(position: Tensor) -> Tensor:
    """How many steps of the grid [B] the positions [B, N] cover."""
    return position.amax(-1) - position.amin(-1) + 1


def squared_differences(position: Tensor) -> Tensor:
    return (position[:, :, None] - position[:, None, :]).square()


def median_distance(distances: Tensor) -> Tensor:
    """The median [B] over all pairs of tokens, from squared distances; for an even count the mean of the middle two."""
    n = distances.shape[-1]
    first, second = torch.triu_indices(n, n, 1, device=distances.device)
    pairs = distances.flatten(1).index_select(-1, first * n + second).sort(-1).values
    count = pairs.shape[-1]
    return (pairs[:, (count - 1) // 2].sqrt() + pairs[:, count // 2].sqrt()) / 2
