"""Stability of the ranking by attention, and of the tokens that each method keeps, under noise.

The paper's table is about the ranking alone: by how many ranks the 15 most attended tokens of the clean image move,
and how many of them are still among the first 15. In addition there is, for every method, which fraction of the
positions it keeps in the clean image it keeps again (the CLS token, which VisionZip always keeps, is left out), and how
far what the language model gets has moved: from each kept token of the clean image to the nearest one of the noisy
image, on average, in units of the clean tokens' spread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustrs import palette
from clustrs.app.inspection import Values, to_numpy
from clustrs.pruners.registry import display_label
from clustrs_paper.studies.result import StudyResult, distances, level_ticks, places, pyplot, single, token_spread
from clustrs_paper.studies.settings import LARGEST_SEED, Keep, LossImageStudyConfig, methods_by_label, setting

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.pruners import Pruner
    from clustrs_paper.studies.images import StudyImage, VisionEncoder

METHODS = ("clustrs", "fastervlm", "divprune", "visionzip", "vispruner", "random", "grid")
GAUSSIAN = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)
"""The paper's levels and 0."""
RANK_CHANGE, TOP_OVERLAP = "rank_change", "top_overlap"
KEPT_OVERLAP, DISTANCE = "kept_overlap", "feature_distance"
RANKING = "ranking"
"""Stands for a method where the ranking by attention itself is measured."""


@dataclass(frozen=True, kw_only=True)
class StabilityConfig(LossImageStudyConfig):
    """Settings of the study: methods, a budget, and a corruption at some levels."""

    count: int = 40
    methods: tuple[str, ...] = METHODS
    keep: Keep = 16
    top: int = 15
    corruption: str = "gaussian"
    levels: tuple[float, ...] | None = None
    seed: int = setting(0, low=0, high=LARGEST_SEED)


@dataclass(frozen=True)
class Measurement:
    """Measurement on every image: `tokens` is how many of the ranking count, or how many a method keeps."""

    corruption: str
    level: str
    measure: str
    method: str
    tokens: int


def run(config: StabilityConfig) -> StudyResult:
    """Encode every image clean and at each level, and compare rankings and selections."""
    from clustrs_paper.studies.curves import study_corruptions
    from clustrs_paper.studies.images import VisionEncoder, study_images

    methods = methods_by_label(config.methods, config.keep)
    corruptions, about = study_corruptions(config, GAUSSIAN if config.corruption == "gaussian" else None)
    images = study_images(config)
    measurements, values, n = measure(VisionEncoder(config), images, corruptions, methods, config)
    rows = table(measurements, values, n)
    return single("stability", draw(rows), rows, "\n".join(filter(None, (findings(rows), about))))


def ranks(attention: Values) -> Values:
    """The rank of each token when they are sorted by attention, 0 for the largest; ties go to the lower index."""
    order = np.argsort(-attention, kind="stable")
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order))
    return rank


def rank_stability(clean: Values, noisy: Values, top: int) -> tuple[float, float]:
    """Mean absolute change of rank of the `top` most attended clean tokens, and the fraction of them still on top."""
    before, after = ranks(clean), ranks(noisy)
    first = before < top
    return float(np.abs(before - after)[first].mean()), float((after[first] < top).mean())


def chance(top: int, n: int) -> tuple[float, float]:
    """Return the mean of `rank_stability` over random second rankings of the n tokens."""
    every = np.arange(n)
    return float(np.mean([np.abs(every - rank).mean() for rank in range(top)])), top / n


def kept_overlap(clean: Values, noisy: Values) -> float:
    """The fraction of the positions kept in the clean image that are kept in the noisy one as well, CLS left out."""
    before, after = ({int(i) for i in kept if i >= 0} for kept in (clean, noisy))
    return len(before & after) / len(before) if before else 1.0


def feature_distance(clean: Values, noisy: Values, unit: float) -> float:
    """The mean over clean tokens [k, D] of the distance to the nearest noisy one, in a unit of length."""
    return float(distances(clean, noisy).min(1).mean()) / (unit or 1.0)


