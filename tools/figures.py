"""Draw the README's figures, one of docs/smol-llava.md and two of docs/studies.md, from a run and from stored answers:
`python -m tools.figures [hero] [retention] [smol] [overhead] [ablation]`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from clustrs import ClusterMeans, NoPruning, ask, load_model, palette
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path
from clustrs.evaluation import metrics
from clustrs.models.ask import Answer, as_seen
from clustrs.pruners.registry import display_label
from clustrs_paper.evidence import results
from clustrs_paper.evidence.place_and_weight import BOTH, CLEAN, PUBLISHED, SMOL, held_out, load, share_kept
from clustrs_paper.studies import ablation, overhead

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
MODEL, SAMPLE, QUESTION, KEEP, REPEATS = "photo-llava", "sample:photo-1", "Which of these is a building?", 16, 7
BUDGETS, SMOL_BUDGETS = (8, 16, 64, 144), (8, 16, 32, 64, 144)
VARIANTS = {  # of the ablation, as the grid's stored answers name them
    "Clustering": "clustrs distance=euclidean shrink=false",
    "C+H": "clustrs shrink=false",
    "ClustRS": "clustrs",
}
TITLES = {PUBLISHED: "as published", BOTH: "with place and weight (auto)"}
METHODS = ("clustermeans", "clustrs", "tome", "divprune", "fastervlm", "random")


def hero() -> None:
    """Draw the method on one image: its tokens, their clusters, what is left of them, and the answers."""
    model, processor = load_model(MODEL)
    image = open_image(image_path(SAMPLE))
    answers: dict[str, list[Answer]] = {"all": [], "kept": []}
    methods = {"all": NoPruning(), "kept": ClusterMeans(keep=KEEP)}
    for _ in range(REPEATS + 1):
        for name, method in methods.items():
            answers[name].append(ask(model, processor, image, QUESTION, method))
    result = answers["kept"][0].image
    (rows, columns), layout, selection = result.grids[0], result.layout, result.selection
    labels = np.empty((rows, columns), int)
    y, x = layout.y.numpy(), layout.x.numpy()
    assert selection.labels is not None
    labels[y, x] = selection.labels.numpy()
    colors = colormaps["tab20"](np.arange(KEEP))

    fig: Any = Figure(figsize=(11, 3.35), dpi=130)
    axes = fig.subplots(1, 4, gridspec_kw={"width_ratios": (1, 1, 1, 1.1)})
    seen = as_seen(processor, image).convert("RGB").resize((480, 480))
    place = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    shades = (seen, seen.convert("L").convert("RGB"), seen)
    for axis, shade, alpha in zip(axes[:3], shades, (1, 1, 0.25), strict=True):
        axis.imshow(np.asarray(shade), extent=place, alpha=alpha)
        axis.set(xticks=[], yticks=[], xlim=place[:2], ylim=place[2:])
    for line in np.arange(-0.5, columns):
        axes[0].axvline(line, color="white", linewidth=0.4, alpha=0.7)
        axes[0].axhline(line, color="white", linewidth=0.4, alpha=0.7)
    axes[1].imshow(colors[labels], extent=place, alpha=0.6, interpolation="nearest")
    sizes = np.bincount(labels.ravel(), minlength=KEEP)
    for cluster in np.argsort(-sizes):
        own = selection.indices[cluster]
        style = {"color": colors[cluster], "edgecolor": "black", "linewidth": 0.6}
        axes[2].scatter(x[own], y[own], s=60 + 9 * sizes[cluster], **style)
        axes[2].text(x[own], y[own], str(sizes[cluster]), ha="center", va="center", fontsize=7)
    titles = (
        f"{rows * columns} visual tokens",
        f"cluster them into {KEEP}",
        "keep one each, with its\nplace and its weight",
    )
    for number, (axis, title) in enumerate(zip(axes[:3], titles, strict=True), 1):
        axis.set_title(f"{number}. {title}", fontsize=10)
    axes[3].axis("off")
    axes[3].set_title("4. ask the language model", fontsize=10)
    lines = [QUESTION, ""]
    for found in answers.values():
        prefill = 1000 * median(one.seconds.prefill for one in found[1:])
        lines += [f"{found[0].visual_tokens} tokens", f"“{found[0].text}”, prefill {prefill:.0f} ms", ""]
    axes[3].text(0.02, 0.9, "\n".join(lines), va="top", fontsize=10.5, linespacing=1.5, transform=axes[3].transAxes)
    fig.tight_layout()
    fig.savefig(IMAGES / "hero.png")


def draw_kept(axis: Any, title: str, total: int, budgets: Sequence[int], kept: Mapping[str, Sequence[Any]]) -> None:
    """Draw the per cent of the unpruned score that methods keep against the number of tokens."""
    for method, shares in kept.items():
        style = {"color": palette.color(method), "marker": palette.marker(method), "markersize": 5}
        style |= {"label": display_label(method), "linewidth": 2.4 if method == "clustermeans" else 1.3}
        axis.plot(budgets, shares, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(keep) for keep in budgets])
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(f"visual tokens kept, of {total}")
    axis.grid(alpha=0.25)
    axis.axhline(100, color="black", linewidth=0.8, linestyle=":")


def retention() -> None:
    """Draw how much of the unpruned score methods keep, against the number of tokens, in both settings."""
    settings = load(MODEL)
    fig: Any = Figure(figsize=(9, 3.4), dpi=130)
    axes = fig.subplots(1, 2, sharey=True)
    for axis, (setting, title) in zip(axes, TITLES.items(), strict=True):
        halves = {m: [held_out(settings[setting], m, k, [CLEAN]) for k in BUDGETS] for m in METHODS}
        kept = {m: [share_kept(settings, half, [CLEAN]) for half in own] for m, own in halves.items()}
        draw_kept(axis, title, 576, BUDGETS, kept)
    axes[0].set_ylabel("score kept, %")
    axes[1].legend(fontsize=8, loc="lower right")
    fig.tight_layout()
    fig.savefig(IMAGES / "retention.png")


def smol() -> None:
    """Draw the same for smol-llava, on clean images and under noise."""
    stored = results.load(SMOL)
    assert stored.grid is not None
    assert stored.both is not None
    n = min(stored.grid.fewest, stored.both.fewest)
    fig: Any = Figure(figsize=(9, 6.4), dpi=130)
    axes = fig.subplots(2, 2, sharey="row")
    for row, group in zip(axes, ("clean", "noise"), strict=True):
        on = stored.grid.group(group)
        whole = np.mean([stored.grid.right["none", None, c][:n] for c in on])
        for axis, title, own in zip(row, TITLES.values(), (stored.grid, stored.both), strict=True):
            right = {m: [[own.right[m, k, c][:n] for c in on] for k in SMOL_BUDGETS] for m in METHODS}
            kept = {m: [100 * np.mean(cells) / whole for cells in budgets] for m, budgets in right.items()}
            draw_kept(axis, f"{group}, {title}", 196, SMOL_BUDGETS, kept)
        row[0].set_ylabel("score kept, %")
    axes[0][1].legend(fontsize=8, loc="lower right")
    fig.tight_layout()
    fig.savefig(IMAGES / "smol-llava.png")


def overhead_study() -> None:
    """Draw the stored times of the study of overhead."""
    rows = [{name: number(text) for name, text in row.items()} for row in results.load(MODEL).table("overhead")]
    overhead.draw(rows, (14, 64), MODEL).savefig(IMAGES / "study-overhead.png", dpi=130)


def ablation_study() -> None:
    """Draw the study's variants on clean and noisy images from the stored answers of the grid."""
    answers = results.read_answers(results.read_rows(results.STORED / f"{MODEL}-grid.csv"))
    assert answers is not None
    conditions = [one for one in answers.conditions if one.name in ("clean", "gaussian")]
    rows = []
    for keep in (16, 50, 144):
        for condition in conditions:
            right = {name: answers.right[spec, keep, condition][None].astype(float) for name, spec in VARIANTS.items()}
            row: dict[str, Any] = {"keep": keep, "corruption": "gaussian", "level": condition.level or 0.0}
            found = {ablation.COLUMNS[name]: metrics.estimates(one)[0] for name, one in right.items()}
            for gain, (better, worse) in ablation.GAINS.items():
                found[gain] = metrics.differences(right[better], right[worse])[0]
            for name, one in found.items():
                row |= {name: one.mean, f"{name}_low": one.low, f"{name}_high": one.high, f"paper_{name}": None}
            rows.append(row)
    about = f"{answers.task}, {MODEL}, {answers.questions} questions, scores from 0 to 1."
    ablation.draw(rows, about).savefig(IMAGES / "study-ablation.png", dpi=130)
    for keep in (16, 50, 144):  # means over the conditions, for the page
        means = {
            name: np.mean([answers.right[spec, keep, one] for one in conditions], 0)[None]
            for name, spec in VARIANTS.items()
        }
        for gain, (better, worse) in ablation.GAINS.items():
            one = metrics.differences(means[better], means[worse])[0]
            mean, low, high = (100 * (value or 0.0) for value in (one.mean, one.low, one.high))
            print(f"k = {keep}, {gain}: {mean:+.1f} ({low:.1f} to {high:.1f})")


def number(text: str) -> Any:
    """Return a stored cell as what it was before it was written."""
    try:
        return None if not text else int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


FIGURES = {"hero": hero, "retention": retention, "smol": smol, "overhead": overhead_study, "ablation": ablation_study}

if __name__ == "__main__":
    for name in sys.argv[1:] or FIGURES:
        FIGURES[name]()
