"""The numbers that the paper prints, and the look-up of a run's cells in them.

The table `text` holds the numbers that only the text of the paper has. The paper measured some cells several times,
with differing results: ClustRS at k = 16 under gaussian:0.5 has 0.242 in the main table, 0.240 and 0.246 in the
sensitivity tables and 0.272 in the ablation. So a run is compared with one series of measurements only, a
`PaperReference`.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from clustrs import validation
from clustrs.pruners import list_methods, method_class

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
MODELS = {"llava-1.5-7b": r"llava-(v)?1\.5-7b", "llava-onevision-7b": r"llava-onevision(.*-7b|$)"}
"""The paper's models, and how the names of their checkpoints look."""
TASKS = {"mmvet": "mm-vet", "scienceqa": "scienceqa", "scienceqaimg": "scienceqa", "sqa": "scienceqa"}
REPEATED = ("sensitivity_tau", "sensitivity_clip", "ablation")
"""Tables that measure cells of the main tables, or of each other, once more."""
MAIN = (*(name for name in SCORE_TABLES if name not in REPEATED), "text")
"""The main series: no two of these tables have a cell in common."""
SERIES = (MAIN, *((name,) for name in REPEATED))

Method = str | Mapping[str, Any]
"""A name, for the method as proposed, or a mapping with its name and parameters."""
RunCell = tuple[Method, int | float | None, str, float | None]
"""A cell of a run: method, keep, corruption, level (None for clean images)."""
_Key = tuple[str, str, str, str, int | None, str, float | None]


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
        raise ValueError(f"paper table must be one of {', '.join(TABLES)}, got {name!r}")
    with (Path(__file__).parent / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
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


@dataclass(frozen=True)
class PaperReference:
    """The part of the paper that a run is compared with: a task, a model, and one series of tables."""

    task: str
    model: str
    tables: tuple[str, ...]

    def score(self, method: Method, keep: int | float | None, corruption: str, level: float | None) -> float | None:
        """Return the paper's score from 0 to 1, or None if these tables have none.

        level: None for "clean" and for the paper's means over the levels of "cutout" and "brightness_contrast".
        """
        return self._find("score", method, keep, corruption, level)

    def gain(self, method: Method, keep: int | float | None, corruption: str, level: float | None) -> float | None:
        """Return the ablation's gain column: the score of ClustRS minus that of C+H."""
        return self._find("gain", method, keep, corruption, level)

    def mean(self, method: Method) -> float | None:
        """Return a sensitivity table's mean row: the score over all its budgets and conditions."""
        return self._find("score", method, None, "all", None)

    @property
    def grid(self) -> set[tuple[int, str, float | None]]:
        """Every keep, corruption and level that these tables have a score for."""
        cells = (cell for table in self.tables for cell in paper_table(table) if (cell.task, cell.model) == self._about)
        return {(cell.keep, cell.corruption, cell.level) for cell in cells if cell.keep is not None}

    @property
    def _about(self) -> tuple[str, str]:
        return self.task, self.model

    def _find(
        self, metric: str, method: Method, keep: int | float | None, corruption: str, level: float | None
    ) -> float | None:
        if isinstance(keep, float):
            return None
        key = (*self._about, method_name(method), _identity(variant(method, self.model)), keep, corruption, level)
        return _index(self.tables, metric).get(key)


def find_reference(
    task: str, model: str, cells: Sequence[RunCell], reproduces: str | None = None
) -> PaperReference | None:
    """Choose what a run is compared with; None if the paper has nothing on its task and model.

    model: a model of the paper, or the name of a checkpoint of it. reproduces: the table that the run sets out to
    reproduce; without it, the series of tables that has a score for most of the run's cells, and the main series where
    several have as many.
    """
    known, name = paper_model(model), TASKS.get(re.sub(r"[^a-z]", "", task.lower()))
    if known is None or name is None:
        return None
    if reproduces is not None:
        return PaperReference(name, known, series_of(reproduces))
    references = [PaperReference(name, known, tables) for tables in SERIES]
    return max(references, key=lambda reference: sum(reference.score(*cell) is not None for cell in cells))


def series_of(table: str) -> tuple[str, ...]:
    """Return the tables that a table is read together with: all main tables, or itself alone."""
    validation.choice("reproduces", table, SCORE_TABLES)
    return next(tables for tables in SERIES if table in tables)


def paper_value(
    task: str, model: str, method: Method, keep: int | float | None, corruption: str, level: float | None
) -> float | None:
    """Return the paper's score for a single cell, from 0 to 1, or None if it has none.

    Where the paper measured the cell several times, the main tables count first, then the sensitivity to tau, to the
    clip interval, and the ablation. The cells of a run go through `find_reference`, which keeps to one of these.
    """
    known, name = paper_model(model), TASKS.get(re.sub(r"[^a-z]", "", task.lower()))
    if known is None or name is None:
        return None
    scores = (PaperReference(name, known, tables).score(method, keep, corruption, level) for tables in SERIES)
    return next((score for score in scores if score is not None), None)


def paper_model(name: str) -> str | None:
    """Return the model of the paper that a checkpoint's name stands for, None if it is another."""
    return next((model for model, pattern in MODELS.items() if re.search(pattern, name.lower())), None)


def method_name(method: Method) -> str:
    return (method if isinstance(method, str) else str(method.get("name", ""))).lower()


def variant(method: Method, model: str) -> dict[str, Any]:
    """Return the parameters that are not as proposed; the seed of the draws does not matter.

    Salience is part of the method on OneVision and not on LLaVA-1.5, said or unsaid.
    """
    name, described = method_name(method), {} if isinstance(method, str) else method
    known = fields(method_class(name)) if name in list_methods() else ()
    defaults: dict[str, Any] = {field.name: _as_json(field.default) for field in known}
    changed = {}
    for key, given in described.items():
        value = _as_json(given)
        as_proposed = key in defaults and value == defaults[key]
        implied = key == "salience" and value is (model == "llava-onevision-7b")
        if key not in ("name", "keep", "seed") and not (as_proposed or implied):
            changed[key] = value
    return changed


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _identity(parameters: Mapping[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)


@cache
def _index(tables: tuple[str, ...], metric: str) -> dict[_Key, float]:
    """All scores (means included) or gains of some tables, from 0 to 1, by what they belong to."""
    metrics = ("score", "mean_score") if metric == "score" else (metric,)
    found: dict[_Key, float] = {}
    for cell in (cell for table in tables for cell in paper_table(table) if cell.metric in metrics):
        parameters = _identity(cell.parameters)
        key = (cell.task, cell.model, cell.method, parameters, cell.keep, cell.corruption, cell.level)
        found[key] = round(cell.value / 100, 6) if cell.unit == "per cent" else cell.value
    return found
