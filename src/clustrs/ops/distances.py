"""Squared distances between the tokens of an image, from matrix products whose bits depend on the operands alone.

A selection compares numbers that come out of matrix products. The usual product divides the work by the number of
threads, and its kernels round differently along the cuts, so the same image could lose other tokens on another
machine. The inner product of oneDNN does not do that on a CPU. Batches are multiplied image by image, so that an image
does not depend on the others.
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
    """Return `left @ right.T` for one image: [M, K] and [N, K] give [M, N]."""
    onednn = ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32
    if onednn and not torch.compiler.is_compiling():  # compilers cannot lower the operator, which is private
        out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        return out
    return left @ right.mT


def edges(rows: Tensor) -> list[tuple[int, int]]:
    """Return the bounds of the blocks in which a symmetric product of rows [N, D] is computed: several on a CPU."""
    n = len(rows)
    return list(pairwise([*range(0, n, BLOCK if rows.device.type == "cpu" else n), n]))


def gram(rows: Tensor) -> Tensor:
    """Return `rows @ rows.T` for one image, [N, D] to [N, N], exactly symmetric: the lower blocks are copies."""
    if exporting():
        product = rows @ rows.mT
        return product.triu() + product.triu(1).mT
    out = rows.new_empty(len(rows), len(rows))
    for start, stop in edges(rows):
        strip = deterministic_matmul(rows[start:stop], rows[start:])
        corner = strip[:, : stop - start].triu_()
        corner.add_(corner.triu(1).T)
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    return out


def center(tokens: Tensor) -> Tensor:
    """Return the mean of a few evenly spaced tokens of an image, [N, D] to [1, D], as the origin: rounding is smaller.

    It is a tree of elementwise sums: a reduction over N may round differently from one thread count to another.
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
    """Return all squared distances [B, N, N] between the tokens [B, N, D] of each image, and their means [B, N]."""

    def of_image(image: Tensor) -> Tensor:
        matrix = gram(image - center(image))
        norms = matrix.diagonal(dim1=-2, dim2=-1).clone()
        return matrix.mul_(-2).add_(norms.unsqueeze(-1)).add_(norms.unsqueeze(-2)).clamp_(min=0)

    distances = map_images(of_image, tokens)
    return distances, map_images(lambda matrix: matrix.mean(-1), distances)


def tiny_images(scale: Tensor) -> list[int]:
    """Return the images whose squared distances, of which `scale` [B, N] has the means, lose bits or vanish."""
    largest = scale.amax(-1)
    values = [largest.item()] if len(largest) == 1 else largest.tolist()
    return [image for image, value in enumerate(values) if value < torch.finfo(scale.dtype).tiny * 2.0**46]


def spread_exponent(tokens: Tensor) -> int:
    """Return the exponent of the power of two that distances between tokens [N, D] are about; 0 if they are 0."""
    return math.frexp((tokens - center(tokens)).abs().amax().item())[1]


def multiply_power(tensor: Tensor, exponent: int) -> Tensor:
    """Multiply by a power of two, in two steps, because one factor might leave the range of the type."""
    half = exponent // 2
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def assign_to_kept(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the nearest of the kept tokens `indices` [B, k] for each token of [B, N, D], as labels [B, N]: of those
    that rounding cannot tell apart the first; a kept token is its own. In float64, k x N distances."""

    def assign(image: Tensor, kept: Tensor) -> Tensor:
        rows, k = (image - center(image)).double(), kept.shape[-1]
        norms = rows.square().sum(-1)
        chosen = rows.gather(-2, kept.unsqueeze(-1).expand(*kept.shape, rows.shape[-1]))
        far = (norms.unsqueeze(-1) + norms.gather(-1, kept).unsqueeze(-2) - 2 * rows @ chosen.mT).clamp_(min=0)
        rounding = ROUNDING * 2.0**-20 * (norms + norms.mean(-1, keepdim=True)).unsqueeze(-1)
        tied = far <= far.amin(-1, keepdim=True) + rounding
        index = torch.arange(k, device=kept.device)
        labels = torch.where(tied, index, k).amin(-1)
        return labels.scatter(-1, kept, index.expand_as(kept))

    return map_images(assign, tokens, indices)
