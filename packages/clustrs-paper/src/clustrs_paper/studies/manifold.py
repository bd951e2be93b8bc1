"""The tokens of an image on a plane, clean and corrupted, and which of them each method keeps.

PCA: the axes are those of the clean image, so that a token can be followed from one panel to the other. UMAP is
fitted to each panel's own tokens; its axes mean nothing. A kept token is drawn where it lies before anything is merged
or shrunk; VisionZip's CLS token is not among the tokens and is not drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clustrs import palette
from clustrs.app.inspection import Values, principal_plane, to_numpy
from clustrs.plugins import install_hint
from clustrs.pruners.registry import display_label
from clustrs_paper.studies.result import StudyPart, StudyResult, distances, pyplot, share_text, token_spread
from clustrs_paper.studies.settings import (
    ImageStudyConfig,
    Keep,
    methods_by_label,
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
UMAP_SEEDS = 2**32 - 1
"""The largest seed that UMAP takes."""
Rows = Sequence[Mapping[str, Any]]
NEIGHBORS = 15
"""Neighbors of a token that UMAP tries to keep: its own default."""


@dataclass(frozen=True, kw_only=True)
class ManifoldConfig(ImageStudyConfig):
    """Settings of the study: methods, a budget, a corruption; every image has a figure of its own."""

    methods: tuple[str, ...] = ("clustrs", "fastervlm", "divprune")
    keep: Keep = 16
    corruption: str = "gaussian"
    levels: tuple[float, ...] | None = None
    umap: bool = True
    seed: int = setting(0, low=0, high=UMAP_SEEDS)


def run(config: ManifoldConfig) -> StudyResult:
    """Project the tokens of every image, clean and corrupted, and mark what each method keeps."""
    from clustrs_paper.studies.images import VisionEncoder, study_images

    if config.umap:
        check_umap()
    corruptions = resolve_corruptions(config.corruption, config.levels, strongest(config.corruption))
    methods = methods_by_label(config.methods, config.keep)
    images = study_images(config)
    encoder = VisionEncoder(config)
    names = part_names("manifold", [image.name for image in images], [CLEAN])
    parts = []
    for image, (name,) in zip(images, names, strict=True):
        rows, shares = coordinates(encoder, image, corruptions, methods, config)
        parts.append(StudyPart(name, draw(rows, shares, image.name), rows, findings(rows, shares, image.name)))
    return StudyResult(tuple(parts))


def coordinates(
    encoder: "VisionEncoder",
    image: "StudyImage",
    corruptions: Sequence["Corruption"],
    methods: Mapping[str, "Pruner"],
    config: ManifoldConfig,
) -> tuple[list[dict[str, Any]], tuple[float, float]]:
    """One table row per token of the clean image and of each corrupted one, and the PCA axes' shares of the variance.

    For each method there is whether it keeps the token, and how far the nearest kept token is. Distances, also that to
    the mean of the panel's tokens, are over all dimensions and in spreads of the clean tokens.
    """
    from tqdm import tqdm

    encoded = encoder.encode([image, *(image.corrupted(corruption, config.seed) for corruption in corruptions)])
    panels = [to_numpy(one.tokens) for one in encoded]
    plane, unit = principal_plane(panels[0]), token_spread(panels[0]) or 1.0
    kept = {
        label: [
            sorted({i for i in selection.indices.tolist() if i >= 0}) for selection in encoder.select(method, encoded)
        ]
        for label, method in methods.items()
    }
    rows: list[dict[str, Any]] = []
    titles = [CLEAN, *map(str, corruptions)]
    bar = tqdm(titles, desc=f"UMAP of {image.name}", unit="panel", disable=not (config.umap and config.progress))
    for panel, title in enumerate(bar):
        tokens, one = panels[panel], encoded[panel]
        columns: dict[str, NDArray[Any]] = {
            "y": one.y.cpu().numpy(),
            "x": one.x.cpu().numpy(),
            "distance_to_mean": np.linalg.norm(tokens - tokens.mean(0), axis=1) / unit,
        }
        columns["pca_1"], columns["pca_2"] = plane.project(tokens).T
        if config.umap:
            columns["umap_1"], columns["umap_2"] = umap_coordinates(tokens, config.seed).T
        for label, indices in kept.items():
            columns[f"{label}_keeps"] = np.isin(np.arange(len(tokens)), indices[panel]).astype(int)
            columns[f"{label}_distance"] = _nearest(tokens, indices[panel]) / unit
        for i in range(len(tokens)):
            values = {key: column[i].item() for key, column in columns.items()}
            rows.append({"image": image.name, "corruption": title, "token": i, **values})
    return rows, plane.shares


def _nearest(tokens: Values, kept: list[int]) -> Values:
    """The distance of each token to the nearest kept one; NaN where a method keeps nothing but the CLS token."""
    return distances(tokens, tokens[kept]).min(1) if kept else np.full(len(tokens), np.nan)


def draw(rows: Rows, shares: tuple[float, float], name: str) -> Any:
    """Clean image on top, corrupted ones below, PCA left, UMAP right; without UMAP side by side."""
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
        subset = [row for row in rows if row["corruption"] == title]
        for axis, kind in zip(line, kinds, strict=True):
            _draw_panel(axis, subset, kind, methods)
            axis.set_title(f"{kind.upper()}, {title}", fontsize=11)
    first = grid[0, 0]
    for axis in grid[:, 0]:
        axis.sharex(first)
        axis.sharey(first)
        axis.set_xlabel(f"component 1 of the clean tokens ({share_text(shares[0])} of their variance)", fontsize=9)
        axis.set_ylabel(f"component 2 ({share_text(shares[1])})", fontsize=9)
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
    """All tokens gray; a method's own on top. Later methods have smaller marks, so that earlier ones show behind."""
    x, y = (np.array([row[f"{kind}_{i}"] for row in rows]) for i in (1, 2))
    axis.scatter(x, y, s=14, color="#b8b8b8", linewidths=0, label=f"all {len(rows)} tokens")
    sizes = np.geomspace(160, 32, len(methods)) if len(methods) > 1 else [60]
    for i, name in enumerate(methods):
        kept = np.array([bool(row[f"{name}_keeps"]) for row in rows])
        style = {"s": sizes[i], "marker": palette.marker(name), "color": palette.color(name)}
        label = f"{display_label(name)} ({int(kept.sum())})"
        axis.scatter(x[kept], y[kept], **style, edgecolors="white", linewidths=0.5, label=label, zorder=3 + i)


