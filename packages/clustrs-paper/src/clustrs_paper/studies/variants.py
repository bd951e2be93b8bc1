"""Variants: the switches of ClustRS beyond the paper, picked on one half of the images and reported on the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clustrs import palette
from clustrs_paper.studies.result import StudyResult, clear, count_clear, pyplot, signed, single
from clustrs_paper.studies.settings import LARGEST_SEED, GridStudyConfig, Keep, setting

if TYPE_CHECKING:
    from clustrs_paper.studies.grids import Grid, GridCell

CONDITIONS = ("clean", "gaussian:0.11", "gaussian:0.24", "salt_pepper:0.07")
"""Clean, and levels at which the default embedded model, unpruned, loses 10, 35 and 35 % of its clean score."""
QUESTIONS = 600
REFERENCE = "ClustRS"
"""The method as the paper has it, which all others are compared with."""
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "no RRS": {"shrink": False},
    "medoid": {"representative": "medoid"},
    "medoid, no RRS": {"representative": "medoid", "shrink": False},
    "centroid": {"clip": [0.0, 0.0]},
    "sqrt": {"attention_power": 0.5},
    "sqrt, medoid": {"attention_power": 0.5, "representative": "medoid"},
    "sqrt, centroid": {"attention_power": 0.5, "clip": [0.0, 0.0]},
}
"""ClustRS with what differs from the paper. "centroid" keeps the cluster's center instead of a token; "sqrt" takes the
square root of the attention as weight."""
CONTROLS: dict[str, dict[str, Any]] = {
    "DivPrune": {"name": "divprune"},
    "DivPrune + RRS": {"name": "denoise", "inner": "divprune"},
    "DivPrune, merged": {"name": "denoise", "inner": "divprune", "clip": [0.0, 0.0]},
}
"""Baselines that a variant has to beat: DivPrune, with RRS, and with each kept token replaced by the attention-weighted
mean of the tokens that are nearest to it."""
PICK, REPORT = "pick", "report"
"""The halves of the images."""
EVERY = "all"
Row = dict[str, Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class VariantsConfig(GridStudyConfig):
    """Under which corruptions the variants are compared, and how the images are split."""

    keep: tuple[Keep, ...] = (8, 16, 50)
    corruptions: tuple[str, ...] = CONDITIONS
    split_seed: int = setting(0, low=0, high=LARGEST_SEED)


def run(config: VariantsConfig) -> StudyResult:
    """Answer what is left of the grid, pick a variant for each budget on one half, and compare all on the other."""
    from clustrs.evaluation.config import expand_corruptions
    from clustrs_paper.studies.grids import measure

    methods = [*VARIANTS.values(), *CONTROLS.values()]
    grid = measure(config, methods, expand_corruptions(config.corruptions), QUESTIONS)
    images = item_images(Path(config.folder))
    halves = split([images[item] for item in grid.run.items], config.split_seed)
    rows = table(grid, halves)
    return single("variants", draw(rows, grid.about), rows, findings(rows, grid.about))


def item_images(folder: Path) -> dict[str, str]:
    """The image of each question that a run has answers to."""
    from clustrs.evaluation.store import read_answers

    return {record.item: record.image for record in read_answers(folder)}


def split(images: Sequence[str], seed: int) -> dict[str, Mask]:
    """Split questions into halves by their images: all that are about one image are in one half."""
    names = sorted(set(images))
    if len(names) < 2:
        raise ValueError(f"the questions must be about two images or more, got {len(names)} (raise the limit)")
    order = np.random.default_rng(seed).permutation(len(names))
    picking = {names[i] for i in order[: len(names) // 2]}
    first = np.array([image in picking for image in images])
    return {PICK: first, REPORT: ~first}


def table(grid: "Grid", halves: Mapping[str, Mask]) -> list[Row]:
    """Every method in every cell on both halves, then its means by kind of question on the half that is reported."""
    names = [*VARIANTS, *CONTROLS]
    rows = [row for half, mask in halves.items() for row in compare(grid, names, grid.cells, mask, half, EVERY)]
    means = [cell for cell in grid.cells if cell.condition is None or len(grid.run.conditions) == 1]
    kinds = sorted({kind for own in grid.run.kinds for kind in own})
    for kind in kinds if len(kinds) > 1 else ():
        mask = np.array([kind in own for own in grid.run.kinds]) & halves[REPORT]
        if mask.any():
            rows += compare(grid, names, means, mask, REPORT, kind)
    chosen = picks(rows)
    return [{**row, "picked": chosen.get(row["keep"]) == row["variant"]} for row in rows]


def compare(
    grid: "Grid", names: Sequence[str], cells: "Sequence[GridCell]", mask: Mask, half: str, kind: str
) -> list[Row]:
    """Scores of some questions in some cells, and their differences to the paper's ClustRS, question by question."""
    from clustrs.evaluation import metrics
    from clustrs_paper.studies.grids import paired_columns

    values = [np.stack([grid.of(cell, v)[:, mask] for cell in cells]) for v in range(len(names))]
    rows = []
    for name, own in zip(names, values, strict=True):
        scores = metrics.estimates(metrics.question_means(own))
        differences = metrics.differences(own, values[names.index(REFERENCE)])
        for cell, score, difference in zip(cells, scores, differences, strict=True):
            rows.append(
                {
                    "half": half,
                    "kind": kind,
                    "variant": name,
                    "control": name in CONTROLS,
                    **cell.names,
                    **paired_columns(score, difference),
                }
            )
    return rows


