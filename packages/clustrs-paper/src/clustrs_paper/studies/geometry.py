"""Geometry of the projected tokens of a model, in the numbers that ClustRS depends on.

tau is a distance, the salience adds norms to attention, and clustering needs tokens that differ in more than one
direction: what these amount to is a property of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustrs import palette
from clustrs.app.inspection import Values, principal_plane, to_numpy
from clustrs_paper.studies.result import StudyResult, distances, pyplot, single
from clustrs_paper.studies.settings import ImageStudyConfig

if TYPE_CHECKING:
    from clustrs.pruners import Selection
    from clustrs_paper.studies.images import EncodedImage, VisionEncoder

MEASURES = {
    "first_direction": "share of the variance of an image's tokens that lies in their first principal direction",
    "norm": "mean norm of a token",
    "norm_ratio": "norm of a token at the 95th percentile, in medians",
    "nearest_distance": "mean distance of a token from the nearest other one",
    "distance": "median distance between two tokens",
    "residual": "mean distance of a token from the centroid of its cluster",
    "beyond_tau": "share of tokens that are farther than tau from the centroid of their cluster",
    "attention_ratio": "largest attention score, in medians",
    "salience_ratio": "largest score with the norm-aware salience, in medians",
    "word_norm": "mean norm of a word embedding of the language model",
}
"""Measures of each image; the last one belongs to the model."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GeometryConfig(ImageStudyConfig):
    """Settings of the study: the number of images and of clusters."""

    count: int = 40
    keep: int = 16


def run(config: GeometryConfig) -> StudyResult:
    """Encode the images and describe their tokens."""
    from tqdm import tqdm

    from clustrs.pruners import ClustRS
    from clustrs_paper.studies.images import VisionEncoder, study_images

    images = study_images(config)
    encoder, method = VisionEncoder(config), ClustRS(keep=config.keep)
    columns = []
    for image in tqdm(images, desc="geometry", unit="image", disable=not config.progress):
        (encoded,) = encoder.encode([image])
        (selection,) = encoder.select(method, [encoded])
        columns.append(describe(encoded, selection, method.tau))
    rows = table(columns, word_norm(encoder), config.keep)
    return single("geometry", draw(rows, config.model), rows, findings(rows, config.model))


def describe(encoded: "EncodedImage", selection: "Selection", tau: float) -> dict[str, float]:
    """Measure the tokens of one image."""
    from clustrs.ops.kmeans import salience

    tokens, scores = to_numpy(encoded.tokens), to_numpy(encoded.scores)
    norms = np.linalg.norm(tokens, axis=1)
    between = distances(tokens, tokens)
    pairs = between[np.triu_indices(len(tokens), 1)]
    np.fill_diagonal(between, np.inf)
    residuals = centroid_distances(tokens, selection)
    salient = to_numpy(salience(encoded.tokens[None], encoded.scores[None])[0])
    return {
        "first_direction": principal_plane(tokens).shares[0],
        "norm": float(norms.mean()),
        "norm_ratio": ratio(float(np.percentile(norms, 95)), norms),
        "nearest_distance": float(between.min(1).mean()),
        "distance": float(np.median(pairs)),
        "residual": float(residuals.mean()),
        "beyond_tau": float((residuals > tau).mean()),
        "attention_ratio": ratio(float(scores.max()), scores),
        "salience_ratio": ratio(float(salient.max()), salient),
    }


def ratio(value: float, of: Values) -> float:
    """Return a value as a multiple of the median of `of`; NaN if that is 0."""
    middle = float(np.median(of))
    return value / middle if middle else float("nan")


def centroid_distances(tokens: Values, selection: "Selection") -> Values:
    """Return the distance of each token from the centroid of its cluster."""
    assert selection.labels is not None
    assert selection.centroids is not None
    labels = selection.labels.cpu().numpy()
    residuals: Values = np.linalg.norm(tokens - to_numpy(selection.centroids)[labels], axis=1)
    return residuals


def word_norm(encoder: "VisionEncoder") -> float:
    weight = encoder.model.get_input_embeddings().weight
    return float(np.linalg.norm(to_numpy(weight), axis=1).mean())


def table(columns: Sequence[dict[str, float]], words: float, keep: int) -> list[Row]:
    """Means over images with 95 % intervals; the word embeddings have one number."""
    from clustrs.evaluation.metrics import estimates

    names = list(columns[0])
    found = estimates(np.array([[column[name] for column in columns] for name in names]))
    rows: list[Row] = [
        {"measure": name, "mean": one.mean, "low": one.low, "high": one.high, "images": one.n, "clusters": keep}
        for name, one in zip(names, found, strict=True)
    ]
    return [*rows, {**dict.fromkeys(rows[0]), "measure": "word_norm", "mean": words}]


def draw(rows: Sequence[Row], model: str) -> Any:
    """A bar per number, each on an axis of its own."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 5, figsize=(13, 5.4), layout="constrained")
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for axis, row in zip(axes.flat, rows, strict=True):
        axis.bar([0], [row["mean"]], width=0.5, color=palette.SERIES[0])
        if row["low"] is not None:
            axis.plot([0, 0], [row["low"], row["high"]], color="black")
        axis.set(xticks=[], xlim=(-0.6, 0.6), title=row["measure"])
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(f"{model}; bars: 95 % intervals over images", fontsize=11, parse_math=False)
    return figure


def findings(rows: Sequence[Row], model: str) -> str:
    """Report every number with its meaning."""
    lines = [f"{model}, {rows[0]['images']} images, {rows[0]['clusters']} clusters; 95 % intervals over images."]
    for row in rows:
        interval = "" if row["low"] is None else f" ({row['low']:.3g} to {row['high']:.3g})"
        lines.append(f"  {row['mean']:.3g}{interval}: {MEASURES[row['measure']]}")
    return "\n".join(lines)
