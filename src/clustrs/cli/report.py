"""`clustrs report` and `judge`: from a run's answers to scores, tables and plots."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clustrs.cli.arguments import option, positional
from clustrs.cli.commands import command
from clustrs.cli.outputs import print_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of `clustrs report`."""

    folder: Path = positional("the folder of a run, or of results that lmms-eval wrote", "RUN")
    judge_model: str | None = option(None, "whose verdicts count, when there are several judges'")
    metric: str | None = option(None, "which metric to show of lmms-eval's results (default: a task's first)")
    compare_with: str | None = option(None, "show the paper's numbers for this model next to ours", metavar="MODEL")
    images: int | None = option(
        None,
        "run the model again on N questions where methods disagree, and draw what was kept",
        metavar="N",
        high=10_000,
    )
    latency: int | None = option(
        None, "run the model again, and time N answers of each method", metavar="N", high=10_000
    )


@command("report", panel="Measure")
def run_report(options: ReportOptions) -> None:
    """Write the tables and plots of a run.

    They are report.html, .md, .tex and .csv in the run's folder. Results of lmms-eval (--model clustrs) become runs
    first, one per model and task, in a folder clustrs beside them.
    """
    from clustrs.integrations.lmms_eval.results import holds_results

    if holds_results(options.folder):
        report_results(options)
        return
    if options.metric is not None:
        raise ValueError(
            f"--metric {options.metric}: {str(options.folder)!r} has no results of lmms-eval, leave it out"
        )
    if options.images or options.latency:
        from clustrs.evaluation.report.rerun import draw_examples, measure_latency
        from clustrs.models.load import quiet_transformers

        quiet_transformers()
        if options.images:
            draw_examples(options.folder, options.images, options.judge_model)
        if options.latency:
            measure_latency(options.folder, options.latency)
    print_report(options.folder, options.judge_model, options.compare_with)


def report_results(options: ReportOptions) -> None:
    """Report the results of lmms-eval in a folder, a run per model and task."""
    from clustrs.cli import terminal
    from clustrs.integrations.lmms_eval.results import import_results

    if options.images or options.latency or options.judge_model:
        raise ValueError("--images, --latency and --judge-model are for runs of clustrs eval, leave them out")
    for run in import_results(options.folder, options.metric, terminal.say):
        print(f"{run.name}:")
        print_report(run, None, options.compare_with)


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The options of `clustrs judge`."""

    folder: Path = positional("the folder of a run", "RUN")
    judge_model: str = option(..., "the judge's name on the server")
    judge_url: str = option("https://api.openai.com/v1", "the server")
    judge_runs: int = option(1, "ask so many times and average", metavar="N", high=1000)
    concurrency: int = option(4, "calls at a time", metavar="N", high=1000)
    yes: bool = option(False, "do not ask for confirmation, however many calls it takes")


@command("judge", panel="Measure")
def run_judge(options: JudgeOptions) -> None:
    """Let a language model score the answers of a run.

    Any OpenAI-compatible server will do. The key comes from the variable OPENAI_API_KEY.
    """
    from clustrs.evaluation.judge import Judge
    from clustrs.evaluation.verdicts import judge_run

    judge = Judge(options.judge_model, options.judge_url, os.environ.get("OPENAI_API_KEY"))
    confirm = None if options.yes else partial(confirm_calls, judge.model, judge.url)
    summary = judge_run(options.folder, judge, options.judge_runs, options.concurrency, confirm=confirm)
    print(f"judged {summary.judged}, reused {summary.reused}, failed {summary.failed}")
    print_report(options.folder, options.judge_model)


def confirm_calls(model: str, url: str, calls: int) -> bool:
    """Ask the user, who may have to pay for them."""
    text = f"{calls} calls to {model} at {url}"
    if not sys.stdin.isatty():
        raise ValueError(f"{text}: confirm them with --yes")
    print(f"{text}. Go ahead? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
