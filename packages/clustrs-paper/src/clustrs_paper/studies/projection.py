"""Distances between tokens, and their coordinates by UMAP."""

from importlib import import_module
from importlib.util import find_spec

import numpy as np

from clustrs.app.projection import Values
from clustrs.plugins import install_hint

NEIGHBOURS = 15
"""How many neighbours of a token UMAP tries to keep: its own default."""


def spread(tokens: Values) -> float:
    """Root of the mean squared distance of tokens [N, D] from their mean: the unit in which distances are told."""
    return float(np.sqrt(((tokens - tokens.mean(0)) ** 2).sum(1).mean()))


def distances(left: Values, right: Values) -> Values:
    """Between all rows of [M, D] and [N, D]: [M, N]. Equal rows are at 0, exactly."""
    return np.array([np.linalg.norm(right - row, axis=1) for row in left])


def umap_coordinates(tokens: Values, seed: int) -> Values:
    """UMAP of tokens [N, D]: [N, 2]. One thread and a fixed seed, so that it comes out the same again."""
    check_umap()
    umap = import_module("umap")
    fit = umap.UMAP(n_neighbors=min(NEIGHBOURS, len(tokens) - 1), random_state=seed, n_jobs=1)
    return np.asarray(fit.fit_transform(tokens), dtype=np.float64)


def check_umap() -> None:
    """Raise a ValueError that says how to get UMAP, if it is missing."""
    if find_spec("umap") is None:
        hint = install_hint("studies", package="clustrs-paper")
        raise ValueError(f"umap-learn is not installed: {hint}; --no-umap draws PCA alone")
