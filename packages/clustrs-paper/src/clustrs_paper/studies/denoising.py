"""Denoising: does the shrinkage (RRS) bring noisy kept tokens nearer to the same tokens of the clean image?

ClustRS selects in the noisy image. A kept token y has a clean counterpart x, at the same position, and a centroid c;
the shrinkage gives alpha y + (1 - alpha) c. Distances to x are relative: the mean over an image's kept tokens, divided
by the mean norm of all tokens of the clean image. Changes are relative to the distance before shrinkage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustrs import palette
from clustrs.app.inspection import Values, to_numpy
from clustrs_paper.studies.result import StudyResult, level_ticks, places, pyplot, single
from clustrs_paper.studies.settings import LARGEST_SEED, Keep, LossImageStudyConfig, setting

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.evaluation.metrics import Estimate
    from clustrs.pruners import Pruner, Selection
    from clustrs_paper.studies.images import EncodedImage, StudyImage, VisionEncoder

BATCH_SIZE = 8
"""Images that go through the vision tower together."""
SERIES = {
    "before": ("before shrinkage", "black", "s", "-"),
    "after": ("after shrinkage (RRS)", palette.color("clustrs"), "o", "-"),
    "constant": ("best constant alpha", palette.SERIES[1], "^", "--"),
    "bound": ("best alpha of each token (bound)", palette.SERIES[2], "D", ":"),
}
"""Label, color, marker and line of each series of the figure."""
Row = dict[str, Any]
CHANGES = ("after", "constant", "bound", "centroid")
"""Distances that are compared with the one before shrinkage; "centroid" is a shrinkage with alpha 0."""


@dataclass(frozen=True, kw_only=True)
class DenoisingConfig(LossImageStudyConfig):
    """Settings of the study: budgets, and a corruption at some levels."""

    count: int = 24
    keep: tuple[Keep, ...] = (16,)
    corruption: str = "gaussian"
    levels: tuple[float, ...] | None = None
    seed: int = setting(0, low=0, high=LARGEST_SEED)


def run(config: DenoisingConfig) -> StudyResult:
    """Measure the distance from the clean tokens before and after shrinkage, at every budget and level."""
    from tqdm import tqdm

    from clustrs.pruners import get_method
    from clustrs_paper.studies.curves import study_corruptions
    from clustrs_paper.studies.images import VisionEncoder, study_images

    methods = [get_method("clustrs", keep=keep) for keep in config.keep]
    corruptions, about = study_corruptions(config)
    conditions = [None, *corruptions]
    images = study_images(config)
    encoder = VisionEncoder(config)
    total = len(images) * len(conditions)
    with tqdm(total=total, desc="denoising", unit="image", disable=not config.progress) as bar:
        kept = measure(encoder, images, methods, conditions, config.seed, bar.update)
    rows = [
        summarize(method.keep, corruption, kept[m][c])
        for m, method in enumerate(methods)
        for c, corruption in enumerate(conditions)
    ]
    text = "\n".join(filter(None, (findings(rows), about)))
    return single("denoising", draw(rows, config.model), rows, text)


def measure(
    encoder: "VisionEncoder",
    images: "Sequence[StudyImage]",
    methods: "Sequence[Pruner]",
    conditions: "Sequence[Corruption | None]",
    seed: int,
    advance: Callable[[int], Any],
) -> "list[list[list[KeptTokens]]]":
    """For each method and condition (None: clean) what is kept of each image."""

    kept: list[list[list[KeptTokens]]] = [[[] for _ in conditions] for _ in methods]
    for start in range(0, len(images), BATCH_SIZE):
        batch = images[start : start + BATCH_SIZE]
        clean = encoder.encode(batch)
        for c, corruption in enumerate(conditions):
            noisy = clean if corruption is None else encoder.encode([one.corrupted(corruption, seed) for one in batch])
            for m, method in enumerate(methods):
                selections = encoder.select(method, noisy)
                kept[m][c] += [compare(*parts) for parts in zip(clean, noisy, selections, strict=True)]
            advance(len(batch))
    return kept


def level_name(row: Row) -> str:
    return "clean" if row["level"] is None else f"{row['level']:g}"


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of one image, one number each: `before` and `after` are distances from the clean token.

    With d = y - c and e = x - c the squared distance after a shrinkage by alpha is alpha^2 dd - 2 alpha de + ee.
    `norm` is the mean norm of the clean image's tokens.
    """

    before: Values
    after: Values
    alpha: Values
    dd: Values
    de: Values
    ee: Values
    norm: float

    def distances(self, alpha: Values | float) -> Values:
        """From the clean tokens, had the shrinkage been by `alpha`."""
        return np.sqrt(np.maximum(0.0, alpha**2 * self.dd - 2 * alpha * self.de + self.ee))


