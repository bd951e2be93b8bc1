"""Squared distances between the tokens of an image, with rounding kept from posing as a difference."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from clustrs.ops.matmul import gram
from clustrs.ops.precision import exporting, is_ordinary

ROUNDING = 2.0**-18
"""Relative size below which a difference of squared distances is taken for rounding."""
CENTRE_SAMPLE = 16
CHUNK = 16384
"""Elements that torch never shares between threads: half of its grain size."""


def centre(tokens: Tensor) -> Tensor:
    """Average of a few evenly spaced tokens of one image, [N, D] to [1, D].

    Distances do not depend on it; moving the origin into the cloud only keeps their rounding small. It is a
    tree of elementwise sums, because a reduction over N may round differently from one thread count to another.
    """
    step = max(1, tokens.shape[-2] // CENTRE_SAMPLE)
    sums = tokens[..., : CENTRE_SAMPLE * step : step, :]
    count = sums.shape[-2]
    while sums.shape[-2] % 2 == 0:
        left, right = sums.chunk(2, -2)
        sums = left + right
    total, *others = sums.split(1, -2)
    for other in others:
        total = total + other
    return total / count


def squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """All squared distances between the tokens of each image, and the mean of each token's.

    [B, N, D] gives [B, N, N] and [B, N].
    """
    distances = map_images(_squared_distances, tokens)
    return distances, map_images(lambda matrix: matrix.mean(-1), distances)


def _squared_distances(tokens: Tensor) -> Tensor:
    matrix = gram(tokens - centre(tokens))
    norms = matrix.diagonal(dim1=-2, dim2=-1).clone()
    return matrix.mul_(-2).add_(norms.unsqueeze(-1)).add_(norms.unsqueeze(-2)).clamp_(min=0)


def is_tiny(scale: Tensor) -> Tensor:
    """Tell [B] for which images squares lose bits or vanish, from the mean squared distances [B, N] of their tokens.

    Such an image is to be multiplied by `2 ** -spread_exponent(image)`, which is exact.
    """
    return scale.amax(-1) < torch.finfo(scale.dtype).tiny * 2.0**46


def spread_exponent(tokens: Tensor) -> int:
    """Return the power of two that the distances between the tokens [N, D] of an image are about; 0 if they are 0."""
    spread = (tokens - centre(tokens)).abs().amax().item()
    return math.frexp(spread)[1]


def multiply_power(tensor: Tensor, exponent: int) -> Tensor:
    """Multiply by a power of two, in two steps, because one factor might leave the range of the type."""
    half = exponent // 2
    return tensor * 2.0**half * 2.0 ** (exponent - half)


def map_images(function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Apply a function to each image of a batch by itself, so that none notices its neighbours; stack the results.

    An exported graph gets the function of whole batches, so that it has each operator once, for any number of images.
    """
    if exporting():
        return function(*batches)
    images = zip(*(batch.unbind(0) for batch in batches), strict=True)
    return stack_images([function(*image) for image in images])


def map_chunks(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function (log, pow ...) so that the bits do not depend on the number of threads.

    Such functions round differently in vector registers and at the ends of a thread's part. Chunks are small enough for
    one thread, and fill its registers.
    """
    if not is_ordinary(values) or values.numel() <= CHUNK:
        return function(values)
    return torch.cat([function(part) for part in values.flatten().split(CHUNK)]).view_as(values)


def stack_images(images: list[Tensor]) -> Tensor:
    """Stack as `torch.stack` does, but without a copy for a batch of one."""
    return torch.stack(images) if len(images) > 1 else images[0].unsqueeze(0)
