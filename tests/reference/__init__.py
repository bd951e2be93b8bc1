"""Every method once more, slowly: one image, plain loops, float64. The oracle for the fast implementations.

`run` takes what `Pruner.select` takes for one image, as numpy arrays, and a method with its parameters.
"""

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Image:
    """One image's inputs. `hidden` and `keys` start with the CLS token if `cls`; `projector` is a matrix; `layout` has
    tile, y and x of each token."""

    tokens: Array
    attention: Array
    hidden: Array
    keys: Array
    projector: Array
    cls: bool
    layout: list[tuple[int, int, int]] | None = None


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
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return next(getattr(module, method.name) for module in modules if hasattr(module, method.name))(method, image, k)


def best_first(scores: list[float] | Array) -> list[int]:
    """Indices by descending score; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))