def measure(
    encoder: "VisionEncoder",
    images: Sequence["StudyImage"],
    corruptions: Sequence["Corruption"],
    methods: Mapping[str, "Pruner"],
    config: StabilityConfig,
) -> tuple[list[Measurement], Values, int]:
    """Measurements, their values [measurements, images], and how many tokens an image has."""
    from tqdm import tqdm

    columns: list[dict[Measurement, float]] = []
    n = 0
    for image in tqdm(images, desc="stability", unit="image", disable=not config.progress):
        encoded = encoder.encode([image, *(image.corrupted(corruption, config.seed) for corruption in corruptions)])
        clean, n = encoded[0], len(encoded[0].tokens)
        unit = token_spread(to_numpy(clean.tokens))
        column: dict[Measurement, float] = {}
        for corruption, noisy in zip(corruptions, encoded[1:], strict=True):
            name = (corruption.name, corruption.level_text)
            stability = rank_stability(to_numpy(clean.scores), to_numpy(noisy.scores), min(config.top, n))
            for what, value in zip((RANK_CHANGE, TOP_OVERLAP), stability, strict=True):
                column[Measurement(*name, what, RANKING, min(config.top, n))] = value
        for label, method in methods.items():
            before, *after = encoder.select(method, encoded)
            for corruption, selection in zip(corruptions, after, strict=True):
                name = (corruption.name, corruption.level_text)
                overlap = kept_overlap(to_numpy(before.indices), to_numpy(selection.indices))
                moved = feature_distance(to_numpy(before.tokens), to_numpy(selection.tokens), unit)
                column[Measurement(*name, KEPT_OVERLAP, label, method.count(n))] = overlap
                column[Measurement(*name, DISTANCE, label, method.count(n))] = moved
        columns.append(column)
    order = (RANK_CHANGE, TOP_OVERLAP, KEPT_OVERLAP, DISTANCE)
    measurements = sorted(columns[0], key=lambda measurement: order.index(measurement.measure))
    return measurements, np.array([[column[one] for column in columns] for one in measurements]), n


def table(measurements: Sequence[Measurement], values: Values, n: int) -> list[dict[str, Any]]:
    """Means over images with 95 % intervals, what chance would give, and what the paper has for LLaVA-1.5-7B."""
    from clustrs.evaluation.metrics import estimates

    printed = paper_values()
    rows = []
    for cell, estimate in zip(measurements, estimates(values), strict=True):
        moved, share = chance(cell.tokens, n)
        by_chance = {RANK_CHANGE: moved, TOP_OVERLAP: share, KEPT_OVERLAP: share}
        rows.append(
            {
                "corruption": cell.corruption,
                "level": cell.level,
                "measure": cell.measure,
                "method": cell.method,
                "tokens": cell.tokens,
                "of": n,
                "mean": estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "images": estimate.n,
                "by_chance": by_chance.get(cell.measure),
                "paper": printed.get((cell.corruption, float(cell.level), cell.measure, cell.tokens)),
            }
        )
    return rows


