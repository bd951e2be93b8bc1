"""Matrix products whose bits depend on the operands alone.

A selection compares numbers that come out of matrix products. The usual product cuts the work by the number of
threads, and its kernels round differently along the cuts, so the same image could lose other tokens on another
machine. The inner product of oneDNN does not do that on a CPU (`tests/ops/test_matmul.py` looks). Batches are
multiplied image by image, so that an image never notices its neighbours.
"""

from itertools import pairwise

import torch
from torch import Tensor

from clustrs.ops.precision import exporting

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCK = 192
"""Rows of a symmetric product computed together; smaller blocks skip more of the mirrored half."""


def deterministic_matmul(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right.T` for one image: [M, K] and [N, K] give [M, N].

    Compilers and exporters get the ordinary product (of a whole batch, from `map_images`): the oneDNN operator is
    private and they cannot lower it.
    """
    onednn = ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32
    if onednn and not torch.compiler.is_compiling():
        out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        return out
    return left @ right.mT


def gram(rows: Tensor) -> Tensor:
    """`rows @ rows.T` for one image, [N, D] to [N, N], exactly symmetric.

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
