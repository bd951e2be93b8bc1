"""What a study gives: a figure, numbers, a reading; and how they are written."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLOURS = {
    "none": "#000000",
    "clustrs": "#d55e00",
    "fastervlm": "#0072b2",
    "divprune": "#009e73",
    "visionzip": "#cc79a7",
    "vispruner": "#e69f00",
    "random": "#56b4e9",
    "grid": "#999999",
}
"""One colour a method, the same in every figure; colour-blind people can tell them apart."""
MARKERS = {
    "none": "s",
    "clustrs": "o",
    "fastervlm": "^",
    "divprune": "D",
    "visionzip": "v",
    "vispruner": "P",
    "random": "X",
    "grid": "*",
}


@dataclass(frozen=True)
class Outcome:
    """`figure` is matplotlib's; `rows` are the numbers behind it, with the same keys; `reading` says what they show."""

    name: str
    figure: Any
    rows: Sequence[Mapping[str, Any]]
    reading: str

    def save(self, folder: Path) -> list[Path]:
        """NAME.png, NAME.svg and NAME.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}{suffix}" for suffix in (".png", ".svg", ".csv")]
        self.figure.savefig(paths[0], dpi=130)
        self.figure.savefig(paths[1], metadata={"Date": None})
        with paths[2].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        return paths


def pyplot() -> Any:
    """matplotlib without a display, with the same SVG for the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "clustrs"
    from matplotlib import pyplot as plt

    return plt