def paper_values() -> dict[tuple[str, float, str, int], float]:
    """The paper's table by corruption, level, measure and how many tokens count; overlaps as fractions."""
    from clustrs_paper.tables import paper_table

    values = {}
    for cell in paper_table("rank_instability"):
        overlap = cell.metric == "overlap"
        what = TOP_OVERLAP if overlap else RANK_CHANGE
        values["gaussian", cell.level or 0.0, what, cell.keep or 0] = cell.value / 100 if overlap else cell.value
    return values


Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> Any:
    """The ranking above, the methods below; left what moves, right what stays."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11.5, 8.4), layout="constrained")
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    levels = list(dict.fromkeys(row["level"] for row in rows))
    tokens = {row["measure"]: (row["tokens"], row["of"]) for row in rows}
    top, n = tokens[RANK_CHANGE]
    kept = sorted({row["tokens"] for row in rows if row["measure"] == KEPT_OVERLAP})
    budget = f"k = {', '.join(map(str, kept))} of {n}"
    _draw_ranking(axes[0, 0], rows, RANK_CHANGE, levels, 1)
    _draw_ranking(axes[0, 1], rows, TOP_OVERLAP, levels, 100)
    _draw_methods(axes[1, 0], rows, DISTANCE, levels, 1)
    _draw_methods(axes[1, 1], rows, KEPT_OVERLAP, levels, 100)
    texts = (
        (f"Ranking by attention: move of the clean top {top}", f"mean absolute change of rank (of {n})"),
        (f"Ranking by attention: overlap of the top {top}", f"still in the top {top} (%)"),
        (f"Methods, {budget}: how far the kept tokens move", "distance to nearest token (spreads of clean tokens)"),
        (f"Methods, {budget}: positions kept again", "overlap with the clean image's (%)"),
    )
    for axis, (title, label) in zip(axes.flat, texts, strict=True):
        axis.set_title(title, fontsize=11)
        axis.set_ylabel(label)
        level_ticks(axis, _places(levels), levels)
        axis.set_xlabel(f"{rows[0]['corruption']} level (log scale)")
        axis.grid(axis="y", alpha=0.3)
    axes[0, 1].legend(fontsize=9)
    handles, names = axes[1, 1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    images = rows[0]["images"]
    bars = "; bars and bands: 95 % intervals over images" if images > 1 else ""
    figure.suptitle(f"Stability over {images} image{'s' * (images > 1)}{bars}", fontsize=13)
    return figure


def _places(levels: Sequence[str]) -> list[float]:
    return places([float(level) for level in levels])


def _series(rows: Rows, measure: str, method: str, levels: Sequence[str], factor: float) -> tuple[Values, Values]:
    """Means [levels] and the lengths [2, levels] of the bars below and above them."""
    by_level = {row["level"]: row for row in rows if (row["measure"], row["method"]) == (measure, method)}
    means = np.array([by_level[level]["mean"] for level in levels])
    lows, highs = (
        np.array([row["mean"] if row[end] is None else row[end] for row in (by_level[level] for level in levels)])
        for end in ("low", "high")
    )
    return factor * means, factor * np.maximum([means - lows, highs - means], 0)


def _draw_ranking(axis: Any, rows: Rows, measure: str, levels: Sequence[str], factor: float) -> None:
    means, bars = _series(rows, measure, RANKING, levels, factor)
    subset = [row for row in rows if row["measure"] == measure]
    axis.axhline(factor * subset[0]["by_chance"], color="#777777", linestyle=":", label="a random order")
    style = {"color": palette.SERIES[0], "marker": "o", "capsize": 3}
    axis.errorbar(_places(levels), means, bars, **style, label="measured here")
    printed = {row["level"]: row["paper"] for row in subset if row["paper"] is not None}
    if printed:
        shown = [place for place, level in zip(_places(levels), levels, strict=True) if level in printed]
        values = [factor * printed[level] for level in levels if level in printed]
        style = {"color": "black", "marker": "s", "linestyle": "none", "markersize": 8, "fillstyle": "none"}
        axis.plot(shown, values, **style, label="the paper's (LLaVA-1.5-7B, 576 tokens)", zorder=3)
    axis.set_ylim(bottom=-0.04 * max(axis.get_ylim()))


def _draw_methods(axis: Any, rows: Rows, measure: str, levels: Sequence[str], factor: float) -> None:
    """One line per method, every marker at its tick; intervals are bands, which may lie on top of each other."""
    names = list(dict.fromkeys(row["method"] for row in rows if row["measure"] == measure))
    for name in names:
        means, (below, above) = _series(rows, measure, name, levels, factor)
        color, x, label = palette.color(name), _places(levels), display_label(name)
        axis.plot(x, means, color=color, marker=palette.marker(name), linewidth=1.4, markersize=5.5, label=label)
        axis.fill_between(x, means - below, means + above, color=color, alpha=0.12, linewidth=0)
    axis.set_ylim(bottom=0)


def findings(rows: Rows) -> str:
    """The mildest and the strongest level in words, and how the methods stand at the strongest."""
    levels = list(dict.fromkeys(row["level"] for row in rows))
    told = [level for level in levels if float(level)] or levels
    at = {(row["level"], row["measure"], row["method"]): row for row in rows}
    corruption = rows[0]["corruption"]
    lines = []
    for level in dict.fromkeys((told[0], told[-1])):
        change, overlap = (at[level, what, RANKING] for what in (RANK_CHANGE, TOP_OVERLAP))
        others = [f"a random order {change['by_chance']:.0f} and {overlap['by_chance']:.0%}"]
        if change["paper"] is not None:
            others.insert(0, f"the paper's, LLaVA-1.5-7B: {change['paper']:.0f} and {overlap['paper']:.0%}")
        lines.append(
            f"{corruption}:{level}: the {change['tokens']} most attended of {change['of']} tokens move by "
            f"{change['mean']:.0f} ranks, {overlap['mean']:.0%} of them stay on top ({'; '.join(others)})."
        )
    last = told[-1]
    names = list(dict.fromkeys(row["method"] for row in rows if row["measure"] == KEPT_OVERLAP))
    fixed = [name for name in names if all(at[level, KEPT_OVERLAP, name]["mean"] == 1 for level in levels)]
    free = sorted(set(names) - set(fixed), key=lambda name: -at[last, KEPT_OVERLAP, name]["mean"])
    if free:
        shares = ", ".join(f"{name} {at[last, KEPT_OVERLAP, name]['mean']:.0%}" for name in free)
        by_chance = at[last, KEPT_OVERLAP, free[0]]["by_chance"]
        lines.append(f"Positions kept again at {corruption}:{last}: {shares} (by chance {by_chance:.0%}).")
    if fixed:
        lines.append(f"The same positions at every level are kept by {', '.join(fixed)}.")
    near = sorted(names, key=lambda name: at[last, DISTANCE, name]["mean"])
    moved = ", ".join(f"{name} {at[last, DISTANCE, name]['mean']:.2f}" for name in near)
    lines.append(f"Distance to the nearest kept token at {corruption}:{last}, in spreads of the clean tokens: {moved}.")
    return "\n".join(lines)
