"""`clustrs export-answers` and `import-answers`: exchange with MM-Vet's evaluator and LLaVA's scorer."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from clustrs.cli import base
from clustrs.cli import options as o

Format = Literal["mmvet", "llava"]
FormatOption = Annotated[Format, o.option("the format of MM-Vet's evaluator or of LLaVA's scorer", choices=Format)]
GRADES = "their scores from MM-Vet's evaluator, ..._JUDGE-grade-3runs.json"


def export_answers(folder: o.Run, format: FormatOption, output: o.OutputFolder) -> None:
    """Write the answers of a run for MM-Vet's evaluator or LLaVA's scorer."""
    from clustrs_paper.exchange import export_run

    for path in export_run(folder, format, output):
        print(path)


def import_answers(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="predictions, or a grade file of MM-Vet's evaluator")],
    format: FormatOption,
    task: Annotated[str, o.option("the task, see clustrs tasks", "TASK", complete=o.complete_tasks)],
    output: o.OutputFolder,
    grades: Annotated[Path | None, o.option(GRADES, "FILE")] = None,
    data: Annotated[Path | None, o.option("the folder of the task's files", "FOLDER")] = None,
    name: Annotated[str, o.option("the name of the method in the report", "NAME")] = "imported",
) -> None:
    """Score predictions that another program made."""
    from clustrs.evaluation.tasks import get_task
    from clustrs_paper.exchange import holds_grades, import_predictions, import_run, read_grades, totals

    loaded = get_task(task, data)
    scores = read_grades(grades) if grades else None
    if scores is None and format == "mmvet" and holds_grades(file):
        scores = read_grades(file)
        predictions = dict.fromkeys(scores.scores, "")
        note = "the file has scores only: answers are recorded without their words (--grades takes both)"
        print(note, file=sys.stderr)
    else:
        predictions = import_predictions(file, format)
    aside = import_run(loaded, predictions, name, output, scores)
    if aside:
        print(f"{aside} of {len(predictions)} predictions set aside: their questions have no image", file=sys.stderr)
    base.print_report(output)
    if scores is None:
        return
    graded = f"{len(scores.scores)} of {len(loaded.items)} questions, judge {scores.judge}"
    print(f"\nas MM-Vet's evaluator prints it ({graded}):\n{totals(scores, loaded.items)}")
    if scores.without_number:
        print(f"{scores.without_number} of the scores are 0 because the judge's reply was no number", file=sys.stderr)
