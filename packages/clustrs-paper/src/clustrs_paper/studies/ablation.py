"""Ablation: clustering, with the Huber distance (C+H), and with the shrinkage (ClustRS), over noise and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clustrs import palette
from clustrs_paper.studies.result import (
    PAPER,
    StudyPart,
    count_clear,
    draw_panel,
    places,
    pyplot,
    series,
    shared_legend,
    signed,
)
from clustrs_paper.studies.settings import GridStudyConfig, LossSettings, resolve_corruptions

if TYPE_CHECKING:
    from clustrs_paper.studies.grids import Grid
    from clustrs_paper.studies.result import StudyResult

LEVELS = (0.5, 1.0, 2.0, 3.0)
"""Of Gaussian noise, in the paper's ablation."""
VARIANTS: dict[str, dict[str, Any]] = {
    "Clustering": {"distance": "euclidean", "shrink": False},
    "C+H": {"shrink": False},
    "ClustRS": {},
}
COLUMNS = {"Clustering": "clustering", "C+H": "c_h", "ClustRS": "clustrs"}
GAINS = {"gain_huber": ("C+H", "Clustering"), "gain_rrs": ("ClustRS", "C+H")}
"""Gain of a part of the method: the variant with it, and the one without."""
GAIN_WORDS = {"gain_huber": "Huber distance", "gain_rrs": "RRS"}
STYLES = {
    "Clustering": (palette.SERIES[1], "^"),
    "C+H": (palette.SERIES[2], "D"),
    "ClustRS": (palette.color("clustrs"), "o"),
    "gain_huber": (palette.SERIES[2], "D"),
    "gain_rrs": (palette.color("clustrs"), "o"),
}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AblationConfig(LossSettings, GridStudyConfig):
    """The variants of ClustRS at each of `levels` of one corruption and each budget, and likewise at the levels at
    which the unpruned model has some `losses`: a part of its own, with a run of its own in the folder `chosen`."""

    corruption: str = "gaussian"
    levels: tuple[float, ...] | None = None


def run(config: AblationConfig) -> "StudyResult":
    """Answer what is left of the grids, and compare the variants question by question."""
    from clustrs_paper.studies.curves import run_with_chosen_levels

    default = LEVELS if config.corruption == "gaussian" else None
    corruptions = [str(one) for one in resolve_corruptions(config.corruption, config.levels, default)]
    return run_with_chosen_levels("ablation", part, config, corruptions, [config.corruption], config.levels is not None)


def part(name: str, config: AblationConfig, corruptions: Sequence[str]) -> StudyPart:
    """The ablation under some corruptions."""
    from clustrs_paper.studies.grids import QUESTIONS, measure

    grid = measure(config, list(VARIANTS.values()), corruptions, QUESTIONS)
    rows = table(grid)
    return StudyPart(name, draw(rows, grid.about), rows, findings(rows, grid.about))


def table(grid: "Grid") -> list[Row]:
    """The paper's layout: for each budget and level the score of each variant and the gains, ours and the paper's."""
    from clustrs_paper.studies.grids import paper_difference

    names = list(VARIANTS)
    scores = {name: grid.estimates(index) for index, name in enumerate(names)}
    gains = {gain: grid.differences(names.index(a), names.index(b)) for gain, (a, b) in GAINS.items()}
    printed = {name: grid.paper("ablation", index) for index, name in enumerate(names)}
    rows = []
    for i, cell in enumerate(grid.cells):
        row: Row = {**cell.names, "questions": gains["gain_rrs"][i].n}
        for name, column in COLUMNS.items():
            estimate = scores[name][i]
            row |= {column: estimate.mean, f"{column}_low": estimate.low, f"{column}_high": estimate.high}
        for gain, differences in gains.items():
            difference = differences[i]
            row |= {gain: difference.mean, f"{gain}_low": difference.low, f"{gain}_high": difference.high}
            row[f"{gain}_p"] = difference.p
        row |= {f"paper_{column}": printed[name][i] for name, column in COLUMNS.items()}
        for gain, (a, b) in GAINS.items():
            row[f"paper_{gain}"] = paper_difference(printed[a][i], printed[b][i])
        rows.append(row)
    return rows


