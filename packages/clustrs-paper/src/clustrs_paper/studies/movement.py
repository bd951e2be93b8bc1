"""Movement of the kept tokens by the shrinkage of ClustRS (RRS).

On the left all tokens of the image on their principal plane, on the right the largest cluster alone: there the two
directions are those of that cluster, and a move that the left panel foreshortens can be seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustrs import palette
from clustrs.app.inspection import Plane, Values, principal_plane, to_numpy
from clustrs_paper.studies.result import StudyPart, StudyResult, pyplot, share_text, token_spread
from clustrs_paper.studies.settings import (
    LARGEST_SEED,
    ImageStudyConfig,
    Keep,
    part_names,
    resolve_corruptions,
    setting,
    strongest,
)

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.pruners import Pruner
    from clustrs_paper.studies.images import StudyImage, VisionEncoder

CLEAN = "clean"
BEFORE, AFTER, CENTROID = palette.SERIES[1], palette.color("clustrs"), "#000000"


@dataclass(frozen=True, kw_only=True)
class MovementConfig(ImageStudyConfig):
    """Settings of the study: a budget, and a corruption if any; every image and level has a figure of its own."""

    keep: Keep = 16
    corruption: str | None = None
    levels: tuple[float, ...] | None = None
    seed: int = setting(0, low=0, high=LARGEST_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels is not None and self.corruption is None:
            raise ValueError(f"corruption must be given with levels, got levels={self.levels!r} alone")


@dataclass(frozen=True)
class Moves:
    """The tokens [N, D] of an image with their clusters [N], and of each cluster [k] what is kept.

    `after` [k, D] is where the kept tokens are moved, towards their `centroids` [k, D]; `y` and `x` are positions.
    """

    tokens: Values
    labels: Values
    kept: Values
    after: Values
    centroids: Values
    alpha: Values
    y: Values
    x: Values

    @property
    def before(self) -> Values:
        """The kept tokens as they were."""
        return self.tokens[self.kept.astype(int)]

    @property
    def sizes(self) -> Values:
        """Number of tokens of each cluster."""
        return np.array([(self.labels == j).sum() for j in range(len(self.kept))])


def run(config: MovementConfig) -> StudyResult:
    """Follow the kept tokens of every image from where they are to where the shrinkage puts them."""
    from tqdm import tqdm

    from clustrs.pruners import ClustRS
    from clustrs_paper.studies.images import VisionEncoder, study_images

    corruptions: list[Corruption | None] = [None]
    if config.corruption is not None:
        corruptions = [*resolve_corruptions(config.corruption, config.levels, strongest(config.corruption))]
    method = ClustRS(keep=config.keep)
    images = study_images(config)
    encoder = VisionEncoder(config)
    titles = [CLEAN if corruption is None else str(corruption) for corruption in corruptions]
    names = part_names("movement", [image.name for image in images], titles)
    parts = []
    bar = tqdm(images, desc="movement", unit="image", disable=not config.progress)
    for image, image_names in zip(bar, names, strict=True):
        corrupted = [image.corrupted(corruption, config.seed) for corruption in corruptions]
        for title, name, moves in zip(titles, image_names, follow(encoder, corrupted, method), strict=True):
            rows = table(moves, image.name, title)
            about = f"{image.name}, {title}"
            parts.append(StudyPart(name, draw(moves, about), rows, findings(rows, moves, about)))
    return StudyResult(tuple(parts))


def follow(encoder: "VisionEncoder", images: Sequence["StudyImage"], method: "Pruner") -> list[Moves]:
    """Apply ClustRS to the tokens of each image."""
    encoded = encoder.encode(images)
    moves = []
    for image, selection in zip(encoded, encoder.select(method, encoded), strict=True):
        assert selection.labels is not None
        assert selection.centroids is not None
        assert selection.alpha is not None
        parts = (selection.labels, selection.indices, selection.tokens, selection.centroids, selection.alpha)
        moves.append(Moves(*map(to_numpy, (image.tokens, *parts, image.y, image.x))))
    return moves


def table(moves: Moves, image: str, corruption: str) -> list[dict[str, Any]]:
    """One table row per kept token; distances are over all dimensions, as the tokens are."""
    before, after, moved = (
        np.linalg.norm(a - b, axis=1)
        for a, b in (
            (moves.before, moves.centroids),
            (moves.after, moves.centroids),
            (moves.after, moves.before),
        )
    )
    return [
        {
            "image": image,
            "corruption": corruption,
            "token": int(token),
            "y": int(moves.y[int(token)]),
            "x": int(moves.x[int(token)]),
            "cluster_size": int(moves.sizes[j]),
            "alpha": float(moves.alpha[j]),
            "to_centroid_before": float(before[j]),
            "to_centroid_after": float(after[j]),
            "moved": float(moved[j]),
        }
        for j, token in enumerate(moves.kept)
    ]


def draw(moves: Moves, about: str) -> Any:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.4), layout="constrained")
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    plane = principal_plane(moves.tokens)
    _draw_moves(left, plane, moves, moves.tokens, range(len(moves.kept)))
    left.set_title(f"all {len(moves.tokens)} tokens, {len(moves.kept)} kept", fontsize=11)
    largest = int(moves.sizes.argmax())
    members = moves.tokens[moves.labels == largest]
    plane = principal_plane(members)
    _draw_moves(right, plane, moves, members, [largest])
    count = len(members)
    right.set_title(
        f"the largest cluster: {count} token{'s' * (count > 1)}, alpha = {moves.alpha[largest]:.2f}", fontsize=11
    )
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=10, frameon=False)
    figure.suptitle(f"Residual shrinkage of {about}", fontsize=13, parse_math=False)
    return figure


def _draw_moves(axis: Any, plane: Plane, moves: Moves, tokens: Values, clusters: Sequence[int]) -> None:
    """Tokens gray, and of some clusters the kept token before and after, with an arrow, and the centroid."""
    indices = list(clusters)
    before, after, centroids = (plane.project(part[indices]) for part in (moves.before, moves.after, moves.centroids))
    axis.scatter(*plane.project(tokens).T, s=14, color="#b8b8b8", linewidths=0, label="tokens")
    axis.scatter(*centroids.T, s=26, color=CENTROID, marker="x", linewidths=1.1, label="centroid", zorder=3)
    hollow = {"facecolors": "none", "edgecolors": BEFORE, "linewidths": 1.4}
    axis.scatter(*before.T, s=44, **hollow, label="kept token before", zorder=4)
    exact = {"angles": "xy", "scale_units": "xy", "scale": 1}
    heads = {"headwidth": 7, "headlength": 9, "headaxislength": 8}
    axis.quiver(*before.T, *(after - before).T, **exact, **heads, units="inches", width=0.016, color=AFTER, zorder=5)
    axis.scatter(*after.T, s=18, color=AFTER, linewidths=0, label="kept token after", zorder=6)
    axis.set_xlabel(f"component 1 ({share_text(plane.shares[0])} of the variance)")
    axis.set_ylabel(f"component 2 ({share_text(plane.shares[1])})")
    axis.margins(0.08)


def findings(rows: Sequence[Mapping[str, Any]], moves: Moves, about: str) -> str:
    """Report how far the kept tokens move, and how many factors are at the bounds."""
    unit = token_spread(moves.tokens) or 1.0
    alpha = np.array([row["alpha"] for row in rows])
    moved, before = (np.array([row[key] for row in rows]) for key in ("moved", "to_centroid_before"))
    alone = sum(row["cluster_size"] == 1 for row in rows)
    largest = max(rows, key=lambda row: row["cluster_size"])
    way = moved.sum() / (before.sum() or 1.0)
    size = largest["cluster_size"]
    lines = [
        f"{about}: alpha goes from {alpha.min():.2f} to {alpha.max():.2f}, median {np.median(alpha):.2f}.",
        f"The {len(rows)} kept tokens move by {moved.mean() / unit:.2f} spreads of all tokens on average, at most by "
        f"{moved.max() / unit:.2f}; together they go {way:.0%} of the way to their centroids.",
        f"The largest cluster has {size} of {len(moves.tokens)} tokens and alpha {largest['alpha']:.2f}.",
    ]
    if alone:
        lines.append(f"Unmoved, because alone in their clusters: {alone}.")
    return "\n".join(lines)