def compare(clean: "EncodedImage", noisy: "EncodedImage", selection: "Selection") -> KeptTokens:
    """Compare a selection in a noisy image with the clean image."""
    centroids, alpha = selection.centroids, selection.alpha
    assert centroids is not None
    assert alpha is not None
    every = to_numpy(clean.tokens)
    indices = selection.indices.cpu().numpy()
    x, y = every[indices], to_numpy(noisy.tokens)[indices]
    c, shrunk = to_numpy(centroids), to_numpy(selection.tokens)
    d, e = y - c, x - c
    return KeptTokens(
        before=np.linalg.norm(y - x, axis=1),
        after=np.linalg.norm(shrunk - x, axis=1),
        alpha=to_numpy(alpha),
        dd=(d * d).sum(1),
        de=(d * e).sum(1),
        ee=(e * e).sum(1),
        norm=float(np.linalg.norm(every, axis=1).mean()),
    )


def best_alpha(dd: Values | float, de: Values | float) -> Values:
    """The alpha in [0, 1] with the least squared distance; 1 where token and centroid are the same."""
    dd, de = np.asarray(dd, dtype=np.float64), np.asarray(de, dtype=np.float64)
    return np.clip(np.divide(de, dd, out=np.ones_like(dd), where=dd > 0), 0.0, 1.0)


def summarize(keep: int | float, corruption: "Corruption | None", kept: Sequence[KeptTokens]) -> Row:
    """Average over the images, with 95 % bootstrap intervals over them; alphas are over all kept tokens."""
    from clustrs.evaluation.metrics import estimates

    constant = float(best_alpha(sum(k.dd.sum() for k in kept), sum(k.de.sum() for k in kept)))
    series: dict[str, list[float]] = {name: [] for name in ("before", *CHANGES)}
    for k in kept:
        each = {
            "before": k.before,
            "after": k.after,
            "constant": k.distances(constant),
            "bound": k.distances(best_alpha(k.dd, k.de)),
            "centroid": k.distances(0.0),
        }
        for name, distances in each.items():
            series[name].append(float(distances.mean()) / k.norm)
    for name in CHANGES:
        pairs = zip(series["before"], series[name], strict=True)
        series[f"{name}_change"] = [now / before - 1 if before else np.nan for before, now in pairs]
    row: Row = {
        "keep": keep,
        "corruption": "clean" if corruption is None else corruption.name,
        "level": None if corruption is None else corruption.level,
        "images": len(kept),
        "tokens": sum(len(k.before) for k in kept),
    }
    for name, estimate in zip(series, estimates(np.array(list(series.values()))), strict=True):
        row |= spread(name, estimate)
    alphas = np.concatenate([k.alpha for k in kept])
    sides = np.sign(np.concatenate([k.after - k.before for k in kept]))
    row |= {"mean_alpha": float(alphas.mean()), "best_constant_alpha": constant}
    return row | {"share_nearer": float((sides < 0).mean()), "share_farther": float((sides > 0).mean())}


