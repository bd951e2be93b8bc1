"""`clustrs eval`, `report`, `judge`, `export`, `import` and `corrupt`."""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustrs.cli import values
from clustrs.cli.ask import add_choices, check_file, check_folder
from clustrs.cli.protocol_options import add_protocol_options
from clustrs.embedded import DEFAULT, image_path

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config

EVAL_EXAMPLES = """\
examples:
  clustrs eval                                          the embedded model on drawn scenes, clean, with 16 tokens
  clustrs eval --corrupt clean gaussian --keep 16 50 144 --methods none clustrs fastervlm
  clustrs eval --task mmvet --data mm-vet --model llava-hf/llava-1.5-7b-hf --methods none "clustrs tau=2" -o runs/tau
  clustrs eval --config paper/mmvet-gaussian --data mm-vet
Stopped or killed, the same command resumes where it was, and asks again what failed. Options override what is in a
--config file. Lists are given with spaces or commas: --keep 16 50 is --keep 16,50

exit status:
  0  every question has an answer
  2  nothing was run, or the run had to stop; one line says why
  3  the run is complete, but some answers failed: the report counts them, the same command asks them again
  130  interrupted
"""
DEFAULTS: dict[str, Any] = {
    "task": "scenes",
    "model": DEFAULT,
    "methods": ["none", "clustrs", "fastervlm", "divprune", "visionzip", "random"],
    "keep": [16],
    "corrupt": ["clean"],
    "seeds": [0],
}
FAILED_ANSWERS = 3
"""The exit status of a run that is complete, but for answers that failed."""
LISTS = ("methods", "keep", "corrupt", "seeds")
FORMATS = ("mmvet", "llava")
PLAIN = (
    *("data", "limit", "batch_size", "max_new_tokens", "scope", "crops", "positions"),
    *("prompt_template", "image_padding"),
)


