"""Checks of tensors. Every error names the argument, what is wrong with it, and what would be accepted."""

import math
from typing import Any

import torch
from torch import Tensor

from clustrs.pruners.selection import EncoderStates, Layout, PrunerInputs, Selection

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
    same_device(name, value, to)


def same_device(name: str, value: Tensor, to: Tensor) -> None:
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


def collect(
    tokens: Tensor, attention: Tensor | None, states: EncoderStates, layout: Layout | None, question: Tensor | None
) -> PrunerInputs:
    """All that `select` was given, shapes checked, with a batch dimension in front."""
    *batch, n, _ = tokens.shape
    if attention is not None:
        beside("attention", attention, (*batch, n), tokens)
    for name, state in (("hidden", states.hidden), ("keys", states.keys)):
        if state is not None:
            beside(f"states.{name}", state, (*batch, n + states.cls, -1), tokens)
    if question is not None:
        beside("question", question, (*batch, -1, -1), tokens)

    def batched(part: Tensor | None) -> Tensor | None:
        return part if batch or part is None else part[None]

    return PrunerInputs(
        # Kernels add in another order along other strides: one layout in memory gives one result.
        tokens=(tokens if batch else tokens[None]).contiguous(),
        scores=None if attention is None else (attention if batch else attention[None]).contiguous(),
        layout=None if layout is None else batched_layout(layout, tokens),
        hidden=batched(states.hidden),
        keys=batched(states.keys),
        projector=states.projector,
        cls=states.cls,
        question=batched(question),
    )


def batched_layout(layout: Layout, to: Tensor) -> Layout:
    """The layout with [B, N] everywhere; one [N] serves every image of a batch."""
    batch, n = (to.shape[0] if to.dim() == 3 else 1), to.shape[-2]
    parts = []
    for name in ("tile", "y", "x"):
        value = getattr(layout, name)
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"layout.{name} is {kind}: give a tensor of integers")
        if value.shape not in ((n,), to.shape[:-1]):
            raise ValueError(f"layout.{name} has shape {shape(value)}: [{n}] goes with tokens of shape {shape(to)}")
        same_device(f"layout.{name}", value, to)
        parts.append(value.long().expand(batch, n))
    return Layout(*parts)


def requirements(method: str, needs: tuple[str, ...], inputs: PrunerInputs) -> None:
    """All that a method needs is there."""
    for need in needs:
        if getattr(inputs, "scores" if need == "attention" else need) is None:
            arguments = {"attention": "attention", "layout": "layout=Layout(...)"}
            where = arguments.get(need, f"states=EncoderStates({need}=...)")
            raise ValueError(f"{need} is missing: {method} needs it, give select(..., {where})")


def input_values(inputs: PrunerInputs, needs: tuple[str, ...]) -> None:
    """Sound numbers in the attention, and in the states that a method needs."""
    if inputs.scores is not None:
        values("attention", inputs.scores, 0, LARGEST)
    for name, state in (("hidden", inputs.hidden), ("keys", inputs.keys)):
        if state is not None and name in needs:
            finite(f"states.{name}", state)


def indices(method: str, value: Tensor, n: int, k: int) -> None:
    """Exactly k distinct indices of n tokens for each image, sorted; -1 stands for the CLS token."""
    if value.shape[-1] != k:
        word = "many" if value.shape[-1] > k else "few"
        raise ValueError(f"{method} returned too {word} indices: {value.shape[-1]} instead of {k}")
    if value.amin().item() < -1 or value.amax().item() >= n:
        found = f"from {value.amin().item()} to {value.amax().item()}"
        raise ValueError(f"{method} returned indices {found}: there are {n} tokens, give 0 to {n - 1}")
    repeats = int((value[:, 1:] == value[:, :-1]).sum().item())
    if repeats:
        raise ValueError(f"{method} returned duplicate indices ({repeats} of {value.numel()}): give {k} distinct ones")


def selection(method: str, chosen: Selection, n: int, k: int) -> None:
    """A selection of k tokens for each image."""
    indices(method, chosen.indices.sort(-1).values, n, k)
    if chosen.tokens.shape[:2] != chosen.indices.shape:
        expected = f"[{len(chosen.indices)}, {k}, any]"
        raise ValueError(f"{method} returned tokens of shape {shape(chosen.tokens)}: {expected} goes with its indices")
