"""Where the shrinkage of ClustRS (RRS) moves the tokens that it keeps.

Left all tokens of the image on their principal plane, right the largest cluster on its own: there the two directions
are chosen for that cluster, and a move that the left panel foreshortens can be seen.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustrs.studies import choices
from clustrs.studies.outcome import COLOURS, Outcome, pyplot
from clustrs.studies.projection import Plane, Values, numbers, principal_plane, spread

if TYPE_CHECKING:
    from clustrs.images.corruptions import Corruption
    from clustrs.pruners import Pruner
    from clustrs.studies.images import Eyes, StudyImage

CLEAN = "clean"
BEFORE, AFTER, CENTROID = "#0072b2", COLOURS["clustrs"], "#000000"


def add_options(command: argparse.ArgumentParser) -> None:
    choices.add_images(command, count=1)
    command.add_argument("--keep", default="16", help="a count (16) or a fraction (0.25) (default: %(default)s)")
    command.add_argument("--corrupt", metavar="NAME", help="spoil the images first (default: they stay clean)")
    command.add_argument("--levels", metavar="X,Y", help="a figure each (default: the corruption's strongest)")
    command.add_argument("--seed", type=int, default=0, help="of the corruption (default: %(default)s)")


@dataclass(frozen=True)
class Moves:
    """The tokens [N, D] of an image with their clusters [N], and of each cluster [k] the kept token and its numbers.

    `after` [k, D] is where the kept tokens are moved, `centroids` [k, D] is where they are moved to in part.
    """

    tokens: Values
    labels: Values
    kept: Values
    after: Values
    centroids: Values
    alpha: Values
    rows: Values
    columns: Values

    @property
    def before(self) -> Values:
        """The kept tokens as they were."""
        return self.tokens[self.kept.astype(int)]

    @property
    def sizes(self) -> Values:
        """How many tokens each cluster has."""
        return np.array([(self.labels == j).sum() for j in range(len(self.kept))])


def study(options: argparse.Namespace) -> list[Outcome]:
    from clustrs import validation
    from clustrs.pruners import ClustRS
    from clustrs.studies.images import Eyes, study_images

    validation.integer("--count", options.count, 1)
    if options.levels is not None and options.corrupt is None:
        raise ValueError(f"--levels {options.levels}: say of which corruption, for example --corrupt gaussian")
    corruptions: list[Corruption | None] = [None]
    if options.corrupt is not None:
        usual = choices.known_levels(options.corrupt)[-1:]
        corruptions = [*choices.read_corruptions(options.corrupt, options.levels, usual)]
    method = ClustRS(keep=validation.read_keep(options.keep))
    images = study_images(options.images, options.count)
    eyes = Eyes(options.model)
    titles = [CLEAN if corruption is None else str(corruption) for corruption in corruptions]
    names = choices.outcome_names("movement", [image.name for image in images], titles)
    outcomes = []
    for image, mine in zip(images, names, strict=True):
        spoilt = [image.spoilt(corruption, options.seed) for corruption in corruptions]
        for title, name, moves in zip(titles, mine, follow(eyes, spoilt, method), strict=True):
            rows = table(moves, image.name, title)
            about = f"{image.name}, {title}"
            outcomes.append(Outcome(name, draw(moves, about), rows, reading(rows, moves, about)))
    return outcomes


def follow(eyes: "Eyes", images: Sequence["StudyImage"], method: "Pruner") -> list[Moves]:
    """What ClustRS does to the tokens of each image."""
    seen = eyes.see(images)
    found = []
    for candidates, selection in zip(seen, eyes.choose(method, seen), strict=True):
        assert selection.labels is not None
        assert selection.centroids is not None
        assert selection.alpha is not None
        tokens = candidates.whole[candidates.rows]
        parts = (tokens, selection.labels, selection.indices, selection.tokens, selection.centroids, selection.alpha)
        found.append(Moves(*map(numbers, (*parts, candidates.row, candidates.column))))
    return found


def table(moves: Moves, image: str, corruption: str) -> list[dict[str, Any]]:
    """A row for each kept token; distances are over all dimensions, as the tokens are."""
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
            "row": int(moves.rows[int(token)]),
            "column": int(moves.columns[int(token)]),
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
    """Tokens grey, and of some clusters the kept token before and after, with an arrow, and the centroid."""
    chosen = list(clusters)
    before, after, centres = (plane.place(part[chosen]) for part in (moves.before, moves.after, moves.centroids))
    axis.scatter(*plane.place(tokens).T, s=14, color="#b8b8b8", linewidths=0, label="tokens")
    axis.scatter(*centres.T, s=26, color=CENTROID, marker="x", linewidths=1.1, label="centroid", zorder=3)
    hollow = {"facecolors": "none", "edgecolors": BEFORE, "linewidths": 1.4}
    axis.scatter(*before.T, s=44, **hollow, label="kept token before", zorder=4)
    exact = {"angles": "xy", "scale_units": "xy", "scale": 1}
    heads = {"headwidth": 7, "headlength": 9, "headaxislength": 8}
    axis.quiver(*before.T, *(after - before).T, **exact, **heads, units="inches", width=0.016, color=AFTER, zorder=5)
    axis.scatter(*after.T, s=18, color=AFTER, linewidths=0, label="kept token after", zorder=6)
    axis.set_xlabel(f"component 1 ({plane.shares[0]:.0%} of the variance)")
    axis.set_ylabel(f"component 2 ({plane.shares[1]:.0%})")
    axis.margins(0.08)


def reading(rows: Sequence[Mapping[str, Any]], moves: Moves, about: str) -> str:
    """How far the kept tokens move, and how many of the factors are at the bounds."""
    unit = spread(moves.tokens) or 1.0
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
