"""Random numbers as a function of (seed, step, token): the same in every batch, process, thread and device."""

from functools import lru_cache

import torch
from torch import Tensor

from clustrs.ops.geometry import map_chunks
from clustrs.ops.precision import is_ordinary

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def _mix(word: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32-bit words held in int64."""
    word = (word ^ (word >> 16)).mul_(0x85EBCA6B).bitwise_and_(MASK)
    word = (word ^ (word >> 13)).mul_(0xC2B2AE35).bitwise_and_(MASK)
    return word ^ (word >> 16)


def uniform(seed: int, steps: int, tokens: int, like: Tensor) -> Tensor:
    """[steps, tokens] numbers strictly between 0 and 1, on the device and in the type of `like`."""
    step = torch.arange(steps, device=like.device)[:, None]
    token = torch.arange(tokens, device=like.device)
    key = _mix(_mix(step + (seed & MASK) & MASK) + (seed >> 32) & MASK)
    word = _mix(key + token * GOLDEN & MASK)
    return (word >> 9).to(like.dtype).add_(0.5).mul_(2.0**-23)


def waiting_times(seed: int, steps: int, tokens: int, like: Tensor) -> Tensor:
    """[steps, tokens] exponential waiting times t, on the device and in the type of `like`; not to be written to.

    The argmax of w / t falls on token i with probability w_i / sum(w): it is the first to arrive, at rate w_i.
    They depend on no image, so those of the last few sizes are kept.
    """
    if is_ordinary(like):
        return _kept_waiting_times(seed, steps, tokens, like.dtype, like.device)
    return uniform(seed, steps, tokens, like).log_().neg_()


@lru_cache(maxsize=8)
def _kept_waiting_times(seed: int, steps: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return map_chunks(torch.log, uniform(seed, steps, tokens, torch.empty((), dtype=dtype, device=device))).neg_()
