"""Squared distances between the tokens of an image, from matrix products whose bits depend on the operands alone.

A selection compares numbers that come out of matrix products. The usual product divides the work by the number of
threads and rounds differently along the cuts, so the same image could lose other tokens on another machine. The inner
product of oneDNN does not do that. Batches are multiplied image by image: no image depends on the others.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
BLOCK = 192  # float32 rows of a symmetric product computed together; smaller blocks skip more of the mirrored half
ROUNDING = 2.0**-18  # relative size below which a difference of squared distances is taken for rounding
CENTER_SAMPLE = 16
PART = 2048  # tokens that `assign_to_kept` converts to float64 at a time
CHUNK = 16384  # elements that torch never shares between threads: half of its grain size
MASK = 0xFFFFFFFF


def upcast_half(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave other types as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def is_ordinary(tensor: Tensor) -> bool:
    """Tell if a tensor has values now: not under a compiler or exporter, which trace with tensors that have none."""
    return type(tensor) is Tensor and tensor.device.type != "meta" and not torch.compiler.is_compiling()


def can_read_without_sync(tensor: Tensor) -> bool:
    """Tell if values can be read at no cost: reading would stop a compiler, and make an accelerator wait."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def exporting() -> bool:
    """Tell if `torch.export` is tracing (torch 2.6: anything). The fastest way may be slow in another runtime."""
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


def stable_topk(score: Tensor, k: int) -> Tensor:
    """Return the indices [..., k] of the k largest scores of [..., N], best first; of equal ones the first."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def top_set(score: Tensor, k: int) -> Tensor:
    """Return what `stable_topk` does for scores [B, N], in any order. Only equal scores at the border need a sort."""
    if k < score.shape[-1] and can_read_without_sync(score):
        best, indices = score.topk(k + 1)
        if all(row[-2] > row[-1] for row in best.tolist()):
            return indices[:, :k]
    return stable_topk(score, k)


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
        return tokens.index_select(1, indices[0])
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


def random_order(seed: int, tokens: int, like: Tensor) -> Tensor:
    """Return a random order [1, tokens] for tokens `like` these, not to be written to: it is cached."""
    half = like.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else like.dtype
    if is_ordinary(like):
        return _cached_order(seed, tokens, dtype, like.device)
    return stable_topk(uniform(seed, 1, tokens, like.new_empty((), dtype=dtype)), tokens)


@lru_cache(maxsize=8)
def _cached_order(seed: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return stable_topk(uniform(seed, 1, tokens, torch.empty((), dtype=dtype, device=device)), tokens)


def exponential_noise(seed: int, steps: int, tokens: int, like: Tensor) -> Tensor:
    """Return exponential waiting times t [steps, tokens], not to be written to: they are cached. The argmax of w / t
    falls on token i with probability w_i / sum(w)."""
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


def deterministic_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.T` for one image: [M, K] and [N, K] give [M, N]."""
    onednn = ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32
    if onednn and not torch.compiler.is_compiling():  # compilers cannot lower the operator, which is private
        return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return left @ right.mT


def edges(rows: Tensor, block: int = BLOCK) -> list[tuple[int, int]]:
    """Return the bounds of the blocks in which a symmetric product of rows [N, D] is computed: several on a CPU."""
    n, block = len(rows), block * 4 // rows.element_size()
    return list(pairwise([*range(0, n, block if rows.device.type == "cpu" else n), n]))


def gram(rows: Tensor) -> Tensor:
    """Return `rows @ rows.T` for one image, [N, D] to [N, N], exactly symmetric: the lower blocks are copies."""
    if exporting():
        product = rows @ rows.mT
        return product.triu() + product.triu(1).mT
    out = rows.new_empty(len(rows), len(rows))
    for start, stop in edges(rows):
        strip = deterministic_matmul(rows[start:stop], rows[start:])
        corner = strip[:, : stop - start].triu_()
        corner.add_(corner.triu(1).T)
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
    return out


def center(tokens: Tensor) -> Tensor:
    """Return the mean [1, D] of a few evenly spaced tokens [N, D] of an image, as the origin: it rounds less. It is a
    tree of elementwise sums: a reduction over N may round differently from one thread count to another."""
    step = max(1, tokens.shape[-2] // CENTER_SAMPLE)
    sums = tokens[..., : CENTER_SAMPLE * step : step, :]
    count = sums.shape[-2]
    while sums.shape[-2] % 2 == 0:
        left, right = sums.chunk(2, -2)
        sums = left + right
    total, *others = sums.split(1, -2)
    for other in others:
        total = total + other
    return total / count


def squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all squared distances [B, N, N] between the tokens [B, N, D] of each image, and their means [B, N]."""

    def of_image(image: Tensor) -> Tensor:
        matrix = gram(image - center(image))
        norms = matrix.diagonal(dim1=-2, dim2=-1).clone()
        return matrix.mul_(-2).add_(norms.unsqueeze(-1)).add_(norms.unsqueeze(-2)).clamp_(min=0)

    distances = map_images(of_image, tokens)
    return distances, map_images(lambda matrix: matrix.mean(-1), distances)


def multiply_power(tensor: Tensor, exponent: int) -> Tensor:
    """Multiply by a power of two, in two steps, because one factor might leave the range of the type."""
    half = exponent // 2
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def assign_to_kept(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return the nearest of the kept tokens `indices` [B, k] for each token of [B, N, D], as labels [B, N]: of those
    that rounding cannot tell apart the first; a kept token is its own. In float64, k x N distances."""

    def assign(image: Tensor, kept: Tensor) -> Tensor:
        origin, index, labels = center(image), torch.arange(kept.shape[-1], device=kept.device), []
        chosen = (image.gather(-2, kept.unsqueeze(-1).expand(*kept.shape, image.shape[-1])) - origin).double()
        own = chosen.square().sum(-1).unsqueeze(-2)
        for part in image.split(PART, -2) if can_read_without_sync(image) else [image]:
            rows = (part - origin).double()
            norms = rows.square().sum(-1)
            far = (norms.unsqueeze(-1) + own - 2 * rows @ chosen.mT).clamp_(min=0)
            rounding = ROUNDING * 2.0**-20 * (norms + norms.mean(-1, keepdim=True)).unsqueeze(-1)
            tied = far <= far.amin(-1, keepdim=True) + rounding
            labels.append(torch.where(tied, index, len(index)).amin(-1))
        return torch.cat(labels, -1).scatter(-1, kept, index.expand_as(kept))

    return map_images(assign, tokens, indices)
