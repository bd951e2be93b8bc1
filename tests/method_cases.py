"""Inputs for the tests: random images, tame and nasty, and the methods to try on them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from reference import Image
from torch import Tensor

from clustrs import SCOPE, Pruner, PrunerInputs
from clustrs.pruners.inputs import FURTHER

STATES = ("hidden", "keys", "question", *FURTHER)
METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("clustrs", {}, {"tau": 0.3, "iterations": 2, "tolerance": 0.0, "clip": [0.2, 0.7], "salience": True, "seed": 7}),
    ("clustrs", {"shrink": False}, {"distance": "euclidean", "shrink": False, "iterations": 1}),
    ("clustrs", {"centroid": "huber"}, {"centroid": "huber", "tau": 2.0, "tolerance": 0.2, "seed": 2**40 + 3}),
    (
        "clustrs",
        {"representative": "medoid"},
        {"representative": "medoid", "attention_power": 0.5, "clip": [0.0, 1.0], "seed": 3},
    ),
    (
        "clustrs",
        {"attention_power": 0.5, "clip": [0.0, 0.0]},
        {"attention_power": 2.5, "clip": [0.0, 0.0], "centroid": "huber"},
    ),
    ("fastervlm", {}, {}),
    ("divprune", {}, {}),
    ("visionzip", {}, {}),
    ("vispruner", {}, {"important": 0.2}),
    ("random", {}, {"seed": 5}),
    ("grid", {}, {"columns": 1}),
    ("denoise", {"inner": "divprune"}, {"inner": {"name": "fastervlm"}, "clip": [0.2, 0.7], "salience": True}),
    ("tome", {}, {}),
    ("clustermeans", {}, {"power": 0.5, "iterations": 5, "tolerance": 0.0, "salience": True, "seed": 9}),
    ("clustermeans", {"power": 0.0}, {"power": 0.0, "tau": 0.3}),
    ("cdpruner", {}, {"theta": 0.8}),
    ("mmr", {}, {"importance": 0.25}),
    ("scope", {}, {"alpha": 0.5}),
    ("holov", {}, {"runs": 5}),
    ("hiprune", {}, {"objects": 0.5}),
    ("vscan", {}, {"windows": 2}),
    ("prumerge-plus", {}, {"neighbors": 3}),
    ("downsample", {}, {}),
    ("evs", {}, {}),
    ("vidcom2", {}, {}),
]
"""A method's name, easy parameters, hard parameters: what the tests of all methods run over."""


def draw_image(
    seed: int,
    n: int,
    width: int,
    *,
    cls: bool = True,
    duplicates: float = 0.0,
    zero_attention: float = 0.0,
    ties: bool = False,
    offset: float = 0.0,
) -> Image:
    """Tokens in a few clumps. Shares of them repeat others, or get no attention; attention may have ties."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(max(1, n // 5), width)) * 3
    tokens = centers[rng.integers(len(centers), size=n)] + rng.normal(size=(n, width)) + offset
    hidden = rng.normal(size=(n + cls, 10))
    keys = rng.normal(size=(n + cls, 4))
    copied = rng.random(n) < duplicates
    source = rng.integers(n, size=n)
    for part, first in ((tokens, 0), (hidden, int(cls)), (keys, int(cls))):
        part[first:][copied] = part[first:][source][copied]
    attention = rng.random(n) ** 3
    if ties:
        attention = np.round(attention * 4) / 4
    attention[rng.random(n) < zero_attention] = 0
    projector = rng.normal(size=(10, width))
    question = rng.normal(size=(7, width))
    further = rng.random((4, n)) ** 3
    further = np.round(further * 4) / 4 if ties else further
    joint_keys = rng.normal(size=(n, 6))
    joint_keys[copied] = joint_keys[source][copied]
    further[3] /= n  # a softmax: a share of the attention
    # what float32 can hold, so that both sides see the same numbers
    more: dict[str, Any] = dict(zip(FURTHER, (*further, joint_keys), strict=True))
    image = Image(tokens, attention, hidden, keys, projector, cls, question=question, **more)
    return rounded(image, torch.float32)


def tensors(images: list[Image], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A batch of images as the library takes it. They share the first one's projector."""

    def batch(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(image, name) for image in images])).to(dtype)

    matrix = torch.from_numpy(images[0].projector).to(dtype)
    states = {name: batch(name) for name in STATES}
    return batch("tokens"), batch("attention"), states | {"projector": lambda h: h @ matrix, "cls": images[0].cls}


def batch_inputs(images: list[Image], dtype: torch.dtype = torch.float32) -> PrunerInputs:
    """The same as one object."""
    tokens, attention, states = tensors(images, dtype)
    return PrunerInputs(tokens, attention, **states)


def rows(states: dict[str, Any], at: Any) -> dict[str, Any]:
    """The states of some images of a batch."""
    return states | {name: states[name][at] for name in STATES}


def rounded(image: Image, dtype: torch.dtype) -> Image:
    """The image as it is after a conversion to `dtype`."""

    def there_and_back(x: Any) -> Any:
        return torch.from_numpy(x).to(dtype).double().numpy()

    names = ("tokens", "attention", "projector", *STATES)
    return replace(image, **{name: there_and_back(getattr(image, name)) for name in names})


class ProjectedSCOPE(SCOPE):
    """SCOPE as vLLM runs it: without hidden states, by the projected tokens."""

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        return super()._choose(replace(inputs, hidden=None), k)


def as_served(method: Pruner) -> Pruner:
    """What a method is in vLLM, for transformers."""
    return ProjectedSCOPE(method.keep) if isinstance(method, SCOPE) else method
