"""Every method once more, slowly: one image, plain loops, float64. The oracle for the fast implementations.

`run` takes what `Pruner.select` takes for one image, as numpy arrays, and a method with its parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Image:
    """One image's inputs. `hidden` and `keys` start with the CLS token if `cls`; `projector` is a matrix; `layout` has
    tile, y and x of each token, `frames` its frame of a video; `question` has the embeddings of its tokens. The last
    five, for methods that read further layers, are of patches alone."""

    tokens: Array
    attention: Array
    hidden: Array
    keys: Array
    projector: Array
    cls: bool
    layout: list[tuple[int, int, int]] | None = None
    question: Array | None = None
    frames: list[int] | None = None
    received: Array = field(default_factory=lambda: np.empty(0))
    object_scores: Array = field(default_factory=lambda: np.empty(0))
    early_scores: Array = field(default_factory=lambda: np.empty(0))
    joint_scores: Array = field(default_factory=lambda: np.empty(0))
    joint_keys: Array = field(default_factory=lambda: np.empty(0))


@dataclass
class Result:
    tokens: Array
    indices: list[int]
    labels: list[int] | None = None
    centroids: Array | None = None
    alpha: list[float] | None = None
    merged: list[bool] | None = None


def run(method: Any, image: Image) -> Result:
    """The reference's answer for a method of the library: a function of the method's name in a module here."""
    from reference.selection import everything

    k = method.count(len(image.tokens))
    if k == len(image.tokens):
        return everything(image, with_clusters=hasattr(method, "clip"))
    modules, name = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)], method.name
    name = name.replace("-", "_")
    return next(getattr(module, name) for module in modules if hasattr(module, name))(method, image, k)


def best_first(scores: Sequence[float] | Array) -> list[int]:
    """Indices by descending score; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))
