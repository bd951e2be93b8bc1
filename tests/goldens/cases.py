"""The fixed inputs of the goldens: drawn by formula, so that no tensor has to be stored."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from reference import Image

from clustrs import PrunerInputs

KEEPS = (16, 50, 144)
KINDS = ("noise", "clumps", "near duplicates", "duplicates")
HIDDEN, KEYS = 24, 8


def hashed(seed: int, *shape: int) -> NDArray[np.float64]:
    """About normal numbers that float32 holds exactly, from integers alone: the same on every machine and version."""
    count = int(np.prod(shape))
    word = (np.arange(count * 4, dtype=np.uint64) + np.uint64(seed * 1_000_003)) * np.uint64(0x9E3779B97F4A7C15)
    word ^= word >> np.uint64(29)
    word *= np.uint64(0xBF58476D1CE4E5B9)
    word ^= word >> np.uint64(32)
    uniform = (word >> np.uint64(46)).astype(np.float64).reshape(*shape, 4) / 2**18
    return (uniform.sum(-1) - 2) * 1.75


@cache
def drawn(index: int) -> Image:
    """Image number `index`: the first eight of 576 tokens, the others of 200; the KINDS take turns."""
    n, width = (576, 32) if index < 8 else (200, 16)
    kind = KINDS[index % len(KINDS)]
    parts = [hashed(10 * index + i, n + 1, size) for i, size in enumerate((width, HIDDEN, KEYS))]
    if kind != "noise":
        clump = (np.arange(n + 1) * 7919) % 23
        spread = {"clumps": 2.0**-3, "near duplicates": 2.0**-13, "duplicates": 0.0}[kind]
        parts = [hashed(10 * index + 5 + i, 23, p.shape[1])[clump] + spread * p for i, p in enumerate(parts)]
    tokens, hidden, keys = (part.astype(np.float32).astype(np.float64) for part in parts)
    order = np.argsort(hashed(10 * index + 9, n), kind="stable")
    attention = np.empty(n)
    attention[order] = (np.arange(n) + 1) / 1024  # no two alike: the published codes leave ties to the sort
    return Image(tokens[1:], attention, hidden, keys, np.eye(HIDDEN, width), cls=True)


def images(count: int) -> Iterator[tuple[str, Image]]:
    """The first `count` images, with their names."""
    for index in range(count):
        yield f"{KINDS[index % len(KINDS)]} {index}", drawn(index)


def as_tensors(image: Image) -> PrunerInputs:
    """What `select` takes."""
    tokens, attention, hidden, keys, matrix = (
        torch.from_numpy(part).float()
        for part in (image.tokens, image.attention, image.hidden, image.keys, image.projector)
    )
    return PrunerInputs(tokens, attention, None, hidden, keys, lambda states: states @ matrix)
