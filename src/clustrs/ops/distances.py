"""Squared distances between the tokens of an image, from matrix products whose bits depend on the operands alone.

A selection compares numbers that come out of matrix products. The usual product divides the work by the number of
threads, and its kernels round differently along the cuts, so the same image could lose other tokens on another
machine. The inner product of oneDNN does not do that on a CPU (tests/ops/test_distances.py checks it). Batches are
multiplied image by image, so that an image does not depend on the others.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from clustrs.ops.indexing import exporting, map_images

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCK = 192
"""Rows of a symmetric product computed together; smaller blocks skip more of the mirrored half."""
ROUNDING = 2.0**-18
"""Relative size below which a difference of squared distances is taken for rounding."""
CENTER_SAMPLE = 16


def deterministic_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` for one image: [M, K] and [N, K] give [M, N].

    Compilers and exporters get the ordinary product (of a whole batch, from `map_images`): the oneDNN operator is
    private and they cannot lower it.
    """
    onednn = ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32
    if onednn and not torch.compiler.is_compiling():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        return out
    return left @ right.mT


def gram(rows: Tensor) -> Tensor:
    """Return `rows @ rows.T` for one image, [N, D] to [N, N], exactly symmetric.

    On a CPU only blocks on and above the diagonal are computed; an exported graph has one product, for a whole batch.
    """
    if exporting():
        product = rows @ rows.mT
        return product.triu() + product.triu(1).mT
    n = len(rows)
    edges = [*range(0, n, BLOCK if rows.device.type == "cpu" else n), n]
    out = rows.new_empty(n, n)
    for start, stop in pairwise(edges):
        strip = deterministic_matmul(rows[start:stop], rows[start:])
        corner = strip[:, : stop - start].triu_()
        corner.add_(corner.triu(1).T)
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    return out


def center(tokens: Tensor) -> Tensor:
    """Return the average of a few evenly spaced tokens of one image, [N, D] to [1, D].

    Distances do not depend on it; moving the origin into the cloud only keeps their rounding small. It is a
    tree of elementwise sums, because a reduction over N may round differently from one thread count to another.
    """
    step = max(1, tokens.shape[-2] // CENTER_SAMPLE)
    sums = tokens[..., : CENTER_SAMPLE * step : step, :]
    count = sums.shape[-2]
    while sums.shape[-2] % 2 == 0:
        left, right = sums.chunk(2, -2)
        sums = left + right
    total, *others = sums.split(1, -2)
    for other in others:
        total = total + other
    return total / count


def squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all squared distances between the tokens of each image, and the mean of each token's.

    [B, N, D] gives [B, N, N] and [B, N].
    """
    distances = map_images(_squared_distances, tokens)
    return distances, map_images(lambda matrix: matrix.mean(-1), distances)


def _squared_distances(tokens: Tensor) -> Tensor:
    matrix = gram(tokens - center(tokens))
    norms = matrix.diagonal(dim1=-2, dim2=-1).clone()
    return matrix.mul_(-2).add_(norms.unsqueeze(-1)).add_(norms.unsqueeze(-2)).clamp_(min=0)


def tiny_images(scale: Tensor) -> list[int]:
    """Return the images whose squares lose bits or vanish, from the mean squared distances [B, N] of their tokens.

    Such an image is to be multiplied by `2 ** -spread_exponent(image)`, which is exact.
    """
    largest = scale.amax(-1)
    values = [largest.item()] if len(largest) == 1 else largest.tolist()
    return [image for image, value in enumerate(values) if value < torch.finfo(scale.dtype).tiny * 2.0**46]


def spread_exponent(tokens: Tensor) -> int:
    """Return the power of two that the distances between the tokens [N, D] of an image are about; 0 if they are 0."""
    spread = (tokens - center(tokens)).abs().amax().item()
    return math.frexp(spread)[1]


def multiply_power(tensor: Tensor, exponent: int) -> Tensor:
    """Multiply by a power of two, in two steps, because one factor might leave the range of the type."""
    half = exponent // 2
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def assign_to_kept(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the nearest of the kept tokens `indices` [B, k] for each token of [B, N, D], as labels [B, N].

    Of those that rounding cannot tell apart the first; a kept token is its own. In float64, k x N distances.
    """

    def assign(image: Tensor, kept: Tensor) -> Tensor:
        rows = (image - center(image)).double()
        norms = rows.square().sum(-1)
        far = (norms[:, None] + norms[kept] - 2 * rows @ rows[kept].T).clamp_(min=0)
        tied = far <= far.amin(-1, keepdim=True) + ROUNDING * 2.0**-20 * (norms[:, None] + norms.mean())
        index = torch.arange(len(kept), device=kept.device)
        labels = torch.where(tied, index, len(kept)).amin(-1)
        return labels.scatter(0, kept, index)

    return torch.stack([assign(image, kept) for image, kept in zip(tokens, indices, strict=True)])
