"""`clustrs eval`: methods, budgets and corruptions on a task."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustrs.cli import terminal, values
from clustrs.cli.arguments import option
from clustrs.cli.commands import command
from clustrs.cli.outputs import check_folder, print_report
from clustrs.embedded import DEFAULT, default_task, folder_of, model_and_task
from clustrs.validation import Crops, EngineName, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config
    from clustrs.evaluation.engines import Engine
    from clustrs.evaluation.runner import RunSummary

EXAMPLES = """\
examples:
  clustrs eval                                          the embedded model on its own task, clean, with 16 tokens
  clustrs eval --limit 24 --corrupt clean gaussian:1 --keep 16 50 --methods none clustrs fastervlm
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
    "methods": ["none", "clustrs", "fastervlm", "divprune", "visionzip", "random"],
    "keep": [16],
    "corrupt": ["clean"],
    "seeds": [0],
}
FAILED_ANSWERS = 3
"""The exit status of a run that is complete, but for answers that failed."""
GRID = ("model", "task", *DEFAULTS)
"""What a run measures."""
LISTS = ("methods", "keep", "corrupt", "seeds")
PLAIN = (
    *("data", "limit", "batch_size", "max_new_tokens", "scope", "crops", "positions"),
    *("prompt_template", "image_padding"),
    *(one.name for one in fields(LoadOptions)),
)


@dataclass(frozen=True, kw_only=True)
class GridOptions(LoadOptions):
    """What a run measures. No defaults here: what is not given may be in the configuration file."""

    config: Path | None = option(None, "options in a YAML file, or the name of a ready one", metavar="FILE")
    task: str | None = option(None, f"the task, see clustrs tasks (default: the model's own, {default_task(DEFAULT)})")
    data: str | None = option(None, "the folder (or file) of the task", metavar="PATH")
    set_task: dict[str, Any] = option({}, "options of the task, e.g. scoring=contains", metavar="KEY=VALUE")
    limit: int | None = option(None, "only the first so many questions", metavar="N")
    batch_size: int | None = option(None, "questions that are answered together (default: 24)", metavar="N")
    model: str | None = option(
        None,
        f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT}, or the one that knows the task)",
        metavar="ID_OR_FOLDER",
    )
    methods: tuple[str, ...] | None = option(
        None, '"clustrs", "clustrs tau=2", "all" ...; see clustrs methods', metavar="METHOD"
    )
    keep: tuple[int | float, ...] | None = option(None, "counts or fractions (default: 16)", metavar="K")
    corrupt: tuple[str, ...] | None = option(
        None,
        '"clean", "gaussian:0.5", "gaussian" (all levels of the paper), "paper", "gaussian@10%" (the level that costs '
        "the unpruned model 10 % of its score); see clustrs corruptions",
        metavar="C",
    )
    seeds: tuple[int, ...] | None = option(
        None, "seeds of the corruptions (default: 0)", metavar="SEED", low=0, high=values.LARGEST_SEED
    )
    max_new_tokens: int | None = option(None, "longest answer (default: the task's)", metavar="N")
    scope: Scope | None = option(None, 'one budget for the whole "image" or for each "crop" (default: image)')
    crops: Crops | None = option(None, '"all" crops or the "base" crop alone (default: all)')
    positions: Positions | None = option(None, '"compact" or "original" position of kept tokens (default: compact)')
    prompt_template: PromptTemplate | None = option(
        None, "the model's own chat template, or LLaVA-1.5's with its system line (default: checkpoint)"
    )
    image_padding: ImagePadding | None = option(
        None,
        "as the model's processor has it, or padded to a square with the mean colour instead of cropped, as "
        "LLaVA-1.5 is evaluated (default: checkpoint)",
    )


@dataclass(frozen=True, kw_only=True)
class EvalOptions(GridOptions):
    """The options of `clustrs eval`."""

    output: Path | None = option(
        None, "the run's folder (default: runs/TASK-MODEL-HASH)", "-o", "--output", metavar="FOLDER", panel="Run"
    )
    engine: EngineName = option("local", "where to run", panel="Run")
    address: str | None = option(None, "of the Ray cluster, for example auto (default: start one here)", panel="Run")
    workers: int | None = option(
        None, "how many Ray workers, each with a model (default: one per free CPU or GPU)", metavar="N", panel="Run"
    )
    no_retry: bool = option(False, "keep failed answers instead of asking again", panel="Run")
    max_failures: int = option(50, "stop when N answers of a method in a row fail", metavar="N", panel="Run")
    quiet: bool = option(False, "no progress bar", panel="Run")


