"""Distances between the tokens of a image, with rounding kept from posing as a difference."""

import torch
from torch import Tensor

from clustrs.ops.products import gram, product

ROUNDING = 2.0**-18
"""Relative size below which a difference of squared distances is taken for rounding."""
COSINE_STEP = 2.0**-20
"""Cosines are compared after rounding to a multiple of this."""
CENTRE_SAMPLE = 16


def centre(tokens: Tensor) -> Tensor:
    """Average of a few evenly spaced tokens of one image, [N, D] to [D].

    Distances do not depend on it; moving the origin into the cloud only keeps their rounding small. It is a
    chain of elementwise sums, because a reduction over N may round differently from one thread count to another.
    """
    sample = tokens[:: max(1, len(tokens) // CENTRE_SAMPLE)][:CENTRE_SAMPLE].unbind(0)
    total = sample[0]
    for token in sample[1:]:
        total = total + token
    return total / len(sample)


def squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All squared distances between the tokens of each image, and the mean of each token's.

    [B, N, D] gives [B, N, N] and [B, N].
    """
    matrices, means = [], []
    for image in tokens.unbind(0):
        matrix = gram(image - centre(image))
        norms = matrix.diagonal().clone()
        matrices.append(matrix.mul_(-2).add_(norms[:, None]).add_(norms).clamp_(min=0))
        means.append(matrix.mean(-1))
    return stacked(matrices), stacked(means)


def cosines(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Cosines between rows, [B, M, D] and [B, N, D] to [B, M, N], rounded so that equal ones are equal.

    Without `right`, between all rows of `left`. A row of zeros has cosine 0 with everything.
    """
    if right is None:
        raw = [gram(rows / lengths(rows)) for rows in left.unbind(0)]
    else:
        pairs = zip(left.unbind(0), right.unbind(0), strict=True)
        raw = [product(a / lengths(a), b / lengths(b)) for a, b in pairs]
    return stacked(raw).div_(COSINE_STEP).round_().mul_(COSINE_STEP)


def lengths(rows: Tensor) -> Tensor:
    """Norms [N, 1] of [N, D] to divide by: 1 for a row of zeros."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.where(norms > 0, norms, 1)


def stacked(images: list[Tensor]) -> Tensor:
    """`torch.stack`, but without a copy for a batch of one."""
    return torch.stack(images) if len(images) > 1 else images[0][None]
