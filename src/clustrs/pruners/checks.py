"""Checks of parameters and inputs. Every error names the argument, the value, and what would be accepted."""

import json
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

LARGEST = 1e15
"""Largest magnitude accepted: the squares of much larger numbers leave float32."""


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def keep(value: Any) -> None:
    """A count of at least 1 (int), or a fraction in (0, 1] (float)."""
    count = is_number(value) and isinstance(value, int) and value >= 1
    fraction = is_number(value) and isinstance(value, float) and 0 < value <= 1
    if not (count or fraction):
        raise ValueError(f"keep={value!r}: give a count (an int of at least 1) or a fraction (a float in (0, 1])")


def read_keep(text: str) -> int | float:
    """What `--keep` says: 16 is a count; 0.25 and 1.0 are fractions."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise ValueError(f"--keep {text}: give a count (16) or a fraction (0.25)")


def number(name: str, value: Any, low: float, high: float) -> None:
    """A number in [low, high]."""
    if not (is_number(value) and low <= value <= high):
        raise ValueError(f"{name}={value!r}: give a number from {low:g} to {high:g}")


def above(name: str, value: Any, low: float) -> None:
    """A number above `low`."""
    if not (is_number(value) and value > low):
        raise ValueError(f"{name}={value!r}: give a number above {low:g}")


def integer(name: str, value: Any, low: int) -> None:
    """An integer of at least `low`."""
    if not (is_number(value) and isinstance(value, int) and value >= low):
        raise ValueError(f"{name}={value!r}: give an integer of at least {low}")


def choice(name: str, value: Any, options: Iterable[Any]) -> None:
    """One of `options`."""
    options = list(options)
    if not any(value is option or (isinstance(value, str) and value == option) for option in options):
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, options))}{nearest(value, options)}")


def interval(name: str, value: Any, low: float, high: float) -> tuple[float, float]:
    """A pair low <= a <= b <= high, as a tuple; a list (as JSON has it) will do."""
    pair = value if isinstance(value, list | tuple) and len(value) == 2 else ()
    if not (pair and all(map(is_number, pair)) and low <= pair[0] <= pair[1] <= high):
        raise ValueError(f"{name}={value!r}: give two numbers (a, b) with {low:g} <= a <= b <= {high:g}")
    return float(pair[0]), float(pair[1])


def key_value(text: str, complaint: str) -> tuple[str, Any]:
    """What KEY=VALUE says, as a user types it: a value that is no JSON is a word."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(complaint)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def nearest(value: Any, options: Iterable[Any]) -> str:
    """' (did you mean ...?)', or nothing."""
    close = get_close_matches(str(value).lower(), [str(option) for option in options], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
        raise ValueError(f"tokens has shape {shape(value)}: give at least one picture of at least one token")


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