def spread(name: str, estimate: "Estimate") -> Row:
    return {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def draw(rows: Sequence[Row], model: str) -> Any:
    """One column per budget; from top to bottom the distances, how they change, and the alphas."""
    plt = pyplot()
    keeps = list(dict.fromkeys(row["keep"] for row in rows))
    figure, axes = plt.subplots(
        3,
        len(keeps),
        figsize=(max(6.4, 4.4 * len(keeps)), 8.4),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey="row",
        height_ratios=(4, 4, 3),
    )
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for (distance, change, alpha), keep in zip(axes.T, keeps, strict=True):
        subset = [row for row in rows if row["keep"] == keep]
        for name in ("before", "after"):
            draw_series(distance, subset, name, SERIES[name])
        for name in ("after", "constant", "bound"):
            draw_series(change, subset, f"{name}_change", SERIES[name], factor=100)
        change.axhline(0, color="black", linewidth=1)
        for name, of in (("mean_alpha", "after"), ("best_constant_alpha", "constant")):
            draw_series(alpha, subset, name, SERIES[of])
        distance.set_title(f"k = {keep}")
        level_ticks(alpha, places([row["level"] or 0.0 for row in subset]), [level_name(row) for row in subset])
        alpha.set(xlabel=f"{subset[-1]['corruption']} level (log scale)", ylim=(-0.05, 1.05))
        for axis in (distance, change, alpha):
            axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="distance from the clean token\n/ mean norm of clean tokens", ylim=(0, None))
    axes[1][0].set_ylabel("change of that distance, %\n(below 0: nearer)")
    axes[2][0].set_ylabel("mean alpha\n(1: unchanged)")
    pairs = [pair for axis in axes[:2, 0] for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    shown = {label: line for line, label in pairs}
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(model, fontsize=11, parse_math=False)
    return figure


def draw_series(axis: Any, rows: Sequence[Row], name: str, style: tuple[str, str, str, str], factor: float = 1) -> None:
    """A line through the levels that have a value, with its interval where there is one."""
    label, color, marker, line = style
    at_level = zip(places([row["level"] or 0.0 for row in rows]), rows, strict=True)
    there = [(x, row) for x, row in at_level if row[name] is not None]
    at = [x for x, _ in there]
    axis.plot(at, [factor * row[name] for _, row in there], line, color=color, marker=marker, label=label)
    if there and there[0][1].get(f"{name}_low") is not None:
        bounds = [[factor * row[f"{name}_{end}"] for _, row in there] for end in ("low", "high")]
        axis.fill_between(at, *bounds, color=color, alpha=0.15, linewidth=0)


def findings(rows: Sequence[Row]) -> str:
    """Report at which levels the shrinkage helps, and the bound on any shrinkage."""
    lines = [
        f"How the distance from the clean tokens changes, mean over {rows[0]['images']} images. Nearer and "
        "farther: the 95 % interval over images leaves no doubt."
    ]
    for keep in dict.fromkeys(row["keep"] for row in rows):
        clean, *noisy = [row for row in rows if row["keep"] == keep]
        verdicts = [verdict(row) for row in noisy]
        parts = []
        for words in dict.fromkeys(verdicts):
            here = [row for row, said in zip(noisy, verdicts, strict=True) if said == words]
            parts.append(f"{words} at " + ", ".join(f"{level_name(row)} ({change(row, 'after')})" for row in here))
        lines.append(f"k = {keep}, {noisy[0]['corruption']}: RRS brings kept tokens {'; '.join(parts)}.")
        lines.append(
            f"  The best constant alpha would give {', '.join(change(row, 'constant') for row in noisy)}; "
            f"the best alpha of each token {', '.join(change(row, 'bound') for row in noisy)}: no shrinkage towards "
            "these centroids can do more."
        )
        alphas = ("mean_alpha", "best_constant_alpha")
        used, best = (", ".join(f"{row[name]:.2f}" for row in noisy) for name in alphas)
        lines.append(
            f"  Mean alpha of RRS: {used}; best constant: {best}. On clean images RRS moves tokens by "
            f"{clean['after']:.1%} of their mean norm."
        )
    return "\n".join(lines)


def change(row: Row, name: str) -> str:
    """Format the mean relative change of the distance over images."""
    value = row[f"{name}_change"]
    return "no distance before" if value is None else f"{value:+.1%}"


def verdict(row: Row) -> str:
    """Judge by the interval over images whether the shrinkage helped."""
    value, low, high = (row[f"after_change{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return "away"
    if low is None or high is None:
        return f"{'nearer' if value < 0 else 'farther'}, by one image,"
    return "nearer" if high < 0 else "farther" if low > 0 else "neither nearer nor farther"
