"""Results of a study: figures, the tables behind them, findings in words, and what drawing and wording them needs."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.app.inspection import Values


@dataclass(frozen=True)
class StudyPart:
    """A matplotlib figure, the table rows behind it (all with the same keys), and what they show in words."""

    name: str
    figure: Any
    rows: Sequence[Mapping[str, Any]]
    findings: str

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write NAME.png, NAME.svg and NAME.csv; a ValueError says which of them could not be written."""
        paths = [Path(folder) / f"{self.name}{suffix}" for suffix in (".png", ".svg", ".csv")]
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.figure.savefig(paths[0], dpi=130)
            self.figure.savefig(paths[1], metadata={"Date": None})
            with paths[2].open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.rows[0]))
                writer.writeheader()
                writer.writerows(self.rows)
        except OSError as error:
            raise ValueError(f"output {str(folder)!r}: {self.name} could not be written: {error.strerror}") from error
        return paths


@dataclass(frozen=True)
class StudyResult:
    """The parts of a study: one, or one for each image and corruption where a study draws them one by one."""

    parts: tuple[StudyPart, ...]

    @property
    def findings(self) -> str:
        """Findings in words, a few lines per part."""
        return "\n".join(part.findings for part in self.parts)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The table rows of all parts."""
        return [row for part in self.parts for row in part.rows]

    @property
    def figures(self) -> dict[str, Any]:
        """The matplotlib figures by the names of their parts."""
        return {part.name: part.figure for part in self.parts}

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the figure (PNG and SVG) and the table (CSV) of every part."""
        return [path for part in self.parts for path in part.save(folder)]


def single(name: str, figure: Any, rows: Sequence[Mapping[str, Any]], findings: str) -> StudyResult:
    """Return the result of a study that has one part."""
    return StudyResult((StudyPart(name, figure, rows, findings),))


def share_text(share: float) -> str:
    """A share of the variance for an axis: never 0 % where there is some."""
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.0005 else "under 0.1%"


def pyplot() -> Any:
    """Import matplotlib without a display, set to write the same SVG for the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "clustrs"
    from matplotlib import pyplot as plt

    return plt


PAPER = "LLaVA-1.5-7B on MM-Vet"
"""Model and task of the paper's ablation and sensitivity."""


@dataclass(frozen=True)
class Series:
    """Values over the labels of a panel (None: there is none), perhaps with bounds; hollow ones are the paper's."""

    label: str
    color: str
    marker: str
    values: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]
    hollow: bool


def series(
    rows: Sequence[Mapping[str, Any]], name: str, label: str, style: tuple[str, str], hollow: bool = False
) -> Series:
    """A column of a table, with its bounds if it has any; `style` is color and marker."""
    low, high = ([row.get(f"{name}_{end}") for row in rows] for end in ("low", "high"))
    return Series(label, *style, [row[name] for row in rows], low, high, hollow)


def places(levels: Sequence[float]) -> list[float]:
    """Place levels by their logarithm, a step for a factor of 2; clean images, level 0, are a step before the mildest.

    Levels that do not rise, such as the qualities of JPEG, are equally far apart.

    >>> places([0, 0.5, 1, 4])
    [0.0, 1.0, 2.0, 4.0]
    """
    if any(b <= a for a, b in pairwise(levels)) or levels[0] < 0 or levels[-1] <= 0:
        return [float(i) for i in range(len(levels))]
    mildest = next(level for level in levels if level > 0)
    return [1 + log2(level / mildest) if level > 0 else 0.0 for level in levels]


def level_ticks(axis: Any, at: Sequence[float], labels: Sequence[str]) -> None:
    """Label levels at their places; of two that would touch, the milder one."""
    span = (at[-1] - at[0]) or 1.0
    shown = [at[0]]
    for place in at[1:]:
        shown += [place] if place - shown[-1] > 0.07 * span else []
    axis.set_xticks(at, [label if place in shown else "" for place, label in zip(at, labels, strict=True)])
    axis.set_xlim(at[0] - 0.06 * span, at[-1] + 0.06 * span)


def draw_panel(
    axis: Any, labels: Sequence[str], shown: Sequence[Series], lines: bool = True, at: Sequence[float] | None = None
) -> None:
    """With `lines`, a line through each series, its markers at the ticks; without, the series next to each other.

    `at` has the places of levels.
    """
    ticks = [float(i) for i in range(len(labels))] if at is None else at
    step = 0.0 if lines else min(0.12, 0.6 / max(1, len(shown)))
    for index, one in enumerate(shown):
        shift = step * (index - (len(shown) - 1) / 2)
        there = [i for i, value in enumerate(one.values) if value is not None]
        where = [ticks[i] + shift for i in there]
        values = [one.values[i] for i in there]
        style: dict[str, Any] = {"color": one.color, "marker": one.marker, "markersize": 6}
        if one.hollow:
            style |= {"markerfacecolor": "white", "markeredgewidth": 1.4}
        line = ("--" if one.hollow else "-") if lines else "none"
        axis.plot(where, values, linestyle=line, linewidth=1.4, label=one.label, **style)
        for i, x in zip(there, where, strict=True):
            if one.low[i] is not None and one.high[i] is not None:
                axis.plot([x, x], [one.low[i], one.high[i]], color=one.color, linewidth=1.4, alpha=0.7)
    if at is None:
        axis.set_xticks(ticks, labels)
        axis.set_xlim(-0.5, len(labels) - 0.5)
    else:
        level_ticks(axis, ticks, labels)
    axis.grid(axis="y", alpha=0.3)


def shared_legend(figure: Any, axes: Sequence[Any], columns: int) -> None:
    """One legend below for all panels, each label once."""
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    shown = {label: handle for handle, label in reversed(pairs)}
    labels = list(dict.fromkeys(label for _, label in pairs))
    figure.legend([shown[label] for label in labels], labels, loc="outside lower center", ncols=columns, frameon=False)


def clear(row: Mapping[str, Any], name: str) -> int:
    """Return 1 or -1 if the interval lies on that side of 0, else 0."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None:
        return 0
    return 1 if low > 0 else -1 if high < 0 else 0


def signed(row: Mapping[str, Any], name: str) -> str:
    """Format a difference with its interval, and a star where that excludes 0."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value is None:
        return "-"
    interval = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{value:+.3f}{interval}{'*' * (clear(row, name) != 0)}"


def count_clear(rows: list[dict[str, Any]], name: str) -> str:
    """Count the cells in which a difference is clear, and those expected by chance."""
    up, down = (sum(clear(row, name) == side for row in rows) for side in (1, -1))
    return (
        f"clearly better in {up} and clearly worse in {down} of {len(rows)} cells "
        f"(about {len(rows) / 20:.1f} would look clear if there were no difference at all)"
    )


def token_spread(tokens: Values) -> float:
    """Root of the mean squared distance of tokens [N, D] from their mean: the unit of distances."""
    return float(np.sqrt(((tokens - tokens.mean(0)) ** 2).sum(1).mean()))


def distances(left: Values, right: Values) -> Values:
    """Return the distances [M, N] between all rows of [M, D] and [N, D]; those of equal rows are exactly 0."""
    return np.array([np.linalg.norm(right - row, axis=1) for row in left])
