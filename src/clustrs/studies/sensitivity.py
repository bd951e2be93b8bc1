"""Sensitivity: how much the Huber threshold, the clip interval of alpha and the kind of centroid matter."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clustrs.studies.grid_options import PAPER, add_grid_options
from clustrs.studies.intervals import count_clear, signed
from clustrs.studies.lists import read_list
from clustrs.studies.outcome import Outcome, pyplot
from clustrs.studies.panels import draw_panel, series, shared_legend

if TYPE_CHECKING:
    from clustrs.studies.grids import Grid

CONDITIONS = ("clean", "gaussian:0.5", "gaussian:2", "salt_pepper:0.1")
"""Of the paper."""
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
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
TABLES = {"tau": "sensitivity_tau", "clip": "sensitivity_clip"}
"""The paper has these; the centroid is a switch of ours."""
BUDGET_LOOKS = (("#0072b2", "o"), ("#d55e00", "^"), ("#009e73", "D"), ("#cc79a7", "v"), ("#e69f00", "P"))
Row = dict[str, Any]


def add_options(command: argparse.ArgumentParser) -> None:
    add_grid_options(command, limit=120)
    command.add_argument(
        "--corrupt", nargs="+", metavar="C", default=list(CONDITIONS), help=f"(default: {' '.join(CONDITIONS)})"
    )
    command.add_argument("--settings", nargs="+", default=list(SETTINGS), help=f"(default: {' '.join(SETTINGS)})")


def study(options: argparse.Namespace) -> list[Outcome]:
    from clustrs import validation
    from clustrs.evaluation.config import expand_corruptions
    from clustrs.studies.grids import measure

    wanted = read_list("--settings", ",".join(options.settings), str)
    for name in wanted:
        validation.choice("settings", name, SETTINGS)
    variants: list[dict[str, Any]] = [{}]
    for name in wanted:
        variants += [variant for variant in SETTINGS[name].values() if variant]
    corruptions = expand_corruptions(read_list("--corrupt", ",".join(options.corrupt), str))
    grid = measure(options, variants, corruptions)
    rows = [row for name in wanted for row in table(grid, name)]
    return [Outcome("sensitivity", draw(rows, grid.about), rows, reading(rows, grid.about))]


def table(grid: "Grid", parameter: str) -> list[Row]:
    """The score of each value of a parameter in each cell, its difference to the default, and the paper's numbers."""
    from clustrs.studies.grids import paper_difference

    default = grid.variants.index({})
    rows = []
    for value, variant in SETTINGS[parameter].items():
        number = grid.variants.index(variant)
        nothing = [None] * len(grid.cells)
        printed, usual = (
            grid.paper(TABLES[parameter], n) if parameter in TABLES else nothing for n in (number, default)
        )
        parts = zip(grid.cells, grid.estimates(number), grid.differences(number, default), printed, usual, strict=True)
        for cell, score, difference, paper, paper_default in parts:
            rows.append(
                {
                    "parameter": parameter,
                    "value": value,
                    "default": number == default,
                    **cell.names,
                    "questions": difference.n,
                    "score": score.mean,
                    "score_low": score.low,
                    "score_high": score.high,
                    "difference": difference.mean,
                    "difference_low": difference.low,
                    "difference_high": difference.high,
                    "difference_p": difference.p,
                    "paper_score": None if paper is None else round(paper, 6),
                    "paper_difference": paper_difference(paper, paper_default),
                }
            )
    return rows


def budget_rows(rows: Sequence[Row]) -> list[Row]:
    """The mean of every budget over the conditions; the cells themselves if there is one condition only."""
    own = [row for row in rows if row["keep"] != "all"]
    return [row for row in own if row["corruption"] == "mean"] or own


def draw(rows: Sequence[Row], about: str) -> Any:
    """A column a parameter: scores, differences to the default, and the paper's scores where it has some."""
    plt = pyplot()
    names = list(dict.fromkeys(row["parameter"] for row in rows))
    shown = budget_rows(rows)
    keeps = list(dict.fromkeys(row["keep"] for row in shown))
    beside = any(row["paper_score"] is not None for row in shown)
    widths = [max(3, len(SETTINGS[name])) for name in names]
    figure, axes = plt.subplots(
        2 + beside,
        len(names),
        figsize=(max(6.4, 0.9 * sum(widths) + 1), 3.0 * (2 + beside) + 1.2),
        layout="constrained",
        squeeze=False,
        sharex="col",
        sharey="row",
        width_ratios=widths,
    )
    for column, name in zip(axes.T, names, strict=True):
        ours, gains, printed, beside_gains = [], [], [], []
        for number, keep in enumerate(keeps):
            mine = [row for row in shown if row["parameter"] == name and row["keep"] == keep]
            look = BUDGET_LOOKS[number % len(BUDGET_LOOKS)]
            ours.append(series(mine, "score", f"k = {keep}", look))
            gains.append(series(mine, "difference", f"k = {keep}", look))
            printed.append(series(mine, "paper_score", f"k = {keep}, paper", look, hollow=True))
            beside_gains.append(series(mine, "paper_difference", f"k = {keep}, paper", look, hollow=True))
        places = [label(name, value) for value in SETTINGS[name]]
        draw_panel(column[0], places, ours)
        draw_panel(column[1], places, gains + beside_gains if name in TABLES and beside else gains, lines=False)
        column[1].axhline(0, color="black", linewidth=1)
        if beside and name in TABLES:
            draw_panel(column[2], places, printed)
        elif beside:
            column[2].text(0.5, 0.5, "not in the paper", ha="center", transform=column[2].transAxes)
        column[0].set_title(name)
        column[-1].set_xlabel(f"{name} (* default)")
    axes[0][0].set_ylabel("score, this run")
    axes[1][0].set_ylabel("difference to the default")
    if beside:
        axes[2][0].set_ylabel(f"score, paper\n({PAPER})")
    shared_legend(figure, axes[1], columns=1 + beside)
    figure.suptitle(
        f"{about} Mean over conditions.\nBars: 95 % intervals over questions.", fontsize=10, wrap=True, parse_math=False
    )
    return figure


def label(parameter: str, value: str) -> str:
    return value.replace("-", " to\n") + ("" if SETTINGS[parameter][value] else "*")


def reading(rows: Sequence[Row], about: str) -> str:
    """For each parameter the scores in the mean of all cells, and what differs clearly from the default."""
    lines = [f"{about} In brackets the paired difference to the default with its 95 % interval; a star: it excludes 0."]
    for name in dict.fromkeys(row["parameter"] for row in rows):
        mine = [row for row in rows if row["parameter"] == name]
        whole = [row for row in mine if row["keep"] == "all"] or budget_rows(mine)
        lines.append(f"{name}, mean of all: " + "; ".join(f"{row['value']}: {text(row)}" for row in whole) + ".")
        others = [row for row in mine if row["corruption"] != "mean" and not row["default"]]
        lines.append(f"  Against the default {count_clear(others, 'difference')}.")
        printed = [f"{row['value']}: {row['paper_score']:.3f}" for row in whole if row["paper_score"] is not None]
        if printed:
            lines.append(f"  Paper ({PAPER}): {'; '.join(printed)}.")
    return "\n".join(lines)


def text(row: Row) -> str:
    """A score, and in brackets its difference to the default."""
    score = "-" if row["score"] is None else f"{row['score']:.3f}"
    return score if row["default"] else f"{score} ({signed(row, 'difference')})"