def findings(rows: Rows, shares: tuple[float, float], name: str) -> str:
    """Report how the cloud of tokens changes, and how well each selection covers it."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(row["corruption"], []).append(row)
    clean, *corrupted = panels
    width = {
        title: float(np.sqrt(np.mean([row["distance_to_mean"] ** 2 for row in panel])))
        for title, panel in panels.items()
    }
    lines = [
        f"{name}: the plane shows {sum(shares):.0%} of the variance of the {len(panels[clean])} clean tokens.",
        *(
            f"At {title} the tokens spread {width[title] / (width[clean] or 1):.2f} times as far as clean."
            for title in corrupted
        ),
    ]
    for title, panel in panels.items():
        reach = {method: float(np.mean([row[f"{method}_distance"] for row in panel])) for method in methods_of(rows)}
        told = ", ".join(f"{method} {reach[method]:.2f}" for method in sorted(reach, key=lambda method: reach[method]))
        lines.append(f"Mean distance to the nearest kept token, in spreads of the clean tokens, {title}: {told}.")
    return "\n".join(lines)


def umap_coordinates(tokens: Values, seed: int) -> Values:
    """Return the UMAP coordinates [N, 2] of tokens [N, D]; one thread and a fixed seed make them reproducible."""
    check_umap()
    umap = import_module("umap")
    fit = umap.UMAP(n_neighbors=min(NEIGHBORS, len(tokens) - 1), random_state=seed, n_jobs=1)
    return np.asarray(fit.fit_transform(tokens), dtype=np.float64)


def check_umap() -> None:
    """Raise a ValueError that says how to get UMAP, if it is missing."""
    if find_spec("umap") is None:
        hint = install_hint("studies", package="clustrs-paper")
        raise ValueError(f"umap-learn is not installed: {hint}; --no-umap draws PCA alone")