@command("eval", panel="Measure", examples=EXAMPLES)
def run_eval(options: EvalOptions) -> int:
    """Measure methods under corruption.

    Asks a model all questions of a task with every method, budget and corruption, and writes a report.
    """
    if options.model is not None:
        folder_of(options.model)  # a mistyped name is told at once
    engine = make_engine(options)
    config = configuration(options)
    folder = options.output or default_folder(config)
    check_folder("--output", folder)
    summary = answer_all(config, folder, engine, options)
    print_report(folder)
    return FAILED_ANSWERS if summary.failed else 0


def answer_all(config: "Config", folder: Path, engine: "Engine", options: EvalOptions) -> "RunSummary":
    """Run the grid, and say where its answers are stored."""
    from clustrs.evaluation.runner import run
    from clustrs.models.load import quiet_transformers

    quiet_transformers()
    print(f"run: {folder}", file=sys.stderr)
    return run(
        config,
        folder,
        engine,
        retry=not options.no_retry,
        max_failures=options.max_failures,
        progress=not options.quiet,
        tell=None if options.quiet else terminal.say,
    )


def make_engine(options: EvalOptions) -> "Engine":
    """Where the run is done; what only Ray has is refused elsewhere."""
    from clustrs.evaluation.engines import get_engine

    for name in ("address", "workers"):
        value = getattr(options, name)
        if value is not None and options.engine != "ray":
            raise ValueError(f"--{name} {value}: this is for Ray, add --engine ray or leave it out")
    settings = {"address": options.address, "workers": options.workers} if options.engine == "ray" else {}
    return get_engine(options.engine, **settings)


def configuration(options: EvalOptions) -> "Config":
    """The run's configuration: defaults, then the file, then the options."""
    from clustrs.corruptions import missing_reason
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods
    from clustrs.evaluation.tasks import check_task

    chosen = {**DEFAULTS, **(file_settings(options.config) if options.config else {})}
    given = {name: getattr(options, name) for name in (*GRID, *PLAIN)}
    chosen |= {name: value for name, value in given.items() if value is not None and value is not False}
    chosen["model"], chosen["task"] = model_and_task(chosen.get("model"), chosen.get("task"))
    for name in LISTS:
        try:
            chosen[name] = as_list(chosen[name], values.split_methods if name == "methods" else values.split)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if options.set_task:
        check_task_options(options.set_task)
        chosen["task_options"] = {**chosen.get("task_options", {}), **options.set_task}
    keeps = [
        values.read_value("keep", value, values.keep) if isinstance(value, str) else value
        for value in chosen.pop("keep")
    ]
    corruptions = [str(text) for text in chosen.pop("corrupt")]
    by_loss = [text for text in corruptions if "@" in text]
    config = Config(
        methods=expand_methods(chosen.pop("methods"), keeps),
        corruptions=expand_corruptions([text for text in corruptions if text not in by_loss] or ["clean"]),
        seeds=tuple(chosen.pop("seeds")),
        **chosen,
    )
    check_task(config.task)
    for text in config.corruptions:
        reason = missing_reason(text.partition(":")[0])
        if reason:
            raise ValueError(f"--corrupt {text}: {reason}")
    return choose_levels(config, corruptions, options) if by_loss else config


def choose_levels(config: "Config", corruptions: Sequence[str], options: EvalOptions) -> "Config":
    """The configuration with levels from the unpruned model's curve; what that was measured on is kept beside the run.

    The curve is a run of its own: without --output in a folder of its own, so that other runs find it again.
    """
    from clustrs.evaluation.config import expand_corruptions
    from clustrs.evaluation.levels import curve_config, ladder, parse_loss, resolve_losses
    from clustrs.models.load import quiet_transformers

    asked = [text for text in corruptions if "@" in text]
    names = [parse_loss(text)[0] for text in asked]
    ladders = {name: ladder(name) for name in names}
    curve = options.output / "curve" if options.output else default_folder(curve_config(config, ladders))
    check_folder("--output", curve)
    quiet_transformers()
    print(f"curve of the unpruned model: {curve}", file=sys.stderr)
    levels = resolve_losses(asked, config, curve, progress=not options.quiet)
    for text, level in levels.items():
        print(f"  {text} is {level}", file=sys.stderr)
    return replace(config, corruptions=expand_corruptions([levels.get(text, text) for text in corruptions]))


def file_settings(path: Path) -> dict[str, Any]:
    """The options in a configuration file."""
    from clustrs.evaluation.config import read_settings

    loaded = read_settings(path)
    unknown = set(loaded) - {*GRID, *PLAIN, "task_options", "reproduces"}
    if unknown:
        raise ValueError(f"config {str(path)!r}: unknown option {sorted(unknown)[0]!r}")
    return loaded


def as_list(value: Any, split: Callable[[Sequence[str]], list[str]] = values.split) -> list[Any]:
    """A list, however a configuration file has it: as a list, as one value, or as a string with commas."""
    given = value if isinstance(value, list | tuple) else [value]
    parts: list[Any] = []
    for one in given:
        parts += split([one]) if isinstance(one, str) else [one]
    return parts


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
