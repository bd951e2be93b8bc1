"""Matrix products whose bits depend on the operands alone.

A selection compares numbers that come out of matrix products, and the same product may differ in its last bits with
the number of threads: a BLAS cuts the work differently, and its kernels round differently along the cuts. So here
every picture is multiplied by itself and, on a CPU, in pieces that the BLAS was found not to cut.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

CUTS_WELL = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""With these kernels the BLAS may cut a whole block, if its sums are short: the pieces round as the block does."""
SLICE = 512 if CUTS_WELL else 384
"""Longest sum handed to the BLAS at once."""
TILE = 48
"""Rows handed to one thread at once: the BLAS does not cut so small a piece."""
BLOCK = 192
"""Rows of a symmetric product computed together; smaller blocks skip more of the mirrored half."""


def padded(rows: Tensor, multiple: int) -> Tensor:
    """[M, K] with rows of zeros below, up to a multiple."""
    missing = -len(rows) % multiple
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def add_tiles(out: Tensor, left: Tensor, right: Tensor, factor: float = 1) -> None:
    """Add `factor * left @ right` to `out`, tile by tile. A lone tile would be cut, so there must be two or more."""
    tiles = left.unflatten(0, (-1, TILE))
    out.unflatten(0, (-1, TILE)).baddbmm_(tiles, right.expand(len(tiles), -1, -1), alpha=factor)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` for one picture: [M, K] and [K, N] give [M, N]. Faster if the left one is the taller."""
    if left.device.type != "cpu":
        return left @ right
    rows = padded(left, 2 * TILE)
    out = rows.new_zeros(len(rows), right.shape[1])
    for some_rows, some_columns in zip(rows.split(SLICE, 1), right.split(SLICE, 0), strict=True):
        add_tiles(out, some_rows, some_columns)
    return out[: len(left)]


def gram(rows: Tensor, *, origin: Tensor | None = None, norms: Tensor | None = None, factor: float = 1) -> Tensor:
    """`factor * x @ x.T` for one picture, x = (rows - origin) / norms: [N, D], [D] and [N, 1] give [N, N].

    The result is exactly symmetric. On a CPU only the blocks on and above the diagonal are computed, and x is never
    held whole.
    """
    on_cpu = rows.device.type == "cpu"
    n = len(rows)
    size = n + -n % BLOCK
    edges = [*range(0, size, BLOCK if on_cpu else size), size]
    out = rows.new_zeros(size, size)
    width = SLICE if on_cpu else rows.shape[1]
    for i, part in enumerate(rows.split(width, 1)):
        if origin is not None:
            part = part - origin[i * width : (i + 1) * width]
        if norms is not None:
            part = part / norms
        part = padded(part, BLOCK)
        for start, stop in pairwise(edges):
            strip, block, others = out[start:stop, start:], part[start:stop], part[start:].T
            if on_cpu and not CUTS_WELL:
                add_tiles(strip, block, others, factor)
            else:
                strip.addmm_(block, others, alpha=factor)
    for start, stop in pairwise(edges):
        corner = out[start:stop, start:stop].triu_()
        corner.add_(corner.triu(1).T)
        out[stop:, start:stop] = out[start:stop, stop:].T
    return out[:n, :n]
