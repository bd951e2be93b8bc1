"""Sensitivity: how much the Huber threshold, the clip interval of alpha and the kind of centroid matter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from clustrs import palette
from clustrs_paper.studies.result import (
    PAPER,
    StudyPart,
    count_clear,
    draw_panel,
    pyplot,
    series,
    shared_legend,
    signed,
)
from clustrs_paper.studies.settings import GridStudyConfig, Keep, LossSettings

if TYPE_CHECKING:
    from clustrs_paper.studies.grids import Grid
    from clustrs_paper.studies.result import StudyResult

CONDITIONS = ("clean", "gaussian:0.5", "gaussian:2", "salt_pepper:0.1")
"""Of the paper's sensitivity tables."""
CHOSEN = ("gaussian", "salt_pepper")
"""Corruptions that are also measured at levels of the model's own."""
Parameter = Literal["tau", "clip", "centroid"]
VALUES: dict[Parameter, dict[str, dict[str, Any]]] = {
    "tau": {"0.25": {"tau": 0.25}, "0.5": {"tau": 0.5}, "1": {}, "2": {"tau": 2.0}, "4": {"tau": 4.0}},
    "clip": {
        "no RRS": {"shrink": False},
        "0-1": {"clip": [0.0, 1.0]},
        "0.05-0.95": {"clip": [0.05, 0.95]},
        "0.1-0.95": {},
        "0.2-0.9": {"clip": [0.2, 0.9]},
        "0.3-0.8": {"clip": [0.3, 0.8]},
    },
    "centroid": {"mean": {}, "huber": {"centroid": "huber"}},
}
"""For each parameter its values, and what they change in ClustRS as proposed (nothing: the default)."""
TABLES: dict[Parameter, str] = {"tau": "sensitivity_tau", "clip": "sensitivity_clip"}
"""Parameters that the paper varies; the centroid is a switch of this package."""
BUDGET_STYLES = tuple(zip(palette.SERIES, "o^DvP", strict=True))
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SensitivityConfig(LossSettings, GridStudyConfig):
    """Settings of the study: the parameters of ClustRS to vary, one at a time, and corruptions.

    Beside those, clean images and the levels of `CHOSEN` at which the unpruned model has some `losses` are a part of
    their own, with a run of its own in the folder `chosen`."""

    corruptions: tuple[str, ...] | None = None
    parameters: tuple[Parameter, ...] = ("tau", "clip", "centroid")


def run(config: SensitivityConfig) -> "StudyResult":
    """Answer what is left of the grids, and compare every value with the default question by question."""
    from clustrs.evaluation.config import expand_corruptions
    from clustrs_paper.studies.curves import run_with_chosen_levels

    corruptions = expand_corruptions(config.corruptions or CONDITIONS)
    given = config.corruptions is not None
    return run_with_chosen_levels("sensitivity", part, config, corruptions, CHOSEN, given, before=["clean"])


def part(name: str, config: SensitivityConfig, corruptions: Sequence[str]) -> StudyPart:
    """The sensitivity under some corruptions."""
    from clustrs_paper.studies.grids import QUESTIONS, measure

    variants: list[dict[str, Any]] = [{}]
    for parameter in config.parameters:
        variants += [variant for variant in VALUES[parameter].values() if variant]
    grid = measure(config, variants, corruptions, QUESTIONS)
    rows = [row for parameter in config.parameters for row in table(grid, parameter)]
    return StudyPart(name, draw(rows, grid.about), rows, findings(rows, grid.about))


def table(grid: "Grid", parameter: Parameter) -> list[Row]:
    """The score of each value of a parameter in each cell, its difference to the default, and the paper's numbers."""
    from clustrs_paper.studies.grids import paired_columns, paper_difference

    default = grid.variants.index({})
    rows = []
    for value, variant in VALUES[parameter].items():
        index = grid.variants.index(variant)
        nothing = [None] * len(grid.cells)
        printed, reference = (
            grid.paper(TABLES[parameter], i) if parameter in TABLES else nothing for i in (index, default)
        )
        scores, differences = grid.estimates(index), grid.differences(index, default)
        parts = zip(grid.cells, scores, differences, printed, reference, strict=True)
        for cell, score, difference, paper, paper_default in parts:
            rows.append(
                {
                    "parameter": parameter,
                    "value": value,
                    "default": index == default,
                    **cell.names,
                    **paired_columns(score, difference),
                    "paper_score": None if paper is None else round(paper, 6),
                    "paper_difference": paper_difference(paper, paper_default),
                }
            )
    return rows


