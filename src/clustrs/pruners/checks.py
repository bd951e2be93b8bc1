"""Checks of tensors. Every error names the argument, what is wrong with it, and what would be accepted."""

import math
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e15
"""Largest magnitude accepted: the squares of much larger numbers leave float32."""


def shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {kind}: give a floating-point tensor")


def tokens(value: Any) -> None:
    """[N, D] or [B, N, D], nothing empty."""
    tensor("tokens", value)
    if value.dim() not in (2, 3):
        raise ValueError(f"tokens has shape {shape(value)}: give [N, D], or [B, N, D] for a batch")
    if value.numel() == 0:
        raise ValueError(f"tokens has shape {shape(value)}: give at least one image of at least one token")


def beside(name: str, value: Any, expected: tuple[int, ...], to: Tensor) -> None:
    """A tensor that goes with the tokens `to`: of shape `expected` (-1: any size), on the same device."""
    tensor(name, value)
    fits = value.dim() == len(expected) and all(e in (-1, s) for e, s in zip(expected, value.shape, strict=True))
    if not fits:
        wanted = ", ".join("any" if size == -1 else str(size) for size in expected)
        raise ValueError(f"{name} has shape {shape(value)}: [{wanted}] goes with tokens of shape {shape(to)}")
    if value.device != to.device:
        raise ValueError(f"{name} is on {value.device} and tokens on {to.device}: put them on one device")


def values(name: str, value: Tensor, low: float, high: float) -> None:
    """All numbers finite and in [low, high]. Reads the tensor, so an accelerator has to be waited for."""
    least, most = (bound.item() for bound in torch.aminmax(value.detach()))
    if not (low <= least and most <= high):  # also where either is NaN
        found = "NaN" if math.isnan(least) or math.isnan(most) else f"values from {least:g} to {most:g}"
        raise ValueError(f"{name} has {found}: all must be finite, from {low:g} to {high:g}")


def finite(name: str, value: Tensor, norms: Tensor | None = None) -> None:
    """All numbers finite, and none so large that squares overflow: the norm tells, or norms that are known already."""
    if norms is None:
        norms = torch.linalg.vector_norm(value.detach(), dtype=torch.promote_types(value.dtype, torch.float32))
    if not norms.amax().item() <= LARGEST:
        values(name, value, -LARGEST, LARGEST)
