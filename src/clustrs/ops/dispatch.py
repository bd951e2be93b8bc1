"""The steps of the clustering as plain torch operations, or as a few launches of Triton kernels on an accelerator.

There the time of a selection is the number of launches, and every seed costs several. With Triton one launch draws all
seeds, and two with a matrix product make a round of refinement. A batch has one launch for each kernel, and one for
each image in a matrix product: batched products may round differently from one batch size to another.

The kernels choose what the plain operations choose. They are used on CUDA and ROCm when Triton is installed, in float32
(half precision is computed in it, too) and for up to `LARGEST` tokens; `CLUSTRS_FUSED=0` in the environment, or
`with dispatch.switch("off")`, turns them off.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from clustrs.ops import kmeans
from clustrs.ops.distances import center, deterministic_matmul, squared_distances
from clustrs.ops.indexing import gather_tokens, is_ordinary, map_images, upcast_half
from clustrs.ops.kmeans import LEAST_SUM, LIGHTEST, Clip, gather_own

Mode = Literal["auto", "off", "on"]
LARGEST = 8192
"""Tokens that one program can hold."""
_mode: ContextVar[Mode] = ContextVar("fused", default="off" if os.environ.get("CLUSTRS_FUSED") == "0" else "auto")


@contextmanager
def switch(mode: Mode) -> Iterator[None]:
    """Use the kernels within the block where they can run ("auto"), never ("off"), or on every device ("on").

    "on" is for Triton's interpreter, which runs them on a CPU: set TRITON_INTERPRET=1 before Triton is imported.
    """
    if mode not in ("auto", "off", "on"):
        raise ValueError(f"mode must be 'auto', 'off' or 'on', got {mode!r}")
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def usable(tokens: Tensor) -> bool:
    """Tell if the kernels can take over. A compiler gets the plain operations, which it fuses by itself."""
    if not is_ordinary(tokens) or tokens.dtype == torch.float64 or tokens.shape[1] > LARGEST:
        return False
    mode = _mode.get()
    return mode == "on" or (mode == "auto" and tokens.device.type == "cuda" and _triton_is_installed())


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def _kernels() -> ModuleType:
    from clustrs.ops import kernels

    return kernels


def block(n: int) -> int:
    """Return the power of two that a program computes with."""
    return max(16, 1 << (n - 1).bit_length())


def fused_squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """See `distances.squared_distances`."""
    batch, n, _ = tokens.shape
    centered = tokens - center(tokens)
    gram = map_images(deterministic_matmul, centered, centered)
    out = torch.empty_like(gram)
    rows = 1 if tokens.device.type == "cuda" else 64  # the interpreter pays for programs, not for numbers
    _kernels().distances_kernel[(-(-n // rows), batch)](gram, out, n, ROWS=rows, BLOCK=block(n))
    return out, out.mean(-1)


def log_uniform(seed: int, draws: int, n: int, like: Tensor) -> Tensor:
    """Return the logarithms of `indexing.uniform`: `exponential_noise` with the other sign."""
    out = torch.empty(draws, n, dtype=like.dtype, device=like.device)
    if draws:
        _kernels().uniform_kernel[(draws,)](out, seed & 0xFFFFFFFF, seed >> 32, n, BLOCK=block(n))
    return out.log_()


def fused_seeding(distances: Tensor, scale: Tensor, weight: Tensor, k: int, *, tau: float | None, seed: int) -> Tensor:
    """See `kmeans.seeding`."""
    batch, n = weight.shape
    logs = log_uniform(seed, k - 1, n, weight)
    seeds = torch.empty(batch, k, dtype=torch.long, device=weight.device)
    arguments = (distances, logs, weight, scale, seeds, n, k, tau or 1.0, LIGHTEST)
    _kernels().seeding_kernel[(batch,)](*arguments, HUBER=tau is not None, BLOCK=block(n))
    return seeds


def fused_refine(
    distances: Tensor,
    scale: Tensor,
    weight: Tensor,
    seeds: Tensor,
    *,
    iterations: int,
    tolerance: float,
    tau: float | None,
) -> tuple[Tensor, Tensor]:
    """See `kmeans.refine`."""
    batch, n = weight.shape
    k = seeds.shape[1]
    labels = torch.empty(batch, n, dtype=torch.long, device=weight.device)
    done = torch.zeros(batch, dtype=torch.int32, device=weight.device)
    own = torch.empty_like(weight)
    tail = (scale, labels, own, done, n, k, math.ceil(tolerance * n))
    assign = _kernels().assign_kernel[(batch,)]
    assign(distances, seeds, own, *tail, FIRST=True, BLOCK=block(n))
    if iterations == 1:
        return labels, gather_tokens(distances, seeds)
    for _ in range(iterations - 1):
        share = _shares(labels, weight, k, own, tau)
        to_centers = map_images(deterministic_matmul, share, distances)
        assign(to_centers, seeds, share, *tail, FIRST=False, BLOCK=block(n))
    return labels, to_centers


def fused_representatives(labels: Tensor, score: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `kmeans.representatives`."""
    batch, n = labels.shape
    kept, slots = (torch.empty(batch, k, dtype=torch.long, device=labels.device) for _ in range(2))
    numbered = torch.empty_like(labels)
    _kernels().representatives_kernel[(batch,)](labels, score, kept, numbered, slots, n, k, BLOCK=block(n))
    return kept, numbered