def draw(rows: Sequence[Row], about: str) -> Any:
    """One column per budget: scores, gains, and the paper's scores where it has some at several levels."""
    plt = pyplot()
    keeps = list(dict.fromkeys(row["keep"] for row in rows if row["keep"] != "all"))
    has_paper = len({row["level"] for row in rows if row["paper_clustrs"] is not None}) > 1
    figure, axes = plt.subplots(
        2 + has_paper,
        len(keeps),
        figsize=(max(6.4, 3.7 * len(keeps)), 3.0 * (2 + has_paper) + 1.2),
        layout="constrained",
        squeeze=False,
        sharex="col",
        sharey="row",
    )
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for column, keep in zip(axes.T, keeps, strict=True):
        subset = [row for row in rows if row["keep"] == keep and row["corruption"] != "mean"]
        draw_column(column, subset, has_paper)
        column[0].set_title(f"k = {keep}")
        column[-1].set_xlabel(f"{subset[0]['corruption']} level")
    axes[0][0].set_ylabel("score, this run")
    axes[1][0].set_ylabel("gain (paired)")
    if has_paper:
        axes[2][0].set_ylabel(f"score, paper\n({PAPER})")
    shared_legend(figure, axes[:2, 0], columns=2 + has_paper)
    figure.suptitle(f"{about}\nBars: 95 % intervals over questions.", fontsize=10, parse_math=False, wrap=True)
    return figure


def draw_column(column: Sequence[Any], rows: Sequence[Row], has_paper: bool) -> None:
    """The panels of one budget, from top to bottom."""
    labels, at = [f"{row['level']:g}" for row in rows], places([row["level"] for row in rows])
    draw_panel(column[0], labels, [series(rows, COLUMNS[name], name, STYLES[name]) for name in VARIANTS], at=at)
    gains = [series(rows, gain, f"gain of {GAIN_WORDS[gain]}", STYLES[gain]) for gain in GAINS]
    for gain in GAINS:
        label = f"gain of {GAIN_WORDS[gain]}, paper"
        if any(row[f"paper_{gain}"] is not None for row in rows):
            gains.append(series(rows, f"paper_{gain}", label, STYLES[gain], hollow=True))
    if has_paper:
        scores = [
            series(rows, f"paper_{COLUMNS[name]}", f"{name}, paper", STYLES[name], hollow=True) for name in VARIANTS
        ]
        draw_panel(column[2], labels, scores, at=at)
    draw_panel(column[1], labels, gains, lines=False, at=at)
    column[1].axhline(0, color="black", linewidth=1)


def findings(rows: Sequence[Row], about: str) -> str:
    """Report the mean gain of each part at every budget, and the number of clear differences."""
    lines = [f"{about} Gains with 95 % intervals; a star: it excludes 0."]
    keeps = list(dict.fromkeys(row["keep"] for row in rows if row["keep"] != "all"))
    single = [row for row in rows if row["corruption"] != "mean"]
    for keep in keeps:
        row = [row for row in rows if row["keep"] == keep][-1]
        over = "mean over levels" if row["corruption"] == "mean" else f"{row['corruption']} {row['level']:g}"
        scores = ", ".join(f"{name} {score_text(row[column])}" for name, column in COLUMNS.items())
        gains = ", ".join(f"{GAIN_WORDS[gain]} {signed(row, gain)}" for gain in GAINS)
        paper = row["paper_gain_rrs"]
        reference = "" if paper is None else f" (paper, {PAPER}: {row['paper_gain_huber']:+.3f} and {paper:+.3f})"
        lines.append(f"k = {keep}, {over}: {scores}. Gains: {gains}{reference}.")
    lines += [f"{words}: {count_clear(single, gain)}." for gain, words in GAIN_WORDS.items()]
    return "\n".join(lines)


def score_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
