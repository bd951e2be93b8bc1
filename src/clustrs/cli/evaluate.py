"""`clustrs eval`, `report`, `leaderboard` and `judge`: answers, scores and tables."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import SETTINGS, Command, app, given_options
from clustrs.embedded import DEFAULT, default_task, folder_of, model_and_task
from clustrs.plugins import load_needed
from clustrs.validation import EngineName, LoadOptions

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config

PANEL, RUN = "Measure", "Run"
EXAMPLES = """\
examples:
  clustrs eval                          the embedded model on its own task
  clustrs eval --limit 24 --corrupt clean gaussian:0.1 --keep 16 50
  clustrs eval --task custom --data mine --model M --methods "clustrs tau=2"
  clustrs eval --config paper/mmvet-gaussian --data mm-vet
The last is MM-Vet as in the paper (clustrs-paper); M is a folder or an id.
Stopped or killed, the same command resumes, and asks again what failed.
Options override those of a --config file.
Separate the values of a list by spaces or commas: --keep 16 50 is --keep 16,50

exit status:
  0  every question has an answer
  2  nothing was run, or the run had to stop; one line says why
  3  the run is complete, but some answers failed: the same command asks again
  130  interrupted
"""
FAILED_ANSWERS = 3  # the exit status of a run that is complete, but for answers that failed
DEFAULTS: dict[str, Any] = {
    "methods": ["none", "clustrs", "fastervlm", "divprune", "visionzip", "random"],
    "keep": [16],
    "corrupt": ["clean"],
    "seeds": [0],
}
SEED = o.integer(0, o.LARGEST_SEED)
READERS = (o.several(split=o.split_methods), o.several(o.read_keep), o.several(), o.several(SEED))
SETTABLE = (
    *("model", "task", *DEFAULTS, "data", "limit", "batch_size", "max_new_tokens", "scope", "crops", "positions"),
    *("attention", "prompt_template", "image_padding"),
    *(one.name for one in fields(LoadOptions)),
)
TASK = f"the task, see clustrs tasks (default: the model's own, {default_task(DEFAULT)})"
SET_TASK = o.option(
    "options of the task, e.g. scoring=contains", SETTINGS, o.QUESTIONS, read=o.read_settings("data", "limit")
)
MODEL = f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT}, or the one that knows the task)"
CORRUPT = (
    '"clean", "gaussian:0.5", "gaussian" (all levels of the paper), "paper", "gaussian@10%" (the level that costs the '
    "unpruned model 10 % of its score); see clustrs corruptions"
)
CONDITIONS = o.option(CORRUPT, "C...", o.IMAGES, read=o.several(), complete=o.complete_corruptions)
SEEDS = o.option("seeds of the corruptions (default: 0)", "SEED...", o.IMAGES, read=o.several(SEED))
LONGEST = "longest answer (default: the task's)"
OUTPUT = "the run's folder (default: runs/TASK-MODEL-HASH)"
ADDRESS = "of the Ray cluster, for example auto (default: start one here)"
WORKERS = "number of Ray workers, each with a model (default: one per free CPU or GPU)"
FAILURES = "stop when N answers of a method in a row fail"
DRAW = "run the model again on N questions where methods disagree, and draw what was kept"
TIME = "run the model again, and time N answers of each method"
Sort = Literal["retention", "tokens", "selection", "prefill", "kv_bytes"]


@app.command("eval", cls=Command, epilog=EXAMPLES, rich_help_panel=PANEL)
@o.takes(o.attaching, o.prompting, o.loading)
def evaluate(
    ctx: typer.Context,
    config: Annotated[Path | None, o.option("options in a YAML file, or the name of a ready one", "FILE")] = None,
    task: Annotated[str | None, o.option(TASK, "TASK", o.QUESTIONS, complete=o.complete_tasks)] = None,
    data: Annotated[str | None, o.option("the folder (or file) of the task", "PATH", o.QUESTIONS)] = None,
    set_task: Annotated[Mapping[str, Any] | None, SET_TASK] = None,
    limit: Annotated[int | None, o.option("only the first N questions", "N", o.QUESTIONS, read=o.integer())] = None,
    batch_size: Annotated[int, o.option("questions answered together", "N", o.QUESTIONS, read=o.integer())] = 24,
    model: Annotated[str | None, o.option(MODEL, "ID_OR_FOLDER", o.MODEL, complete=o.complete_models)] = None,
    max_new_tokens: Annotated[int | None, o.option(LONGEST, "N", o.MODEL, read=o.integer())] = None,
    methods: o.Methods = None,
    pruning: o.PruningFile = None,
    keep: o.Keep = None,
    corrupt: Annotated[Sequence[str] | None, CONDITIONS] = None,
    seeds: Annotated[Sequence[int] | None, SEEDS] = None,
    output: Annotated[Path | None, o.option(OUTPUT, "FOLDER", RUN, "-o", "--output")] = None,
    engine: Annotated[EngineName, o.option("where to run", panel=RUN, choices=EngineName)] = "local",
    address: Annotated[str | None, o.option(ADDRESS, "HOST", RUN)] = None,
    workers: Annotated[int | None, o.option(WORKERS, "N", RUN, read=o.integer())] = None,
    no_retry: Annotated[bool, o.flag("keep failed answers instead of asking again", "--no-retry", RUN)] = False,
    max_failures: Annotated[int, o.option(FAILURES, "N", RUN, read=o.integer())] = 50,
    quiet: Annotated[bool, o.flag("no progress bar", "--quiet", RUN)] = False,
    **shared: Any,
) -> int:
    """Measure methods under corruption.

    Asks a model all questions of a task with every method, budget and corruption, and writes a report.
    """
    if model is not None:
        folder_of(model)  # a mistyped name is refused at once
    for name, value in (("address", address), ("workers", workers)):
        if value is not None and engine != "ray":
            raise ValueError(f"--{name} {value} needs --engine ray")
    from clustrs.evaluation.runner import get_engine, run

    runner = get_engine(engine, **({"address": address, "workers": workers} if engine == "ray" else {}))
    given = given_options(ctx)
    if chosen := o.read_pruning(ctx, pruning, refused=["deepstack"]):
        given |= {**chosen.options(), "methods": ["none", chosen.method.to_dict()]}
    settled = configuration(given)
    folder = output or default_folder(settled)
    base.check_folder("--output", folder)

    from clustrs.models.load import quiet_transformers

    quiet_transformers()
    print(f"run: {folder}", file=sys.stderr)
    tell = None if quiet else base.say
    summary = run(settled, folder, runner, retry=not no_retry, max_failures=max_failures, progress=not quiet, tell=tell)
    base.print_report(folder)
    return FAILED_ANSWERS if summary.failed else 0


def configuration(given: Mapping[str, Any]) -> "Config":
    """Build the run's configuration from the given options: defaults, then the file, then the options."""
    from clustrs.corruptions import missing_reason
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods, read_settings
    from clustrs.evaluation.tasks import check_task

    path = given.get("config")
    chosen = {**DEFAULTS, **(read_settings(path) if path else {})}
    if unknown := set(chosen) - {*SETTABLE, "task_options", "reproduces"}:
        raise ValueError(f"config {str(path)!r}: unknown option {sorted(unknown)[0]!r}")
    chosen |= {name: given[name] for name in SETTABLE if name in given}
    chosen["model"], chosen["task"] = model_and_task(chosen.get("model"), chosen.get("task"))
    for name, read in zip(DEFAULTS, READERS, strict=True):
        values = chosen[name] if isinstance(chosen[name], list | tuple) else [chosen[name]]
        try:
            chosen[name] = [part for one in values for part in (read(one) if isinstance(one, str) else [one])]
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if given.get("set_task"):
        chosen["task_options"] = {**chosen.get("task_options", {}), **given["set_task"]}
    corruptions = [str(text) for text in chosen.pop("corrupt")]
    by_loss = [text for text in corruptions if "@" in text]
    config = Config(
        methods=expand_methods(chosen.pop("methods"), chosen.pop("keep")),
        corruptions=expand_corruptions([text for text in corruptions if text not in by_loss] or ["clean"]),
        seeds=tuple(chosen.pop("seeds")),
        **chosen,
    )
    check_task(config.task)
    for text in config.corruptions:
        if reason := missing_reason(text.partition(":")[0]):
            raise ValueError(f"--corrupt {text}: {reason}")
    if not by_loss:
        return config
    levels = choose_levels(config, by_loss, given)
    return replace(config, corruptions=expand_corruptions([levels.get(text, text) for text in corruptions]))


