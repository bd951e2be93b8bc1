"""The cells of a run as a tidy CSV: one record per cell."""

import csv
import io
import json
from collections.abc import Iterable

from clustrs.evaluation.report.analysis.cells import CellMean
from clustrs.evaluation.report.escaping import for_spreadsheet

COLUMNS = (
    *("task", "model", "method", "keep", "corruption", "level", "seed"),
    *("n", "failed", "not_judged", "missing", "mean", "low", "high", "scale", "paper", "parameters"),
)


def csv_table(cells: Iterable[CellMean]) -> str:
    """Render the cells. Means and bounds are in the scale of the run; n is the number of questions with a score."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in cells:
        estimate = cell.estimate
        writer.writerow(
            (
                *map(for_spreadsheet, (cell.task, cell.model, cell.method.label, cell.method.budget)),
                *(for_spreadsheet(cell.condition.name), cell.condition.level_text),
                *("all" if cell.seed is None else cell.seed, estimate.n, cell.failed, cell.not_judged, cell.missing),
                *(_number(value, cell.scale) for value in (estimate.mean, estimate.low, estimate.high)),
                *(f"{cell.scale:g}", _number(cell.paper, cell.scale)),
                for_spreadsheet(json.dumps(cell.method.parameters)),
            )
        )
    return content.getvalue()


def _number(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.6f}"
