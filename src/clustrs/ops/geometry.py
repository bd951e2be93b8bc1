"""Squared distances between the tokens of an image, with rounding kept from posing as a difference."""

import torch
from torch import Tensor

from clustrs.ops.matmul import gram

ROUNDING = 2.0**-18
"""Relative size below which a difference of squared distances is taken for rounding."""
CENTRE_SAMPLE = 16


def centre(tokens: Tensor) -> Tensor:
    """Average of a few evenly spaced tokens of one image, [N, D] to [D].

    Distances do not depend on it; moving the origin into the cloud only keeps their rounding small. It is a
    tree of elementwise sums, because a reduction over N may round differently from one thread count to another.
    """
    sums = tokens[:: max(1, len(tokens) // CENTRE_SAMPLE)][:CENTRE_SAMPLE]
    count = len(sums)
    while len(sums) % 2 == 0:
        left, right = sums.chunk(2)
        sums = left + right
    total, *others = sums.unbind(0)
    for other in others:
        total = total + other
    return total / count


def squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All squared distances between the tokens of each image, and the mean of each token's.

    [B, N, D] gives [B, N, N] and [B, N].
    """
    matrices, means = [], []
    for image in tokens.unbind(0):
        matrix = gram(image - centre(image))
        norms = matrix.diagonal().clone()
        matrices.append(matrix.mul_(-2).add_(norms.unsqueeze(1)).add_(norms).clamp_(min=0))
        means.append(matrix.mean(-1))
    return stack_images(matrices), stack_images(means)


def stack_images(images: list[Tensor]) -> Tensor:
    """Stack as `torch.stack` does, but without a copy for a batch of one."""
    return torch.stack(images) if len(images) > 1 else images[0].unsqueeze(0)