def fused_shrink_to_means(
    tokens: Tensor, indices: Tensor, labels: Tensor, weight: Tensor, distances: Tensor, scale: Tensor, clip: Clip | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kmeans.shrink_to_means`. The means are one matrix product, and round otherwise in their last bits."""
    features = upcast_half(tokens)
    with torch.no_grad():
        share = _shares(labels, weight, indices.shape[1], weight, None)
        if clip is None:
            alpha = torch.ones_like(indices, dtype=features.dtype)
        else:
            alpha = _shrink_factors(distances, share, labels, indices, scale, clip)
    centroids = map_images(torch.matmul, share, features)
    kept = gather_tokens(tokens, indices)
    if clip is not None:
        kept = upcast_half(kept).lerp_(centroids, 1 - alpha.unsqueeze(-1)).to(tokens.dtype)
    return kept, centroids.to(tokens.dtype), alpha, gather_own(share, labels)


def _shares(labels: Tensor, weight: Tensor, k: int, own: Tensor, huber_tau: float | None) -> Tensor:
    """Return the shares [B, k, N] of the tokens in the centers, given the squared distances `own` to the last ones."""
    batch, n = weight.shape
    out = torch.empty(batch, k, n, dtype=weight.dtype, device=weight.device)
    arguments = (labels, weight, own, out, n, k, huber_tau or 1.0, LEAST_SUM)
    _kernels().shares_kernel[(k, batch)](*arguments, HUBER=huber_tau is not None, BLOCK=block(n))
    return out


def _shrink_factors(
    distances: Tensor, share: Tensor, labels: Tensor, kept: Tensor, scale: Tensor, clip: Clip
) -> Tensor:
    batch, n = labels.shape
    k = kept.shape[1]
    mixed = map_images(deterministic_matmul, share, distances)
    alpha = torch.empty(batch, k, dtype=share.dtype, device=share.device)
    arguments = (mixed, share, labels, kept, scale, alpha, n, k, *clip)
    _kernels().alpha_kernel[(k, batch)](*arguments, BLOCK=block(n))
    return alpha


@dataclass(frozen=True)
class Steps:
    """The steps of a selection by clustering, in one implementation."""

    squared_distances: Callable[[Tensor], tuple[Tensor, Tensor]]
    seeding: Callable[..., Tensor]
    refine: Callable[..., tuple[Tensor, Tensor]]
    representatives: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    shrink_to_means: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


PLAIN = Steps(squared_distances, kmeans.seeding, kmeans.refine, kmeans.representatives, kmeans.shrink_to_means)
"""Plain torch operations, for every device and compiler."""
FUSED = Steps(fused_squared_distances, fused_seeding, fused_refine, fused_representatives, fused_shrink_to_means)
"""Triton kernels."""


def steps(tokens: Tensor) -> Steps:
    """Return the implementation of the steps for `tokens` [B, N, D]."""
    return FUSED if usable(tokens) else PLAIN
