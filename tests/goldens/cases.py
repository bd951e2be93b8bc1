"""The fixed inputs of the goldens: drawn by formula, so that no tensor has to be stored."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference import Image

from clustrs import Layout, PrunerInputs
from clustrs.pruners.inputs import FURTHER

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
    attention, *further = (ranked(seed, n) for seed in (10 * index + 9, *range(5000 + 4 * index, 5004 + 4 * index)))
    joint_keys, question = np.hstack([keys, hidden[:, :4]])[1:], hashed(10 * index + 8, 9, width)
    projector = np.eye(HIDDEN, width)
    more: dict[str, Any] = dict(zip(FURTHER, (*further, joint_keys), strict=True))
    return Image(tokens[1:], attention, hidden, keys, projector, cls=True, question=question, **more)


def ranked(seed: int, n: int) -> NDArray[np.float64]:
    """Scores of which no two are alike: the published codes leave ties to the sort."""
    scores = np.empty(n)
    scores[np.argsort(hashed(seed, n), kind="stable")] = (np.arange(n) + 1) / 1024
    return scores


def images(count: int) -> Iterator[tuple[str, Image]]:
    """The first `count` images, with their names."""
    for index in range(count):
        yield f"{KINDS[index % len(KINDS)]} {index}", drawn(index)


def as_tensors(image: Image) -> PrunerInputs:
    """What `select` takes."""
    names = ("tokens", "attention", "projector", "hidden", "keys", "question", *FURTHER)
    tokens, attention, matrix, *states = (torch.from_numpy(getattr(image, name)).float() for name in names)
    given: dict[str, Any] = dict(zip(names[3:], states, strict=True))
    if image.frames is not None:
        tile, y, x = torch.tensor(image.layout).unbind(-1)
        given["layout"] = Layout(tile, y, x, torch.tensor(image.frames))
    return PrunerInputs(tokens, attention, projector=lambda states: states @ matrix, **given)


def as_video(image: Image) -> Image:
    """The same tokens as four frames, of 12 x 12 or of 5 x 10."""
    n = len(image.tokens)
    size, width = n // 4, 12 if n == 576 else 10
    layout = [(i // size, i % size // width, i % size % width) for i in range(n)]
    return replace(image, layout=layout, frames=[place[0] for place in layout])


@dataclass
class Prompt:
    """States of a prompt of W tokens in L layers: queries [L, heads, d] of its last token, keys [L, W, heads, d],
    normalized hidden states [L, W, D], and the places of the image and of the text after it."""

    queries: NDArray[np.float64]
    keys: NDArray[np.float64]
    hidden: NDArray[np.float64]
    image: list[int]
    text: list[int]

    def without(self, dropped: list[int]) -> "Prompt":
        """The prompt without some tokens of its image."""
        gone = [self.image[i] for i in dropped]
        left = [place for place in range(self.keys.shape[1]) if place not in gone]
        image, text = ([left.index(place) for place in part if place in left] for part in (self.image, self.text))
        return Prompt(self.queries, self.keys[:, left], self.hidden[:, left], image, text)


def prompts(count: int) -> Iterator[tuple[str, Prompt, Image]]:
    """The first `count` prompts, with their names: two of 576 visual tokens, the others of 200. The image of each is
    one of as many tokens."""
    layers, heads, size, width, before, after = 8, 2, 4, 16, 5, 7
    for index in range(count):
        n, kind = 576 if index < 2 else 200, KINDS[index % 2]
        total, seed = before + n + after, 20_000 + 10 * index
        keys, hidden = (hashed(seed + i, layers, total, heads * (size, width)[i]) for i in range(2))
        if kind == "clumps":
            clump = (np.arange(total) * 7919) % 23
            keys, hidden = (
                hashed(seed + 5 + i, layers, 23, part.shape[-1])[:, clump] + part / 8
                for i, part in enumerate((keys, hidden))
            )
        queries, keys, hidden = (
            part.astype(np.float32).astype(np.float64) for part in (hashed(seed + 9, layers, heads, size), keys, hidden)
        )
        image, text = range(before, before + n), range(before + n, total)
        states = queries, keys.reshape(layers, total, heads, size), hidden
        yield f"{kind} {index}", Prompt(*states, list(image), list(text)), drawn(index if n == 576 else index + 6)
