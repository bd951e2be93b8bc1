"""The numbers that the paper prints: "Clustering and Token Denoising for Faster and More Robust VLMs"."""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from clustrs.pruners import list_methods, method_class

TITLE = "Clustering and Token Denoising for Faster and More Robust VLMs"
MODELS = {"llava-1.5-7b": r"llava-(v)?1\.5-7b", "llava-onevision-7b": r"llava-onevision(.*-7b|$)"}
"""The paper's models, and how the names of their checkpoints look."""
TASKS = {"mmvet": "mm-vet", "scienceqa": "scienceqa", "scienceqaimg": "scienceqa", "sqa": "scienceqa"}
TABLES = (
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
    "rank_instability",
    "overhead",
)
"""In the order in which `paper_value` looks into them."""


@dataclass(frozen=True)
class PaperCell:
    """One number. `parameters` are what differs from the method as proposed; `metric` is what was measured.

    `level` is None for clean images and for means over the paper's levels of a corruption.
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
    """A table of the paper, one of `TABLES`, with the values as they are printed."""
    if name not in TABLES:
        raise ValueError(f"paper table {name!r}: give one of {', '.join(TABLES)}")
    with (Path(__file__).parent / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_cell(row) for row in csv.DictReader(file))


def paper_value(
    task: str,
    model: str,
    method: str | Mapping[str, Any],
    keep: int | float | None,
    corruption: str,
    level: float | None,
) -> float | None:
    """The paper's score for that cell, from 0 to 1, or None if it has none. `model` may be the name of a checkpoint.

    method: a name, for the method as proposed, or a mapping with its name and parameters. level: None for "clean" and
    for the paper's means over the levels of "cutout" and "brightness_contrast". The paper measured some cells several
    times, with differing results: its main tables count first, then the sensitivity to tau, to the clip interval, and
    the ablation.
    """
    known = paper_model(model)
    described = {"name": method} if isinstance(method, str) else dict(method)
    name = str(described.get("name", "")).lower()
    if known is None or isinstance(keep, float):
        return None
    changed = identity(_changed(name, described, known))
    plain = TASKS.get(re.sub(r"[^a-z]", "", task.lower()), "")
    return _scores().get((plain, known, name, changed, keep, corruption, level))


def paper_model(name: str) -> str | None:
    """The model of the paper that a checkpoint's name stands for, None if it is another."""
    return next((model for model, form in MODELS.items() if re.search(form, name.lower())), None)


def identity(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@cache
def _scores() -> dict[tuple[str, str, str, str, int | None, str, float | None], float]:
    """All scores from 0 to 1 by what they belong to."""
    found: dict[tuple[str, str, str, str, int | None, str, float | None], float] = {}
    for cell in (cell for table in TABLES for cell in paper_table(table)):
        if cell.metric in ("score", "mean_score"):
            parameters = identity(cell.parameters)
            key = (cell.task, cell.model, cell.method, parameters, cell.keep, cell.corruption, cell.level)
            found.setdefault(key, round(cell.value / 100, 6) if cell.unit == "per cent" else cell.value)
    return found


def _cell(row: Mapping[str, str]) -> PaperCell:
    return PaperCell(
        task=row["task"],
        model=row["model"],
        corruption=row["corruption"],
        level=float(row["level"]) if row["level"] else None,
        keep=int(row["keep"]) if row["keep"] else None,
        method=row["method"],
        parameters=json.loads(row["parameters"] or "{}"),
        metric=row["metric"],
        value=float(row["value"]),
        unit=row["unit"],
    )


def _changed(name: str, described: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The parameters that are not as proposed; the seed of the draws does not matter.

    Salience is part of the method on OneVision and not on LLaVA-1.5, said or unsaid.
    """
    known = fields(method_class(name)) if name in list_methods() else ()
    usual: dict[str, Any] = {field.name: field.default for field in known}
    changed = {}
    for key, value in described.items():
        default = list(usual[key]) if isinstance(usual.get(key), tuple) else usual.get(key)
        as_proposed = key in usual and value == default
        implied = key == "salience" and value is (model == "llava-onevision-7b")
        if key not in ("name", "keep", "seed") and not (as_proposed or implied):
            changed[key] = value
    return changed