def budget_rows(rows: Sequence[Row]) -> list[Row]:
    """The mean of every budget over the conditions; the cells themselves if there is one condition only."""
    budgets = [row for row in rows if row["keep"] != "all"]
    return [row for row in budgets if row["corruption"] == "mean"] or budgets


def draw(rows: Sequence[Row], about: str) -> Any:
    """One column per parameter: scores, differences to the default, and the paper's scores where it has some."""
    plt = pyplot()
    names = list(dict.fromkeys(row["parameter"] for row in rows))
    shown = budget_rows(rows)
    has_paper = any(row["paper_score"] is not None for row in shown)
    widths = [max(3, len(VALUES[name])) for name in names]
    figure, axes = plt.subplots(
        2 + has_paper,
        len(names),
        figsize=(max(6.4, 0.9 * sum(widths) + 1), 3.0 * (2 + has_paper) + 1.2),
        layout="constrained",
        squeeze=False,
        sharex="col",
        sharey="row",
        width_ratios=widths,
    )
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for column, name in zip(axes.T, names, strict=True):
        draw_column(column, name, [row for row in shown if row["parameter"] == name], has_paper)
    axes[0][0].set_ylabel("score, this run")
    axes[1][0].set_ylabel("difference to the default")
    if has_paper:
        axes[2][0].set_ylabel(f"score, paper\n({PAPER})")
    shared_legend(figure, axes[1], columns=1 + has_paper)
    figure.suptitle(
        f"{about} Mean over conditions.\nBars: 95 % intervals over questions.", fontsize=10, wrap=True, parse_math=False
    )
    return figure


def draw_column(column: Sequence[Any], name: Parameter, rows: Sequence[Row], has_paper: bool) -> None:
    """The panels of one parameter, from top to bottom; every budget is a series."""
    keeps: list[Keep] = list(dict.fromkeys(row["keep"] for row in rows))
    scores, differences, paper_scores, paper_differences = [], [], [], []
    for index, keep in enumerate(keeps):
        subset = [row for row in rows if row["keep"] == keep]
        style = BUDGET_STYLES[index % len(BUDGET_STYLES)]
        scores.append(series(subset, "score", f"k = {keep}", style))
        differences.append(series(subset, "difference", f"k = {keep}", style))
        paper_scores.append(series(subset, "paper_score", f"k = {keep}, paper", style, hollow=True))
        paper_differences.append(series(subset, "paper_difference", f"k = {keep}, paper", style, hollow=True))
    labels = [label(name, value) for value in VALUES[name]]
    draw_panel(column[0], labels, scores)
    in_paper = has_paper and name in TABLES
    draw_panel(column[1], labels, differences + paper_differences if in_paper else differences, lines=False)
    column[1].axhline(0, color="black", linewidth=1)
    if in_paper:
        draw_panel(column[2], labels, paper_scores)
    elif has_paper:
        column[2].text(0.5, 0.5, "not in the paper", ha="center", transform=column[2].transAxes)
    column[0].set_title(name)
    column[-1].set_xlabel(f"{name} (* default)")


def label(parameter: Parameter, value: str) -> str:
    return value.replace("-", " to\n") + ("" if VALUES[parameter][value] else "*")


def findings(rows: Sequence[Row], about: str) -> str:
    """For each parameter the mean scores over all cells, and what differs clearly from the default."""
    lines = [f"{about} In brackets the paired difference to the default with its 95 % interval; a star: it excludes 0."]
    for name in dict.fromkeys(row["parameter"] for row in rows):
        subset = [row for row in rows if row["parameter"] == name]
        whole = [row for row in subset if row["keep"] == "all"] or budget_rows(subset)
        lines.append(f"{name}, mean of all: " + "; ".join(f"{row['value']}: {text(row)}" for row in whole) + ".")
        others = [row for row in subset if row["corruption"] != "mean" and not row["default"]]
        lines.append(f"  Against the default {count_clear(others, 'difference')}.")
        printed = [f"{row['value']}: {row['paper_score']:.3f}" for row in whole if row["paper_score"] is not None]
        if printed:
            lines.append(f"  Paper ({PAPER}): {'; '.join(printed)}.")
    return "\n".join(lines)


def text(row: Row) -> str:
    """A score, and in brackets its difference to the default."""
    score = "-" if row["score"] is None else f"{row['score']:.3f}"
    return score if row["default"] else f"{score} ({signed(row, 'difference')})"
