"""Tokens as arrays, and on the plane of their first two principal components."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Values = NDArray[np.float64]


def to_numpy(tensor: "Tensor") -> Values:
    """A tensor of any type and device as a numpy array in double precision."""
    values: Values = tensor.detach().double().cpu().numpy()
    return values


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
