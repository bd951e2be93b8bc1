"""Why a method kept what it kept: the clusters of its tokens, their scores, and where they lie in feature space."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clustrs.app.trial import LoadedModel
from clustrs.models import shared_encoding
from clustrs.models.adapters.base import VisualTokens
from clustrs.models.ask import as_seen, chat_prompt
from clustrs.models.select import select_tokens
from clustrs.pruners import Pruner, Selection

if TYPE_CHECKING:
    from torch import Tensor


Values = NDArray[np.float64]


def to_numpy(tensor: "Tensor") -> Values:
    """Return a tensor of any type and device as a numpy array in double precision."""
    values: Values = tensor.detach().double().cpu().numpy()
    return values


@dataclass(frozen=True)
class Plane:
    """Plane of the two directions [2, D] in which tokens vary most, and each direction's share of the variance."""

    center: Values
    axes: Values
    shares: tuple[float, float]

    def project(self, tokens: Values) -> Values:
        """Return the coordinates [M, 2] of tokens [M, D] on the plane."""
        projected: Values = (tokens - self.center) @ self.axes.T
        return projected


def principal_plane(tokens: Values) -> Plane:
    """Compute the PCA of tokens [N, D]; the largest number of a direction is positive, so nothing is mirrored."""
    center = tokens.mean(0)
    _, lengths, rows = np.linalg.svd(tokens - center, full_matrices=False)
    axes = np.zeros((2, tokens.shape[1]))
    shares = [0.0, 0.0]
    total = float((lengths**2).sum())
    for i, row in enumerate(rows[:2]):
        axes[i] = row * np.sign(row[np.abs(row).argmax()])
        shares[i] = float(lengths[i] ** 2) / total if total > 0 else 0.0
    return Plane(center, axes, (shares[0], shares[1]))


ANY_QUESTION = "What is in the image?"
"""Methods do not see the question here, but a processor needs one."""


@dataclass(frozen=True)
class Token:
    """One visual token. `cluster` is the index of its group, `kept` whether it goes into the language model.

    `alpha` is how much of the token itself is left after shrinkage (1: unchanged), of kept tokens that are shrunk;
    `distance` is that of the token, before shrinkage, to its cluster's centroid. `px` and `py` are its coordinates on
    the plane of the first two principal components.
    """

    tile: int
    y: int
    x: int
    score: float
    kept: bool
    cluster: int | None
    alpha: float | None
    distance: float | None
    px: float
    py: float


@dataclass(frozen=True)
class View:
    """All tokens of one image, for a page to draw. `image` is what the base crop shows, `grid` its height and width in
    tokens; `note` says what cannot be shown."""

    title: str
    image: Image.Image
    grid: tuple[int, int]
    tokens: tuple[Token, ...]
    note: str = ""

    def columns(self) -> dict[str, list[Any]]:
        """Return the tokens field by field, rounded to what can be seen: a tenth of the size of a list of objects."""
        return {field.name: [_rounded(getattr(token, field.name)) for token in self.tokens] for field in fields(Token)}


@dataclass(frozen=True)
class Inspection:
    """The clean image and, if there is one, the corrupted one, on the same plane: that of the clean tokens.

    `shares` are the parts of the clean tokens' variance that the two directions have.
    """

    method: str
    clusters: bool
    views: tuple[View, ...]
    shares: tuple[float, float]


def inspect(loaded: LoadedModel, method: Pruner, images: Sequence[tuple[str, Image.Image]]) -> Inspection:
    """Select tokens of each image (its title, its pixels) by a method; the first image is the clean one."""
    prompt = chat_prompt(loaded.processor, ANY_QUESTION)
    with loaded.lock:
        encoded = [
            shared_encoding.encode(loaded.model, loaded.processor, [image], [(0, prompt)]).images[0]
            for _, image in images
        ]
    plane = principal_plane(to_numpy(encoded[0].tokens))
    views, clustered = [], False
    for (title, image), tokens in zip(images, encoded, strict=True):
        ((selection, _),) = select_tokens(method, [tokens], "image")
        clustered = clustered or selection.labels is not None
        views.append(_view(title, as_seen(loaded.processor, image), tokens, selection, plane))
    return Inspection(method.name, clustered, tuple(views), plane.shares)


def _view(title: str, image: Image.Image, encoded: VisualTokens, selection: Selection, plane: Plane) -> View:
    features = to_numpy(encoded.tokens)
    coordinates = plane.project(features)
    labels = None if selection.labels is None else selection.labels.tolist()
    alphas = _alphas(selection)
    distances = _distances(features, selection)
    kept = {index for index in selection.indices.tolist() if index >= 0}
    layout = encoded.layout
    places = zip(layout.tile.tolist(), layout.y.tolist(), layout.x.tolist(), strict=True)
    tokens = tuple(
        Token(
            tile=tile,
            y=y,
            x=x,
            score=float(score),
            kept=index in kept,
            cluster=None if labels is None or labels[index] < 0 else labels[index],
            alpha=alphas.get(index),
            distance=None if distances is None or np.isnan(distances[index]) else float(distances[index]),
            px=float(coordinates[index, 0]),
            py=float(coordinates[index, 1]),
        )
        for index, ((tile, y, x), score) in enumerate(zip(places, encoded.scores.float().tolist(), strict=True))
    )
    return View(title, image, encoded.grids[0], tokens, _note(encoded, selection))


def _alphas(selection: Selection) -> dict[int, float]:
    """The shrink factor of each kept token, by its index."""
    if selection.alpha is None:
        return {}
    return dict(zip(selection.indices.tolist(), selection.alpha.float().tolist(), strict=True))


def _distances(features: NDArray[np.float64], selection: Selection) -> NDArray[np.float64] | None:
    """The Euclidean distance [N] of each token to the centroid of its cluster; NaN for tokens of none."""
    if selection.labels is None or selection.centroids is None:
        return None
    labels, centroids = selection.labels.cpu().numpy(), to_numpy(selection.centroids)
    distances = np.linalg.norm(features - centroids[np.maximum(labels, 0)], axis=1)
    return np.where(labels < 0, np.nan, distances)


def _note(encoded: VisualTokens, selection: Selection) -> str:
    """Describe what the base crop cannot show of the selection."""
    notes = []
    cls = int((selection.indices < 0).sum())
    if cls:
        notes.append(f"{cls} kept token is the CLS token, which has no place in the image")
    if selection.merged is not None and bool(selection.merged.any()):
        notes.append(f"{int(selection.merged.sum())} of the kept tokens are mixtures of several")
    if len(encoded.grids) > 1:
        indices = selection.indices[selection.indices >= 0]
        other = int((encoded.layout.tile[indices] > 0).sum())
        notes.append(f"{other} kept tokens lie in {len(encoded.grids) - 1} further crops, which are not drawn")
    return "; ".join(notes)


def _rounded(value: Any) -> Any:
    """A number with five significant digits; all else as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
