"""`clustrs export` and `import`: answers in the formats of others."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clustrs.cli.arguments import option, positional
from clustrs.cli.commands import command
from clustrs.cli.outputs import print_report

if TYPE_CHECKING:
    from clustrs.evaluation.exchange import Grades

Format = Literal["mmvet", "llava"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `clustrs export`."""

    folder: Path = positional("the folder of a run", "RUN")
    format: Format = option(..., "of MM-Vet's evaluator, or LLaVA's scorer")
    output: Path = option(..., "a folder for the files", "-o", "--output", metavar="FOLDER")


@command("export", panel="Measure")
def run_export(options: ExportOptions) -> None:
    """Write answers in the formats of others."""
    from clustrs.evaluation.exchange import export_run

    for path in export_run(options.folder, options.format, options.output):
        print(path)


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The options of `clustrs import`."""

    file: Path = positional("the predictions, or a grade file of MM-Vet's evaluator", "FILE")
    format: Format = option(..., "what format they have")
    grades: Path | None = option(
        None, "their scores from MM-Vet's evaluator, ..._JUDGE-grade-3runs.json", metavar="FILE"
    )
    task: str = option(..., "the task, see clustrs tasks")
    data: Path | None = option(None, "the folder of the task's files", metavar="FOLDER")
    name: str = option("imported", "what to call the method")
    output: Path = option(..., "the folder of the new run", "-o", "--output", metavar="FOLDER")


@command("import", panel="Measure")
def run_import(options: ImportOptions) -> None:
    """Score predictions that were made elsewhere."""
    from clustrs.evaluation.exchange import import_run
    from clustrs.evaluation.tasks import get_task

    task = get_task(options.task, options.data)
    predictions, grades = read_predictions(options)
    aside = import_run(task, predictions, options.name, options.output, grades)
    if aside:
        print(f"{aside} of {len(predictions)} predictions set aside: their questions have no image", file=sys.stderr)
    print_report(options.output)
    if grades is not None:
        print_grades(grades, task.items)


def read_predictions(options: ImportOptions) -> tuple[dict[str, str], "Grades | None"]:
    """The predictions, and their scores where there are any; a file of MM-Vet's evaluator may hold scores alone."""
    from clustrs.evaluation.exchange import holds_grades, import_predictions, read_grades

    grades = read_grades(options.grades) if options.grades else None
    if grades is None and options.format == "mmvet" and holds_grades(options.file):
        grades = read_grades(options.file)
        print(
            "the file has scores only: answers are recorded without their words (--grades takes both)", file=sys.stderr
        )
        return dict.fromkeys(grades.scores, ""), grades
    return import_predictions(options.file, options.format), grades


def print_grades(grades: "Grades", items: Any) -> None:
    """Print the totals as MM-Vet's evaluator does."""
    from clustrs.evaluation.exchange import totals

    graded = f"{len(grades.scores)} of {len(items)} questions, judge {grades.judge}"
    print(f"\nas MM-Vet's evaluator prints it ({graded}):\n{totals(grades, items)}")
    if grades.without_number:
        print(f"{grades.without_number} of the scores are 0 because the judge's reply was no number", file=sys.stderr)
