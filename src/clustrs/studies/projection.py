"""Tokens as arrays, and on a plane: by principal components, or by UMAP."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clustrs.plugins import install_hint

if TYPE_CHECKING:
    from torch import Tensor

Values = NDArray[np.float64]
NEIGHBOURS = 15
"""How many neighbours of a token UMAP tries to keep: its own default."""


def to_numpy(tensor: "Tensor") -> Values:
    """A tensor of any type and device as a numpy array in double precision."""
    values: Values = tensor.detach().double().cpu().numpy()
    return values


def spread(tokens: Values) -> float:
    """Root of the mean squared distance of tokens [N, D] from their mean: the unit in which distances are told."""
    return float(np.sqrt(((tokens - tokens.mean(0)) ** 2).sum(1).mean()))


def distances(left: Values, right: Values) -> Values:
    """Between all rows of [M, D] and [N, D]: [M, N]. Equal rows are at 0, exactly."""
    return np.array([np.linalg.norm(right - row, axis=1) for row in left])


@dataclass(frozen=True)
class Plane:
    """The two directions [2, D] in which tokens vary most, their mean, and each direction's share of the variance."""

    center: Values
    axes: Values
    shares: tuple[float, float]

    def project(self, tokens: Values) -> Values:
        """The coordinates [M, 2] of tokens [M, D] on the plane."""
        projected: Values = (tokens - self.center) @ self.axes.T
        return projected


def principal_plane(tokens: Values) -> Plane:
    """PCA of tokens [N, D]. The largest number of a direction is positive, so that nothing is mirrored by chance."""
    center = tokens.mean(0)
    _, lengths, rows = np.linalg.svd(tokens - center, full_matrices=False)
    axes = np.zeros((2, tokens.shape[1]))
    shares = [0.0, 0.0]
    total = float((lengths**2).sum())
    for i, row in enumerate(rows[:2]):
        axes[i] = row * np.sign(row[np.abs(row).argmax()])
        shares[i] = float(lengths[i] ** 2) / total if total > 0 else 0.0
    return Plane(center, axes, (shares[0], shares[1]))


def umap_coordinates(tokens: Values, seed: int) -> Values:
    """UMAP of tokens [N, D]: [N, 2]. One thread and a fixed seed, so that it comes out the same again."""
    check_umap()
    umap = import_module("umap")
    fit = umap.UMAP(n_neighbors=min(NEIGHBOURS, len(tokens) - 1), random_state=seed, n_jobs=1)
    return np.asarray(fit.fit_transform(tokens), dtype=np.float64)


def check_umap() -> None:
    """Raise a ValueError that says how to get UMAP, if it is missing."""
    if find_spec("umap") is None:
        raise ValueError(f"umap-learn is not installed: {install_hint('studies')}; --no-umap draws PCA alone")
