"""Cosines that are the same to the last bit for every batch, thread count, memory layout, compiler and device.

The methods of other authors compare cosines, and a near-tie decides which token survives; so cosines may neither be
rounded coarsely nor depend on the order in which a kernel adds. Here they come from integers. Each row is scaled by a
power of two and cut into a `high` part of 26 bits and a `low` part of 20 more. By Cauchy and Schwarz every sum of
products of these stays below 2^53, so float64 adds them without any rounding, in whatever order. What is left out (the
product of two low parts, and bits below the 46th) is below float64's own rounding for float32 input of usual range.
Duplicates have equal cosines, wherever they stand; a multiple of a token is like a duplicate if 46 bits hold both.
"""

from itertools import pairwise

import torch
from torch import Tensor

from clustrs.ops.geometry import map_images
from clustrs.ops.matmul import BLOCK
from clustrs.ops.precision import exporting, upcast_half, values_are_free

HIGH_BITS, LOW_BITS = 26, 20
LOW_UNIT = 2.0**-LOW_BITS
LARGEST_EXPONENT = 900
"""Rows whose norm lies beyond 2^±900 are out of range; no such number survives the checks of `select`."""
SMALLEST = 2.0**-400
"""Rows of float64 numbers below this are multiplied by a power of two before they are squared."""


def cosines(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Cosines between rows in float64: [B, M, D] and [B, N, D] give [B, M, N].

    Without `right`, between all rows of `left`. A row of zeros has cosine 0 with everything.
    """
    if right is None and not exporting():
        return map_images(lambda rows: _self_cosines(*fixed_point(rows)), left)
    return map_images(
        lambda a, b: _cross_cosines(fixed_point(a), fixed_point(b)), left, left if right is None else right
    )


def paired_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Cosines [P] of the rows of [P, D] and [P, D] one by one: the same numbers as `cosines` has."""
    (high, low), (other_high, other_low) = fixed_point(left), fixed_point(right)
    mixed = (high * other_low).sum(-1) + (low * other_high).sum(-1)
    products = (high * other_high).sum(-1) + mixed * LOW_UNIT
    norms = (_squared_norms(high, low) * _squared_norms(other_high, other_low)).sqrt_()
    return products / norms.masked_fill_(norms == 0, 1)


def fixed_point(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Integers `high` and `low` (in float64) with rows ~ scale * (high + low / 2^20), for [N, D]."""
    rows = raise_tiny(upcast_half(rows))
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
    # From the logarithm, because frexp does not compile everywhere. Where it rounds at a power of two, either is right.
    exponent = torch.where(norms > 0, norms, 1).log2().floor().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT) + 1
    shift = HIGH_BITS - exponent
    half = (shift / 2).floor()  # two factors, because one might leave float32
    scaled = (rows * torch.exp2(half.to(rows.dtype))).mul_(torch.exp2((shift - half).to(rows.dtype)))
    high = scaled.round()
    low = scaled.sub_(high).mul_(2.0**LOW_BITS).round_()
    return high.double(), low.double()


def raise_tiny(rows: Tensor) -> Tensor:
    """Multiply rows whose squares would leave float64 by a power of two; cosines do not depend on it.

    Only float64 rows can be that small.
    """
    if rows.dtype != torch.float64 or not values_are_free(rows):
        return rows
    largest = rows.abs().amax(-1, keepdim=True)
    tiny = (largest > 0) & (largest < SMALLEST)
    return torch.where(tiny, rows * 2.0**700, rows) if tiny.any() else rows


def _self_cosines(high: Tensor, low: Tensor) -> Tensor:
    """Cosines [N, N] between all rows; on a CPU only blocks on and above the diagonal are computed."""
    n = len(high)
    edges = [*range(0, n, BLOCK if high.device.type == "cpu" else n), n]
    out = high.new_empty(n, n)
    for start, stop in pairwise(edges):
        strip = _products((high[start:stop], low[start:stop]), (high[start:], low[start:]))
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    norms = out.diagonal().clone()
    return _divide(out, norms, norms)


def _cross_cosines(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    return _divide(_products(left, right), _squared_norms(*left), _squared_norms(*right))


def _products(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products [M, N] of rows in fixed point; the sum of the two mixed terms is the same from either side."""
    mixed = left[0] @ right[1].mT + left[1] @ right[0].mT
    return (left[0] @ right[0].mT).add_(mixed.mul_(LOW_UNIT))


def _squared_norms(high: Tensor, low: Tensor) -> Tensor:
    mixed = (high * low).sum(-1)
    return high.square().sum(-1) + (mixed + mixed) * LOW_UNIT


def _divide(products: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The products [M, N] over both norms; the square root of a square is exact, so a duplicate has cosine 1."""
    norms = (left[..., None] * right[..., None, :]).sqrt_()
    return products.div_(norms.masked_fill_(norms == 0, 1))
