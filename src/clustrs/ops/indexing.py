"""Small tools for batches of tokens: precision, gathering, image by image, reproducible random numbers."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 16384
"""Elements that torch never shares between threads: half of its grain size."""
MASK = 0xFFFFFFFF


def upcast_half(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave other types as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_ordinary(tensor: Tensor) -> bool:
    """Tell if a tensor has values now: not under a compiler or exporter, which trace with tensors that have none."""
    return type(tensor) is Tensor and tensor.device.type != "meta" and not torch.compiler.is_compiling()


def can_read_without_sync(tensor: Tensor) -> bool:
    """Tell if values can be read at no cost: reading would stop a compiler, and make an accelerator wait."""
    return is_ordinary(tensor) and tensor.device.type == "cpu"


def exporting() -> bool:
    """Tell if `torch.export` is tracing (torch 2.6: anything). The fastest way may be slow in another runtime."""
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


def stable_topk(score: Tensor, k: int) -> Tensor:
    """Return the indices [B, k] of the k largest scores of [B, N], best first."""
    return score.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def fill_invalid(chosen: Tensor, valid: Tensor, score: Tensor) -> Tensor:
    """Replace the invalid entries of `chosen` [B, k], in order, by the best tokens not chosen yet; scores are >= 0."""
    taken = torch.zeros_like(score, dtype=torch.long).scatter_add_(-1, chosen, valid.long()) > 0
    spare = stable_topk(score.masked_fill(taken, -1), chosen.shape[-1])
    rank = (~valid).cumsum(-1).sub(1).clamp(min=0)
    return torch.where(valid, chosen, spare.gather(-1, rank))


def gather_tokens(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the tokens [B, k, D] of [B, N, D] at the indices [B, k]."""
    batch, n, width = tokens.shape
    if not exporting() and batch == 1:
        return tokens.squeeze(0).index_select(0, indices.squeeze(0)).unsqueeze(0)
    flat = indices + torch.arange(batch, device=tokens.device)[:, None] * n
    return tokens.reshape(batch * n, width).index_select(0, flat.flatten()).view(batch, -1, width)


def _mix(word: Tensor) -> Tensor:
    """Apply the finalizer of MurmurHash3 to 32-bit words held in int64."""
    word = (word ^ (word >> 16)).mul_(0x85EBCA6B).bitwise_and_(MASK)
    word = (word ^ (word >> 13)).mul_(0xC2B2AE35).bitwise_and_(MASK)
    return word ^ (word >> 16)


def uniform(seed: int, steps: int, tokens: int, like: Tensor) -> Tensor:
    """Return [steps, tokens] numbers in (0, 1), `like` a tensor: a function of seed, step and token alone."""
    step = torch.arange(steps, device=like.device)[:, None]
    token = torch.arange(tokens, device=like.device)
    key = _mix(_mix(step + (seed & MASK) & MASK) + (seed >> 32) & MASK)
    word = _mix(key + token * 0x9E3779B9 & MASK)
    return (word >> 9).to(like.dtype).add_(0.5).mul_(2.0**-23)


def exponential_noise(seed: int, steps: int, tokens: int, like: Tensor) -> Tensor:
    """Return exponential waiting times t [steps, tokens]; those of the last few sizes are kept: do not write to them.

    The argmax of w / t falls on token i with probability w_i / sum(w): it is the first to arrive, at rate w_i.
    """
    if is_ordinary(like):
        return _cached_noise(seed, steps, tokens, like.dtype, like.device)
    return uniform(seed, steps, tokens, like).log_().neg_()


@lru_cache(maxsize=8)
def _cached_noise(seed: int, steps: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return map_chunks(torch.log, uniform(seed, steps, tokens, torch.empty((), dtype=dtype, device=device))).neg_()


def map_images(function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Apply a function to each image by itself, so that none depends on the others; in an exported graph, which has
    each operator once for any number of images, to the whole batch."""
    if exporting():
        return function(*batches)
    results = [function(*image) for image in zip(*(batch.unbind(0) for batch in batches), strict=True)]
    return torch.stack(results) if len(results) > 1 else results[0].unsqueeze(0)  # one is not copied


def map_chunks(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function (log, pow ...) so that the bits do not depend on the number of threads: such
    functions round differently in vector registers and at the ends of a thread's part."""
    if not is_ordinary(values) or values.numel() <= CHUNK:
        return function(values)
    return torch.cat([function(part) for part in values.flatten().split(CHUNK)]).view_as(values)
