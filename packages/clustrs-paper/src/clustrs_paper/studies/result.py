"""What a study gives: figures, the tables behind them, and what they show in words."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
        """What the numbers show, in a few lines per part."""
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
    """The result of a study that has one part."""
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
