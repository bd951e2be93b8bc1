"""The steps of the clustering as plain torch operations, or as a few launches of Triton kernels on an accelerator.

There the time of a selection is the number of launches, and every seed costs several. The kernels choose what the plain
operations choose. They are used on CUDA and ROCm when Triton is installed, for float32 and half precision and up to
`LARGEST` tokens; `CLUSTRS_FUSED=0` in the environment, or `with dispatch.switch("off")`, turns them off.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from clustrs.ops import kmeans, linear
from clustrs.ops.distances import (
    center,
    deterministic_matmul,
    exponential_noise,
    exporting,
    is_ordinary,
    map_images,
    squared_distances,
)
from clustrs.ops.kmeans import LEAST_SUM, LIGHTEST, Clip, gather_own

Mode = Literal["auto", "off", "on"]
LARGEST = 8192  # tokens that one program can hold
MANY, FEW = 2048, 8  # from MANY tokens on, if k is at most one in FEW, passes are quicker than all distances
_mode: ContextVar[Mode] = ContextVar("fused", default="off" if os.environ.get("CLUSTRS_FUSED") == "0" else "auto")


class Steps(NamedTuple):
    """The steps of a selection by clustering, in one implementation."""

    squared_distances: Callable[[Tensor], tuple[Any, Tensor]]
    seeding: Callable[..., Tensor]
    refine: Callable[..., tuple[Tensor, Tensor]]
    representatives: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    medoids: Callable[..., tuple[Tensor, Tensor]]
    weighted_means: Callable[..., tuple[Tensor, Tensor, Tensor]]


@contextmanager
def switch(mode: Mode) -> Iterator[None]:
    """Use the kernels within the block where they can run ("auto"), never ("off"), or on every device ("on": for
    Triton's interpreter; set TRITON_INTERPRET=1 before Triton is imported)."""
    if mode not in ("auto", "off", "on"):
        raise ValueError(f"mode must be 'auto', 'off' or 'on', got {mode!r}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def steps(tokens: Tensor, k: int) -> Steps:
    """Return the steps to k of `tokens` [B, N, D]. A compiler gets operations without kernels, which it fuses itself;
    an exporter those with all distances. Beyond LARGEST tokens these take too much memory, whatever k is."""
    n = tokens.shape[1]
    if is_ordinary(tokens) and tokens.dtype != torch.float64 and n <= LARGEST:
        mode = _mode.get()
        if mode == "on" or (mode == "auto" and tokens.device.type == "cuda" and _triton_is_installed()):
            return FUSED
    many = n >= MANY and (k * FEW <= n or n > LARGEST)
    return LINEAR if many and not exporting() else PLAIN


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def _kernels() -> ModuleType:
    from clustrs.ops import kernels

    return kernels


def block(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())  # programs compute with powers of two


def fused_squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    batch, n, _ = tokens.shape
    centered = tokens - center(tokens)
    gram = map_images(deterministic_matmul, centered, centered)
    out = torch.empty_like(gram)
    rows = 1 if tokens.device.type == "cuda" else 64  # the interpreter pays for programs, not for numbers
    _kernels().distances_kernel[(-(-n // rows), batch)](gram, out, n, ROWS=rows, BLOCK=block(n))
    return out, out.mean(-1)


def fused_seeding(distances: Tensor, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    batch, n = weight.shape
    noise = exponential_noise(seed, k - 1, n, like=weight)
    seeds = torch.empty(batch, k, dtype=torch.long, device=weight.device)
    arguments = (distances, noise, weight, scale, seeds, n, k, tau or 1.0, LIGHTEST)
    _kernels().seeding_kernel[(batch,)](*arguments, HUBER=tau is not None, BLOCK=block(n))
    return seeds


def fused_refine(
    distances: Tensor, scale: Tensor, weight: Tensor, seeds: Tensor, *, rounds: int, tolerance: float, tau: float | None
) -> tuple[Tensor, Tensor]:
    batch, n = weight.shape
    k = seeds.shape[1]
    labels = torch.empty(batch, n, dtype=torch.long, device=weight.device)
    done = torch.zeros(batch, dtype=torch.int32, device=weight.device)
    own = torch.empty_like(weight)
    tail = (scale, labels, own, done, n, k, math.ceil(tolerance * n))
    assign = _kernels().assign_kernel[(batch,)]
    to_centers = distances.gather(1, seeds.unsqueeze(-1).expand(batch, k, n))
    assign(to_centers, own, *tail, FIRST=True, BLOCK=block(n))
    for _ in range(rounds - 1):
        share = _shares(labels, weight, k, own, tau)
        to_centers = map_images(deterministic_matmul, share, distances)
        assign(to_centers, share, *tail, FIRST=False, BLOCK=block(n))
    return labels, to_centers


def fused_representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    batch, n = labels.shape
    kept, slots = (torch.empty(batch, k, dtype=torch.long, device=labels.device) for _ in range(2))
    numbered = torch.empty_like(labels)
    _kernels().representatives_kernel[(batch,)](labels, score, kept, numbered, slots, n, k, BLOCK=block(n))
    return kept, numbered


def fused_weighted_means(
    features: Tensor, kept: Tensor, labels: Tensor, weight: Tensor, distances: Tensor, scale: Tensor, clip: Clip | None
) -> tuple[Tensor, Tensor, Tensor]:
    # the means are one matrix product, and round otherwise than the plain ones in their last bits
    (batch, n), k = labels.shape, kept.shape[1]
    with torch.no_grad():
        share = _shares(labels, weight, k, weight, None)
        make = torch.ones if clip is None else torch.empty
        alpha = make(batch, k, dtype=share.dtype, device=share.device)
        if clip is not None:
            mixed = map_images(deterministic_matmul, share, distances)
            arguments = (mixed, share, labels, kept, scale, alpha, n, k, *clip)
            _kernels().alpha_kernel[(k, batch)](*arguments, BLOCK=block(n))
    return map_images(torch.matmul, share, features), alpha, gather_own(share, labels)


def _shares(labels: Tensor, weight: Tensor, k: int, own: Tensor, huber_tau: float | None) -> Tensor:
    batch, n = weight.shape
    out = torch.empty(batch, k, n, dtype=weight.dtype, device=weight.device)
    arguments = (labels, weight, own, out, n, k, huber_tau or 1.0, LEAST_SUM)
    _kernels().shares_kernel[(k, batch)](*arguments, HUBER=huber_tau is not None, BLOCK=block(n))
    return out


PLAIN = Steps(
    squared_distances, kmeans.seeding, kmeans.refine, kmeans.representatives, kmeans.medoids, kmeans.weighted_means
)
LINEAR = Steps(
    linear.measure, linear.seeding, linear.refine, linear.representatives, linear.medoids, linear.weighted_means
)
FUSED = Steps(
    fused_squared_distances,
    fused_seeding,
    fused_refine,
    fused_representatives,
    kmeans.medoids,
    fused_weighted_means,
)