def add_commands(commands: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    evaluate = commands.add_parser(
        "eval",
        help="measure methods under corruption",
        description="Ask a model all questions of a task with every method, budget and corruption; write the report.",
        epilog=EVAL_EXAMPLES,
        formatter_class=raw,
    )
    add_grid(evaluate)
    evaluate.set_defaults(run=run_eval)

    report = commands.add_parser(
        "report",
        help="tables and plots of a run",
        description="Write report.html, .md, .tex and .csv into a run's folder.",
    )
    report.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run")
    report.add_argument("--judge-model", help="whose verdicts count, when there are several judges'")
    report.add_argument("--compare-with", metavar="MODEL", help="show the paper's numbers for this model next to ours")
    again: Any = {"action": values.One, "read": values.integer(high=10_000), "metavar": "N"}
    report.add_argument(
        "--images", **again, help="run the model again on N questions where methods disagree, and draw what was kept"
    )
    report.add_argument("--latency", **again, help="run the model again, and time N answers of each method")
    report.set_defaults(run=run_report)

    judge = commands.add_parser(
        "judge",
        help="let a language model score the answers of a run",
        description="Score answers with any OpenAI-compatible server. The key comes from the variable OPENAI_API_KEY.",
    )
    judge.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run")
    judge.add_argument("--judge-model", required=True, help="the judge's name on the server")
    judge.add_argument("--judge-url", default="https://api.openai.com/v1", help="the server (default: %(default)s)")
    judge.add_argument(
        "--judge-runs",
        action=values.One,
        read=values.integer(high=1000),
        default=1,
        help="ask so many times and average (default: 1)",
    )
    judge.add_argument(
        "--concurrency",
        action=values.One,
        read=values.integer(high=1000),
        default=4,
        help="calls at a time (default: 4)",
    )
    judge.add_argument("--yes", action="store_true", help="do not ask for confirmation, however many calls it takes")
    judge.set_defaults(run=run_judge)

    export = commands.add_parser("export", help="write answers in the formats of others")
    export.add_argument("folder", metavar="RUN", type=Path, help="the folder of a run")
    export.add_argument("--format", required=True, choices=FORMATS, help="of MM-Vet's evaluator, or LLaVA's scorer")
    export.add_argument("-o", "--output", type=Path, required=True, help="a folder for the files")
    export.set_defaults(run=run_export)

    read = commands.add_parser("import", help="score predictions that were made elsewhere")
    read.add_argument("file", metavar="FILE", type=Path, help="the predictions, or a grade file of MM-Vet's evaluator")
    read.add_argument("--format", required=True, choices=FORMATS, help="what format they have")
    read.add_argument(
        "--grades", metavar="FILE", type=Path, help="their scores from MM-Vet's evaluator, ..._JUDGE-grade-3runs.json"
    )
    read.add_argument("--task", required=True, help="the task, see clustrs tasks")
    read.add_argument("--data", type=Path, help="the folder of the task's files")
    read.add_argument("--name", default="imported", help="what to call the method (default: imported)")
    read.add_argument("-o", "--output", type=Path, required=True, help="the folder of the new run")
    read.set_defaults(run=run_import)

    corrupt = commands.add_parser(
        "corrupt",
        help="corrupt an image",
        description="Corrupt an image as an evaluation would, or show all corruptions.",
    )
    corrupt.add_argument("image", metavar="IMAGE", help="an image file, or sample:NAME (see clustrs samples)")
    corrupt.add_argument("--corrupt", metavar="NAME:LEVEL", help="for example gaussian:0.5; see clustrs corruptions")
    corrupt.add_argument(
        "--seed", action=values.One, read=values.seed, default=0, help="seed of what is random (default: 0)"
    )
    corrupt.add_argument(
        "--contact-sheet", action="store_true", help="draw all corruptions at all levels on a contact sheet"
    )
    corrupt.add_argument("-o", "--output", type=Path, required=True, help="the image to write")
    corrupt.set_defaults(run=run_corrupt)


def add_grid(command: argparse.ArgumentParser) -> None:
    """No defaults here: what is not given may be in the configuration file."""
    command.add_argument(
        "--config", metavar="FILE", type=Path, help="options in a YAML file, or the name of a ready one"
    )
    command.add_argument("--task", help="the task, see clustrs tasks (default: scenes)")
    command.add_argument("--data", help="the folder (or file) of the task")
    command.add_argument(
        "--set-task", metavar="KEY=VALUE", action=values.Settings, help="options of the task, e.g. scoring=contains"
    )
    command.add_argument("--model", help=f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT})")
    several: Any = {"action": values.Several, "read": str}
    command.add_argument(
        "--methods", **several, metavar="METHOD", help='"clustrs", "clustrs tau=2", "all" ...; see clustrs methods'
    )
    command.add_argument(
        "--keep", action=values.Several, read=values.keep, metavar="K", help="counts or fractions (default: 16)"
    )
    command.add_argument(
        "--corrupt",
        **several,
        metavar="C",
        help='"clean", "gaussian:0.5", "gaussian" (all levels of the paper), "paper"; see clustrs corruptions',
    )
    command.add_argument(
        "--seeds", action=values.Several, read=values.seed, metavar="SEED", help="seeds of the corruptions (default: 0)"
    )
    whole: Any = {"action": values.One, "read": values.integer()}
    command.add_argument("--limit", **whole, help="only the first so many questions")
    command.add_argument("--batch-size", **whole, help="questions that are answered together (default: 24)")
    command.add_argument("--max-new-tokens", **whole, help="longest answer (default: the task's)")
    add_choices(command, scope=None, crops=None, positions=None)
    add_protocol_options(command)
    command.add_argument("-o", "--output", type=Path, help="the run's folder (default: runs/TASK-MODEL-HASH)")
    command.add_argument("--engine", choices=("local", "ray"), default="local", help="where to run (default: local)")
    command.add_argument("--address", help="of the Ray cluster, for example auto (default: start one here)")
    command.add_argument(
        "--workers", **whole, help="how many Ray workers, each with a model (default: one per free CPU or GPU)"
    )
    command.add_argument("--no-retry", action="store_true", help="keep failed answers instead of asking again")
    command.add_argument(
        "--max-failures",
        type=int,
        default=50,
        metavar="N",
        help="stop when N answers of a method in a row fail (default: 50)",
    )
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def as_list(value: Any) -> list[Any]:
    """A list, however a configuration file has it: as a list, as one value, or as a string with commas."""
    given = value if isinstance(value, list | tuple) else [value]
    parts: list[Any] = []
    for one in given:
        parts += values.split([one]) if isinstance(one, str) else [one]
    return parts