def choose_levels(config: "Config", asked: Sequence[str], given: Mapping[str, Any]) -> dict[str, str]:
    """Find the levels for losses on the unpruned model's curve: a run of its own, which other runs find again."""
    from clustrs.evaluation.levels import curve_config, ladder, parse_loss, resolve_losses
    from clustrs.models.load import quiet_transformers

    ladders = {name: ladder(name) for name in (parse_loss(text)[0] for text in asked)}
    output = given.get("output")
    curve = output / "curve" if output else default_folder(curve_config(config, ladders))
    base.check_folder("--output", curve)
    quiet_transformers()
    print(f"curve of the unpruned model: {curve}", file=sys.stderr)
    levels = resolve_losses(asked, config, curve, progress=not given.get("quiet", False))
    for text, level in levels.items():
        print(f"  {text} is {level}", file=sys.stderr)
    return levels


def default_folder(config: "Config") -> Path:
    """Return a folder of its own for each configuration, so that the same command finds its run again."""
    stored = json.dumps(config.decisive(), sort_keys=True)
    model = Path(config.model).name[:60]
    return Path("runs") / f"{config.task[:60]}-{model}-{hashlib.sha256(stored.encode()).hexdigest()[:8]}"


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
    from clustrs.evaluation.results import lmms_result_files

    if not os.path.exists(folder / "config.json") and lmms_result_files(folder):
        if images or latency or judge_model:
            raise ValueError("--images, --latency and --judge-model need a run of clustrs eval")
        for run in load_needed("clustrs.importers", "clustrs-lmms", "cli")(folder, metric, base.say):
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


@app.command("leaderboard", cls=Command, rich_help_panel=PANEL)
def leaderboard(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of complete runs")],
    output: o.OutputFolder,
    sort: Annotated[Sort, o.option("order of the methods of a budget", choices=Sort)] = "retention",
) -> None:
    """Rank the methods of complete runs by the share of the unpruned model's score that they keep.

    Writes leaderboard.md, .csv and .html. Runs of one model are joined, those of several models averaged. Times and
    bytes are those that clustrs report RUN --latency N measured.
    """
    base.check_folder("--output", output)
    from clustrs.evaluation.report.leaderboard import write_leaderboard

    print(write_leaderboard(folders, output, sort).terminal(base.width()))
    print(f"\nper cent of the unpruned score; {output / 'leaderboard.html'}")


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
