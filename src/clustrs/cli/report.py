"""`clustrs report`, `judge`, `export-answers`, `import-answers`: scores, tables and plots; answers in other formats."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import Command, app

PANEL = "Measure"
Format = Literal["mmvet", "llava"]
FormatOption = Annotated[Format, o.option("the format of MM-Vet's evaluator or of LLaVA's scorer", choices=Format)]
DRAW = "run the model again on N questions where methods disagree, and draw what was kept"
TIME = "run the model again, and time N answers of each method"
GRADES = "their scores from MM-Vet's evaluator, ..._JUDGE-grade-3runs.json"


@app.command("report", cls=Command, rich_help_panel=PANEL)
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run, or a folder of results that lmms-eval wrote")],
    judge_model: Annotated[str | None, o.option("the judge whose verdicts count, if there are several", "NAME")] = None,
    metric: Annotated[str | None, o.option("the metric of lmms-eval to show (default: a task's first)", "NAME")] = None,
    compare_with: Annotated[str | None, o.option("show the paper's numbers for this model, too", "MODEL")] = None,
    images: Annotated[int | None, o.option(DRAW, "N", read=o.integer(1, 10_000))] = None,
    latency: Annotated[int | None, o.option(TIME, "N", read=o.integer(1, 10_000))] = None,
) -> None:
    """Write the tables and plots of a run.

    They are report.html, .md, .tex and .csv in the run's folder. Results of lmms-eval (--model clustrs) become runs
    first, one per model and task, in a folder clustrs beside them.
    """
    from clustrs.integrations.lmms_eval.results import holds_results, import_results

    if holds_results(folder):
        if images or latency or judge_model:
            raise ValueError("--images, --latency and --judge-model need a run of clustrs eval")
        for run in import_results(folder, metric, base.say):
            print(f"{run.name}:")
            base.print_report(run, None, compare_with)
        return
    if metric is not None:
        raise ValueError(f"--metric {metric} needs results of lmms-eval, got {str(folder)!r}")
    if images or latency:
        from clustrs.evaluation.report.rerun import draw_examples, measure_latency
        from clustrs.models.load import quiet_transformers

        quiet_transformers()
        if images:
            draw_examples(folder, images, judge_model)
        if latency:
            measure_latency(folder, latency)
    base.print_report(folder, judge_model, compare_with)


@app.command("judge", cls=Command, rich_help_panel=PANEL)
def judge(
    folder: o.Run,
    judge_model: Annotated[str, o.option("the judge's name on the server", "NAME")],
    judge_url: Annotated[str, o.option("the server", "URL")] = "https://api.openai.com/v1",
    judge_runs: Annotated[int, o.option("ask N times and average", "N", read=o.integer(1, 1000))] = 1,
    concurrency: Annotated[int, o.option("calls at a time", "N", read=o.integer(1, 1000))] = 4,
    yes: Annotated[bool, o.flag("do not ask for confirmation, however many calls it takes", "--yes")] = False,
) -> None:
    """Let a language model score the answers of a run.

    Any OpenAI-compatible server will do. The key comes from the variable OPENAI_API_KEY.
    """
    from clustrs.evaluation.judge import Judge, judge_run

    server = Judge(judge_model, judge_url, os.environ.get("OPENAI_API_KEY"))

    def confirm(calls: int) -> bool:  # the user may have to pay for them
        text = f"{calls} calls to {server.model} at {server.url}"
        if not sys.stdin.isatty():
            raise ValueError(f"{text} need --yes where nobody can be asked")
        print(f"{text}. Go ahead? [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    summary = judge_run(folder, server, judge_runs, concurrency, confirm=None if yes else confirm)
    print(f"judged {summary.judged}, reused {summary.reused}, failed {summary.failed}")
    base.print_report(folder, judge_model)


@app.command("export-answers", cls=Command, rich_help_panel=PANEL)
def export_answers(folder: o.Run, format: FormatOption, output: o.OutputFolder) -> None:
    """Write the answers of a run for MM-Vet's evaluator or LLaVA's scorer."""
    from clustrs.evaluation.exchange import export_run

    for path in export_run(folder, format, output):
        print(path)


@app.command("import-answers", cls=Command, rich_help_panel=PANEL)
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
    from clustrs.evaluation.exchange import holds_grades, import_predictions, import_run, read_grades, totals
    from clustrs.evaluation.tasks import get_task

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