def configuration(options: argparse.Namespace) -> "Config":
    """The run's configuration: defaults, then the file, then the options."""
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods, read_settings

    chosen = dict(DEFAULTS)
    if options.config:
        loaded = read_settings(options.config)
        unknown = set(loaded) - {*DEFAULTS, *PLAIN, "task_options", "reproduces"}
        if unknown:
            raise ValueError(f"config {str(options.config)!r}: unknown option {sorted(unknown)[0]!r}")
        chosen |= loaded
    given = {name: getattr(options, name) for name in (*DEFAULTS, *PLAIN)}
    chosen |= {name: value for name, value in given.items() if value is not None}
    for name in LISTS:
        try:
            chosen[name] = as_list(chosen[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if options.set_task:
        check_task_options(options.set_task)
        chosen["task_options"] = {**chosen.get("task_options", {}), **options.set_task}
    keeps = [
        values.read_value("keep", value, values.keep) if isinstance(value, str) else value
        for value in chosen.pop("keep")
    ]
    return Config(
        methods=expand_methods(chosen.pop("methods"), keeps),
        corruptions=expand_corruptions([str(text) for text in chosen.pop("corrupt")]),
        seeds=tuple(chosen.pop("seeds")),
        **chosen,
    )


def check_task_options(given: Mapping[str, Any]) -> None:
    """What has an option of its own is not an option of the task."""
    for name in ("data", "limit"):
        if name in given:
            raise ValueError(f"--set-task {name}={given[name]}: give --{name} {given[name]}")


def default_folder(config: "Config") -> Path:
    """A folder of its own for each configuration, so that the same command finds its run again."""
    stored = json.dumps(config.decisive(), sort_keys=True)
    model = Path(config.model).name[:60]
    return Path("runs") / f"{config.task[:60]}-{model}-{hashlib.sha256(stored.encode()).hexdigest()[:8]}"


def run_eval(options: argparse.Namespace) -> int:
    from clustrs.evaluation.engines import get_engine
    from clustrs.evaluation.runner import run
    from clustrs.models.load import quiet_transformers

    for name in ("address", "workers"):
        value = getattr(options, name)
        if value is not None and options.engine != "ray":
            raise ValueError(f"--{name} {value}: this is for Ray, add --engine ray or leave it out")
    config = configuration(options)
    folder = options.output or default_folder(config)
    check_folder("--output", folder)
    settings = {"address": options.address, "workers": options.workers} if options.engine == "ray" else {}
    engine = get_engine(options.engine, **settings)
    quiet_transformers()
    print(f"run: {folder}", file=sys.stderr)
    summary = run(
        config,
        folder,
        engine,
        retry=not options.no_retry,
        max_failures=options.max_failures,
        progress=not options.quiet,
    )
    show(folder)
    return FAILED_ANSWERS if summary.failed else 0


def show(folder: Path, judge: str | None = None, compare_with: str | None = None) -> None:
    """The table in the terminal, and where the report is."""
    from clustrs.evaluation.report import terminal_table, write_report
    from clustrs.evaluation.results import load_run

    run = load_run(folder, judge)
    print(terminal_table(run, compare_with))
    print(f"\nreport: {write_report(folder, judge, compare_with)}")


def run_report(options: argparse.Namespace) -> None:
    if options.images or options.latency:
        from clustrs.evaluation.report.rerun import draw_examples, measure_latency
        from clustrs.models.load import quiet_transformers

        quiet_transformers()
        if options.images:
            draw_examples(options.folder, options.images, options.judge_model)
        if options.latency:
            measure_latency(options.folder, options.latency)
    show(options.folder, options.judge_model, options.compare_with)


def run_judge(options: argparse.Namespace) -> None:
    from clustrs.evaluation.judge import Judge
    from clustrs.evaluation.verdicts import judge_run

    judge = Judge(options.judge_model, options.judge_url, os.environ.get("OPENAI_API_KEY"))
    confirm = None if options.yes else partial(confirm_calls, judge.model, judge.url)
    summary = judge_run(options.folder, judge, options.judge_runs, options.concurrency, confirm=confirm)
    print(f"judged {summary.judged}, reused {summary.reused}, failed {summary.failed}")
    show(options.folder, options.judge_model)


def confirm_calls(model: str, url: str, calls: int) -> bool:
    """Ask the user, who may have to pay for them."""
    text = f"{calls} calls to {model} at {url}"
    if not sys.stdin.isatty():
        raise ValueError(f"{text}: confirm them with --yes")
    print(f"{text}. Go ahead? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def run_export(options: argparse.Namespace) -> None:
    from clustrs.evaluation.formats import export_run

    for path in export_run(options.folder, options.format, options.output):
        print(path)


def run_import(options: argparse.Namespace) -> None:
    from clustrs.evaluation.formats import import_predictions, import_run
    from clustrs.evaluation.grades import holds_grades, read_grades, totals
    from clustrs.evaluation.tasks import get_task

    task = get_task(options.task, options.data)
    grades = read_grades(options.grades) if options.grades else None
    if grades is None and options.format == "mmvet" and holds_grades(options.file):
        grades = read_grades(options.file)
        predictions = dict.fromkeys(grades.scores, "")
        print(
            "the file has scores only: answers are recorded without their words (--grades takes both)", file=sys.stderr
        )
    else:
        predictions = import_predictions(options.file, options.format)
    aside = import_run(task, predictions, options.name, options.output, grades)
    if aside:
        print(f"{aside} of {len(predictions)} predictions set aside: their questions have no image", file=sys.stderr)
    show(options.output)
    if grades is not None:
        graded = f"{len(grades.scores)} of {len(task.items)} questions, judge {grades.judge}"
        print(f"\nas MM-Vet's evaluator prints it ({graded}):\n{totals(grades, task.items)}")
        if grades.without_number:
            print(
                f"{grades.without_number} of the scores are 0 because the judge's reply was no number", file=sys.stderr
            )


def run_corrupt(options: argparse.Namespace) -> None:
    from clustrs.images.corruptions import Corruption
    from clustrs.images.corruptions.contact_sheet import contact_sheet
    from clustrs.images.open import open_image

    if options.contact_sheet == bool(options.corrupt):
        raise ValueError("give --corrupt NAME:LEVEL for one image, or --contact-sheet for all corruptions")
    corruption = None if options.contact_sheet else Corruption.parse(options.corrupt)
    check_file("--output", options.output)
    path = image_path(options.image)
    image = open_image(path)
    result = (
        corruption.apply(image, path.name, options.seed)
        if corruption
        else contact_sheet(image, path.name, options.seed)
    )
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result.save(options.output)
    except (ValueError, OSError) as error:
        raise ValueError(f"--output {str(options.output)!r}: {getattr(error, 'strerror', None) or error}") from None
    print(options.output)
