"""Every method once more, slowly: one image, plain loops, float64. The oracle for the fast implementations.

`run` takes what `Pruner.select` takes for one image, as numpy arrays, and a method with its parameters.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Image:
    """One image's inputs. `hidden` and `keys` start with the CLS token if `cls`; `projector` is a matrix."""

    tokens: Array
    attention: Array
    hidden: Array
    keys: Array
    projector: Array
    cls: bool


@dataclass
class Result:
    tokens: Array
    indices: list[int]
    labels: list[int] | None = None
    centroids: Array | None = None
    alpha: list[float] | None = None
    merged: list[bool] | None = None


def run(method: Any, image: Image) -> Result:
    """The reference's answer for a method of the library, told apart by its name."""
    from reference import clustering, selection

    k = method.count(len(image.tokens))
    if k == len(image.tokens):
        return selection.everything(image, with_clusters=method.name == "clustrs")
    solve = {
        "clustrs": clustering.clustrs,
        "fastervlm": selection.fastervlm,
        "divprune": selection.divprune,
        "visionzip": selection.visionzip,
        "vispruner": selection.vispruner,
        "random": selection.random,
        "grid": selection.grid,
    }[method.name]
    return solve(method, image, k)


def best_first(scores: list[float] | Array) -> list[int]:
    """Indices by descending score; equal ones in their order."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))
