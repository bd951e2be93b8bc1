"""The tokens of an image on a plane, clean and spoilt, and which of them each method keeps.

PCA: the axes are those of the clean image, so that a token can be followed from one panel to the other. UMAP is
fitted to each panel's own tokens; its axes mean nothing. A kept token is drawn where it lies before anything is merged
or shrunk; VisionZip's CLS token has no place.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clustrs.studies import choices
from clustrs.studies.outcome import COLOURS, MARKERS, Outcome, pyplot
from clustrs.studies.projection import (
    Values,
    check_umap,
    distances,
    numbers,
    principal_plane,
    spread,
    umap_places,
)

if TYPE_CHECKING:
    from clustrs.images.corruptions import Corruption
    from clustrs.pruners import Pruner
    from clustrs.studies.images import Eyes, StudyImage

CLEAN = "clean"
Rows = Sequence[Mapping[str, Any]]


def add_options(command: argparse.ArgumentParser) -> None:
    choices.add_images(command, count=1)
    command.add_argument(
        "--methods", metavar="A,B", default="clustrs,fastervlm,divprune", help="which methods (default: %(default)s)"
    )
    command.add_argument("--keep", default="16", help="a count (16) or a fraction (0.25) (default: %(default)s)")
    command.add_argument("--corrupt", metavar="NAME", default="gaussian", help="a corruption (default: %(default)s)")
    command.add_argument("--levels", metavar="X,Y", help="a row of panels each (default: the paper's strongest)")
    command.add_argument("--no-umap", action="store_true", help="PCA alone; UMAP needs umap-learn")
    command.add_argument("--seed", type=int, default=0, help="of the corruption and of UMAP (default: %(default)s)")


def study(options: argparse.Namespace) -> list[Outcome]:
    from clustrs import validation
    from clustrs.studies.images import Eyes, study_images

    validation.integer("--count", options.count, 1)
    validation.integer("--seed", options.seed, 0)
    if not options.no_umap:
        check_umap()
    corruptions = choices.read_corruptions(options.corrupt, options.levels, choices.known_levels(options.corrupt)[-1:])
    methods = choices.read_methods(options.methods, options.keep)
    images = study_images(options.images, options.count)
    eyes = Eyes(options.model)
    names = choices.outcome_names("manifold", [image.name for image in images], [CLEAN])
    outcomes = []
    for image, (name,) in zip(images, names, strict=True):
        rows, shares = places(eyes, image, corruptions, methods, umap=not options.no_umap, seed=options.seed)
        outcomes.append(Outcome(name, draw(rows, shares, image.name), rows, reading(rows, shares, image.name)))
    return outcomes


def places(
    eyes: "Eyes",
    image: "StudyImage",
    corruptions: Sequence["Corruption"],
    methods: Sequence["Pruner"],
    *,
    umap: bool,
    seed: int,
) -> tuple[list[dict[str, Any]], tuple[float, float]]:
    """A row for each token of the clean image and of each spoilt one, and the PCA axes' shares of the variance.

    For each method there is whether it keeps the token, and how far the nearest kept token is. Distances, also that to
    the mean of the panel's tokens, are over all dimensions and in spreads of the clean tokens.
    """
    from tqdm import tqdm

    seen = eyes.see([image, *(image.spoilt(corruption, seed) for corruption in corruptions)])
    panels = [numbers(candidates.whole[candidates.rows]) for candidates in seen]
    plane, unit = principal_plane(panels[0]), spread(panels[0]) or 1.0
    kept = {
        method.name: [
            sorted({int(i) for i in selection.indices.tolist() if i >= 0}) for selection in eyes.choose(method, seen)
        ]
        for method in methods
    }
    rows: list[dict[str, Any]] = []
    titles = [CLEAN, *map(str, corruptions)]
    for number, title in enumerate(tqdm(titles, desc="UMAP", unit="panel", disable=not umap)):
        tokens, candidates = panels[number], seen[number]
        columns: dict[str, NDArray[Any]] = {
            "row": candidates.row.cpu().numpy(),
            "column": candidates.column.cpu().numpy(),
            "distance_to_mean": np.linalg.norm(tokens - tokens.mean(0), axis=1) / unit,
        }
        columns["pca_1"], columns["pca_2"] = plane.place(tokens).T
        if umap:
            columns["umap_1"], columns["umap_2"] = umap_places(tokens, seed).T
        for name, chosen in kept.items():
            columns[f"{name}_keeps"] = np.isin(np.arange(len(tokens)), chosen[number]).astype(int)
            columns[f"{name}_distance"] = _nearest(tokens, chosen[number]) / unit
        for i in range(len(tokens)):
            values = {key: column[i].item() for key, column in columns.items()}
            rows.append({"image": image.name, "corruption": title, "token": i, **values})
    return rows, plane.shares


def _nearest(tokens: Values, chosen: list[int]) -> Values:
    """The distance of each token to the nearest chosen one; NaN where a method keeps nothing but the CLS token."""
    return distances(tokens, tokens[chosen]).min(1) if chosen else np.full(len(tokens), np.nan)


def draw(rows: Rows, shares: tuple[float, float], name: str) -> Any:
    """Above the clean image, below each spoilt one, left PCA, right UMAP; without UMAP side by side."""
    plt = pyplot()
    titles = list(dict.fromkeys(row["corruption"] for row in rows))
    methods = methods_of(rows)
    kinds = ["pca", "umap"] if "umap_1" in rows[0] else ["pca"]
    lines, columns = (len(titles), 2) if len(kinds) == 2 else (1, len(titles))
    size = (5.6 * columns + 0.3, 4.6 * lines + 0.9)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    grid = axes if len(kinds) == 2 else axes.T
    for line, title in zip(grid, titles, strict=True):
        mine = [row for row in rows if row["corruption"] == title]
        for axis, kind in zip(line, kinds, strict=True):
            _draw_panel(axis, mine, kind, methods)
            axis.set_title(f"{kind.upper()}, {title}", fontsize=11)
    first = grid[0, 0]
    for axis in grid[:, 0]:
        axis.sharex(first)
        axis.sharey(first)
        axis.set_xlabel(f"component 1 of the clean tokens ({shares[0]:.0%} of their variance)", fontsize=9)
        axis.set_ylabel(f"component 2 ({shares[1]:.0%})", fontsize=9)
        axis.tick_params(labelsize=8)
    first.autoscale()
    for axis in grid[:, 1:].flat:
        axis.set(xticks=[], yticks=[])
        axis.set_xlabel("fitted to these tokens; axes without meaning", fontsize=9)
    handles, names = first.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), fontsize=10, frameon=False)
    figure.suptitle(f"Tokens of {name}", fontsize=13, parse_math=False)
    return figure


def methods_of(rows: Rows) -> list[str]:
    return [key.removesuffix("_keeps") for key in rows[0] if key.endswith("_keeps")]


def _draw_panel(axis: Any, rows: Rows, kind: str, methods: Sequence[str]) -> None:
    """All tokens grey; a method's own on top. Later methods have smaller marks, so that earlier ones show behind."""
    x, y = (np.array([row[f"{kind}_{i}"] for row in rows]) for i in (1, 2))
    axis.scatter(x, y, s=14, color="#b8b8b8", linewidths=0, label=f"all {len(rows)} tokens")
    sizes = np.geomspace(160, 32, len(methods)) if len(methods) > 1 else [60]
    for i, name in enumerate(methods):
        kept = np.array([bool(row[f"{name}_keeps"]) for row in rows])
        style = {"s": sizes[i], "marker": MARKERS.get(name, "h"), "color": COLOURS.get(name, "#444444")}
        label = f"{name} ({int(kept.sum())})"
        axis.scatter(x[kept], y[kept], **style, edgecolors="white", linewidths=0.5, label=label, zorder=3 + i)


def reading(rows: Rows, shares: tuple[float, float], name: str) -> str:
    """How the cloud of tokens changes, and how well each method's choice covers it."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["corruption"], []).append(row)
    clean, *spoilt = panels
    width = {
        title: float(np.sqrt(np.mean([row["distance_to_mean"] ** 2 for row in mine]))) for title, mine in panels.items()
    }
    lines = [
        f"{name}: the plane shows {sum(shares):.0%} of the variance of the {len(panels[clean])} clean tokens.",
        *(
            f"At {title} the tokens spread {width[title] / (width[clean] or 1):.2f} times as far as clean."
            for title in spoilt
        ),
    ]
    for title, mine in panels.items():
        reach = {method: float(np.mean([row[f"{method}_distance"] for row in mine])) for method in methods_of(rows)}
        told = ", ".join(f"{method} {reach[method]:.2f}" for method in sorted(reach, key=lambda method: reach[method]))
        lines.append(f"Mean distance to the nearest kept token, in spreads of the clean tokens, {title}: {told}.")
    return "\n".join(lines)
