"""A panel of the grid studies: points with intervals over the labels of the x axis."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAPER = "LLaVA-1.5-7B on MM-Vet"
"""What the paper's ablation and sensitivity were measured on."""


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


def draw_panel(axis: Any, labels: Sequence[str], shown: Sequence[Series], lines: bool = True) -> None:
    """With `lines`, a line through each series, its markers at the ticks; without, the series next to each other."""
    step = 0.0 if lines else min(0.12, 0.6 / max(1, len(shown)))
    for index, one in enumerate(shown):
        shift = step * (index - (len(shown) - 1) / 2)
        there = [i for i, value in enumerate(one.values) if value is not None]
        where = [i + shift for i in there]
        values = [one.values[i] for i in there]
        style: dict[str, Any] = {"color": one.color, "marker": one.marker, "markersize": 6}
        if one.hollow:
            style |= {"markerfacecolor": "white", "markeredgewidth": 1.4}
        line = ("--" if one.hollow else "-") if lines else "none"
        axis.plot(where, values, linestyle=line, linewidth=1.4, label=one.label, **style)
        for i, x in zip(there, where, strict=True):
            if one.low[i] is not None and one.high[i] is not None:
                axis.plot([x, x], [one.low[i], one.high[i]], color=one.color, linewidth=1.4, alpha=0.7)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_xlim(-0.5, len(labels) - 0.5)
    axis.grid(axis="y", alpha=0.3)


def shared_legend(figure: Any, axes: Sequence[Any], columns: int) -> None:
    """One legend below for all panels, each label once."""
    pairs = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    shown = {label: handle for handle, label in reversed(pairs)}
    labels = list(dict.fromkeys(label for _, label in pairs))
    figure.legend([shown[label] for label in labels], labels, loc="outside lower center", ncols=columns, frameon=False)
