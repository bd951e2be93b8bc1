"""The numbers that the paper prints, as its tables have them; the table `text` holds those of its text alone."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TITLE = "Clustering and Token Denoising for Faster and More Robust VLMs"
SCORE_TABLES = (
    "mmvet_gaussian",
    "mmvet_salt_pepper",
    "mmvet_brightness_contrast_cutout",
    "mmvet_motion_blur_jpeg",
    "scienceqa_gaussian",
    "scienceqa_salt_pepper",
    "onevision_gaussian",
    "onevision_salt_pepper",
    "sensitivity_tau",
    "sensitivity_clip",
    "ablation",
)
"""The tables that a run can reproduce."""
TABLES = (*SCORE_TABLES, "rank_instability", "overhead", "text")


@dataclass(frozen=True)
class PaperCell:
    """One number. `parameters` are what differs from the method as proposed; `metric` is what was measured.

    `level` is None for clean images and for means over the paper's levels of a corruption; `keep` is None for means
    over budgets and where the paper does not give it.
    """

    task: str
    model: str
    corruption: str
    level: float | None
    keep: int | None
    method: str
    parameters: Mapping[str, Any]
    metric: str
    value: float
    unit: str


@cache
def paper_table(name: str) -> tuple[PaperCell, ...]:
    """Return a table of the paper, one of `TABLES`, with the values as they are printed."""
    if name not in TABLES:
        raise ValueError(f"paper table {name!r}: give one of {', '.join(TABLES)}")
    with (Path(__file__).parent / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_cell(record) for record in csv.DictReader(file))


def _cell(record: Mapping[str, str]) -> PaperCell:
    return PaperCell(
        task=record["task"],
        model=record["model"],
        corruption=record["corruption"],
        level=float(record["level"]) if record["level"] else None,
        keep=int(record["keep"]) if record["keep"] else None,
        method=record["method"],
        parameters=json.loads(record["parameters"] or "{}"),
        metric=record["metric"],
        value=float(record["value"]),
        unit=record["unit"],
    )