def budget_rows(rows: Sequence[Row]) -> list[Row]:
    """The means of every budget, and that of all, over the conditions; the cells themselves where there is one only."""
    means = [row for row in rows if row["corruption"] == "mean"]
    return means if any(row["keep"] != EVERY for row in means) else list(rows)


def picks(rows: Sequence[Row]) -> dict[Keep | str, str]:
    """For each budget, and for all together, the variant that is best on the half to pick on; the first of equals."""
    best: dict[Keep | str, Row] = {}
    for row in budget_rows([row for row in rows if row["half"] == PICK and row["kind"] == EVERY]):
        if row["control"] or row["variant"] == REFERENCE or row["difference"] is None:
            continue
        if row["keep"] not in best or row["difference"] > best[row["keep"]]["difference"]:
            best[row["keep"]] = row
    return {keep: row["variant"] for keep, row in best.items()}


def draw(rows: Sequence[Row], about: str) -> Any:
    """One column per budget: the differences to the paper's ClustRS on both halves, a line per method."""
    plt = pyplot()
    shown = budget_rows([row for row in rows if row["kind"] == EVERY])
    keeps = list(dict.fromkeys(row["keep"] for row in shown))
    names = [name for name in (*VARIANTS, *CONTROLS) if name != REFERENCE]
    size = (max(6.4, 2.9 * len(keeps) + 1.8), 0.32 * len(names) + 2.2)
    figure, axes = plt.subplots(1, len(keeps), figsize=size, layout="constrained", squeeze=False, sharey=True)
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for axis, keep in zip(axes[0], keeps, strict=True):
        draw_budget(axis, [row for row in shown if row["keep"] == keep], names)
        axis.set_title("all budgets" if keep == EVERY else f"k = {keep}")
        axis.set_xlabel(f"difference to {REFERENCE}")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    title = f"{about} Mean over conditions.\nBars: 95 % intervals over questions; controls are grey."
    figure.suptitle(title, fontsize=10, parse_math=False, wrap=True)
    return figure


def draw_budget(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    """The differences of one budget: filled on the half that is reported, hollow on the one to pick on."""
    axis.axvline(0, color="black", linewidth=1)
    labels = {PICK: "half to pick on", REPORT: "held-out half", "picked": "picked"}
    for half, shift in ((PICK, 0.16), (REPORT, -0.16)):
        for row in (row for row in rows if row["half"] == half and row["variant"] in names):
            if row["difference"] is None:
                continue
            y = names.index(row["variant"]) + shift
            color = "#777777" if row["control"] else palette.color("clustrs")
            face = color if half == REPORT else "white"
            if row["difference_low"] is not None:
                interval = [row["difference_low"], row["difference_high"]]
                axis.plot(interval, [y, y], color=color, linewidth=1.4, alpha=0.7)
            style = {"marker": "o", "linestyle": "none", "color": color, "markerfacecolor": face, "markersize": 5}
            axis.plot([row["difference"]], [y], **style, label=labels.pop(half, None))
            if row["picked"] and half == REPORT:
                ring = {"marker": "o", "markersize": 11, "color": "#d55e00", "fillstyle": "none", "linestyle": "none"}
                axis.plot([row["difference"]], [y], **ring, label=labels.pop("picked", None))
    axis.grid(axis="x", alpha=0.3)


def findings(rows: Sequence[Row], about: str) -> str:
    """Report the pick for each budget and its effect on the held-out half, what else is clear there, and where."""
    lines = [
        f"{about} Paired differences to {REFERENCE} as in the paper with 95 % intervals, on the held-out half; a star: "
        "the interval excludes 0."
    ]
    held_out = [row for row in rows if row["half"] == REPORT]
    means = budget_rows([row for row in held_out if row["kind"] == EVERY])
    for keep in dict.fromkeys(row["keep"] for row in means):
        subset = [row for row in means if row["keep"] == keep]
        lines += budget_findings(keep, subset, [row for row in held_out if row["kind"] != EVERY])
    cells = [row for row in held_out if row["kind"] == EVERY and row["corruption"] != "mean"]
    for name in (*VARIANTS, *CONTROLS):
        if name != REFERENCE:
            own = [row for row in cells if row["variant"] == name]
            lines.append(f"{name}: {count_clear(own, 'difference')}.")
    return "\n".join(lines)


def budget_findings(keep: Keep | str, rows: Sequence[Row], by_kind: Sequence[Row]) -> list[str]:
    """One budget in words."""
    where = "all budgets" if keep == EVERY else f"k = {keep}"
    reference = next(row for row in rows if row["variant"] == REFERENCE)
    others = [row for row in rows if row["variant"] != REFERENCE]
    score = "-" if reference["score"] is None else f"{reference['score']:.3f}"
    lines = [f"{where}: {REFERENCE} {score} over {reference['questions']} questions."]
    for row in others:
        if row["picked"]:
            kinds = [r for r in by_kind if (r["keep"], r["variant"]) == (keep, row["variant"])]
            text = ", ".join(f"{r['kind']} {signed(r, 'difference')}" for r in kinds if clear(r, "difference"))
            lines.append(
                f"  Picked: {row['variant']}, {signed(row, 'difference')}; kinds of questions that differ clearly: "
                f"{text or 'none'}."
            )
    for words, side in (("better", 1), ("worse", -1)):
        text = "; ".join(
            f"{row['variant']} {signed(row, 'difference')}" for row in others if clear(row, "difference") == side
        )
        lines.append(f"  Clearly {words}: {text or 'none'}.")
    return lines
