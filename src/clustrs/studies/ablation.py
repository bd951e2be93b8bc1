"""Ablation: clustering, with the Huber distance (C+H), and with the shrinkage (ClustRS), over noise and budgets."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clustrs.studies.choices import known_levels, read_corruptions
from clustrs.studies.grid_options import PAPER, add_grid_options
from clustrs.studies.intervals import count_clear, signed
from clustrs.studies.outcome import COLOURS, Outcome, pyplot
from clustrs.studies.panels import draw_panel, series, shared_legend

if TYPE_CHECKING:
    from clustrs.studies.grids import Grid

LEVELS = (0.5, 1.0, 2.0, 3.0)
"""Of Gaussian noise, in the paper."""
VARIANTS: dict[str, dict[str, Any]] = {
    "Clustering": {"distance": "euclidean", "shrink": False},
    "C+H": {"shrink": False},
    "ClustRS": {},
}
COLUMNS = {"Clustering": "clustering", "C+H": "c_h", "ClustRS": "clustrs"}
GAINS = {"gain_huber": ("C+H", "Clustering"), "gain_rrs": ("ClustRS", "C+H")}
"""What a part of the method brings: the variant with it, and the one without."""
GAIN_WORDS = {"gain_huber": "Huber distance", "gain_rrs": "RRS"}
LOOKS = {
    "Clustering": (COLOURS["fastervlm"], "^"),
    "C+H": (COLOURS["divprune"], "D"),
    "ClustRS": (COLOURS["clustrs"], "o"),
    "gain_huber": (COLOURS["divprune"], "D"),
    "gain_rrs": (COLOURS["clustrs"], "o"),
}
Row = dict[str, Any]


def add_options(command: argparse.ArgumentParser) -> None:
    add_grid_options(command, limit=360)
    command.add_argument("--corrupt", metavar="NAME", default="gaussian", help="a corruption (default: %(default)s)")
    command.add_argument("--levels", nargs="+", help="of the corruption (default: those of the paper)")


def study(options: argparse.Namespace) -> list[Outcome]:
    from clustrs.studies.grids import measure

    usual = LEVELS if options.corrupt == "gaussian" else known_levels(options.corrupt)
    levels = None if options.levels is None else ",".join(options.levels)
    corruptions = read_corruptions(options.corrupt, levels, usual)
    grid = measure(options, list(VARIANTS.values()), [str(corruption) for corruption in corruptions])
    rows = table(grid)
    return [Outcome("ablation", draw(rows, grid.about), rows, reading(rows, grid.about))]


def table(grid: "Grid") -> list[Row]:
    """The paper's layout: for each budget and level the score of each variant and the gains, ours and the paper's."""
    from clustrs.studies.grids import paper_difference

    names = list(VARIANTS)
    scores = {name: grid.estimates(number) for number, name in enumerate(names)}
    gains = {gain: grid.differences(names.index(a), names.index(b)) for gain, (a, b) in GAINS.items()}
    printed = {name: grid.paper("ablation", number) for number, name in enumerate(names)}
    rows = []
    for i, cell in enumerate(grid.cells):
        row: Row = {**cell.names, "questions": gains["gain_rrs"][i].n}
        for name, column in COLUMNS.items():
            estimate = scores[name][i]
            row |= {column: estimate.mean, f"{column}_low": estimate.low, f"{column}_high": estimate.high}
        for gain, found in gains.items():
            difference = found[i]
            row |= {gain: difference.mean, f"{gain}_low": difference.low, f"{gain}_high": difference.high}
            row[f"{gain}_p"] = difference.p
        row |= {f"paper_{column}": printed[name][i] for name, column in COLUMNS.items()}
        for gain, (a, b) in GAINS.items():
            row[f"paper_{gain}"] = paper_difference(printed[a][i], printed[b][i])
        rows.append(row)
    return rows


def draw(rows: Sequence[Row], about: str) -> Any:
    """A column a budget: scores, gains, and the paper's scores where it has some."""
    plt = pyplot()
    keeps = list(dict.fromkeys(row["keep"] for row in rows if row["keep"] != "all"))
    beside = any(row["paper_clustrs"] is not None for row in rows)
    figure, axes = plt.subplots(
        2 + beside,
        len(keeps),
        figsize=(max(6.4, 3.7 * len(keeps)), 3.0 * (2 + beside) + 1.2),
        layout="constrained",
        squeeze=False,
        sharex="col",
        sharey="row",
    )
    for number, keep in enumerate(keeps):
        mine = [row for row in rows if row["keep"] == keep and row["corruption"] != "mean"]
        places = [f"{row['level']:g}" for row in mine]
        column = axes[:, number]
        draw_panel(column[0], places, [series(mine, COLUMNS[name], name, LOOKS[name]) for name in VARIANTS])
        both = [series(mine, gain, f"gain of {GAIN_WORDS[gain]}", LOOKS[gain]) for gain in GAINS]
        if beside:
            both += [
                series(mine, f"paper_{gain}", f"gain of {GAIN_WORDS[gain]}, paper", LOOKS[gain], hollow=True)
                for gain in GAINS
            ]
            printed = [
                series(mine, f"paper_{COLUMNS[name]}", f"{name}, paper", LOOKS[name], hollow=True) for name in VARIANTS
            ]
            draw_panel(column[2], places, printed)
        draw_panel(column[1], places, both, lines=False)
        column[1].axhline(0, color="black", linewidth=1)
        column[0].set_title(f"k = {keep}")
        column[-1].set_xlabel(f"{mine[0]['corruption']} level")
    axes[0][0].set_ylabel("score, this run")
    axes[1][0].set_ylabel("gain (paired)")
    if beside:
        axes[2][0].set_ylabel(f"score, paper\n({PAPER})")
    shared_legend(figure, axes[:2, 0], columns=2 + beside)
    figure.suptitle(f"{about}\nBars: 95 % intervals over questions.", fontsize=10, parse_math=False, wrap=True)
    return figure


def reading(rows: Sequence[Row], about: str) -> str:
    """What each part brings in the mean of every budget, and where it is beyond doubt."""
    lines = [f"{about} Gains with 95 % intervals; a star: it excludes 0."]
    keeps = list(dict.fromkeys(row["keep"] for row in rows if row["keep"] != "all"))
    single = [row for row in rows if row["corruption"] != "mean"]
    for keep in keeps:
        row = [row for row in rows if row["keep"] == keep][-1]
        over = "mean over levels" if row["corruption"] == "mean" else f"{row['corruption']} {row['level']:g}"
        scores = ", ".join(f"{name} {number(row[column])}" for name, column in COLUMNS.items())
        gains = ", ".join(f"{GAIN_WORDS[gain]} {signed(row, gain)}" for gain in GAINS)
        paper = row["paper_gain_rrs"]
        beside = "" if paper is None else f" (paper, {PAPER}: {row['paper_gain_huber']:+.3f} and {paper:+.3f})"
        lines.append(f"k = {keep}, {over}: {scores}. Gains: {gains}{beside}.")
    lines += [f"{words}: {count_clear(single, gain)}." for gain, words in GAIN_WORDS.items()]
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
