"""`clustrs eval`: methods, budgets and corruptions on a task."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import SETTINGS, Command, app, given_options
from clustrs.embedded import DEFAULT, default_task, folder_of, model_and_task
from clustrs.validation import EngineName, LoadOptions

if TYPE_CHECKING:
    from clustrs.evaluation.config import Config
    from clustrs.evaluation.engines import Engine

RUN = "Run"
EXAMPLES = """\
examples:
  clustrs eval                                          the embedded model on its own task, clean, with 16 tokens
  clustrs eval --limit 24 --corrupt clean gaussian:1 --keep 16 50 --methods none clustrs fastervlm
  clustrs eval --task mmvet --data mm-vet --model llava-hf/llava-1.5-7b-hf --methods none "clustrs tau=2" -o runs/tau
  clustrs eval --config paper/mmvet-gaussian --data mm-vet
Stopped or killed, the same command resumes, and asks again what failed. Options override those of a --config file.
Separate the values of a list by spaces or commas: --keep 16 50 is --keep 16,50

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
SETTABLE = (
    *("model", "task", *DEFAULTS, "data", "limit", "batch_size", "max_new_tokens", "scope", "crops", "positions"),
    *("attention", "prompt_template", "image_padding"),
    *(one.name for one in fields(LoadOptions)),
)
"""Settings of a configuration file and of the command line."""


TASK = f"the task, see clustrs tasks (default: the model's own, {default_task(DEFAULT)})"
SET_TASK = "options of the task, e.g. scoring=contains"
TaskSettings = Annotated[Mapping[str, Any] | None, o.option(SET_TASK, SETTINGS, o.QUESTIONS, read=o.read_settings)]
MODEL = f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT}, or the one that knows the task)"
LONGEST = "longest answer (default: the task's)"
CORRUPT = (
    '"clean", "gaussian:0.5", "gaussian" (all levels of the paper), "paper", "gaussian@10%" (the level that costs the '
    "unpruned model 10 % of its score); see clustrs corruptions"
)
Corruptions = Annotated[
    Sequence[str] | None, o.option(CORRUPT, "C...", o.IMAGES, read=o.several(), complete=o.complete_corruptions)
]
SEEDS, SEED = "seeds of the corruptions (default: 0)", o.integer(0, o.LARGEST_SEED)
OUTPUT = "the run's folder (default: runs/TASK-MODEL-HASH)"
ADDRESS = "of the Ray cluster, for example auto (default: start one here)"
WORKERS = "number of Ray workers, each with a model (default: one per free CPU or GPU)"
FAILURES = "stop when N answers of a method in a row fail"


@app.command("eval", cls=Command, epilog=EXAMPLES, rich_help_panel="Measure")
def evaluate(
    ctx: typer.Context,
    config: Annotated[Path | None, o.option("options in a YAML file, or the name of a ready one", "FILE")] = None,
    task: Annotated[str | None, o.option(TASK, "TASK", o.QUESTIONS, complete=o.complete_tasks)] = None,
    data: Annotated[str | None, o.option("the folder (or file) of the task", "PATH", o.QUESTIONS)] = None,
    set_task: Annotated[
        Mapping[str, Any] | None, o.option(SET_TASK, SETTINGS, o.QUESTIONS, read=o.read_settings)
    ] = None,
    limit: Annotated[int | None, o.option("only the first N questions", "N", o.QUESTIONS, read=o.integer())] = None,
    batch_size: Annotated[int, o.option("questions answered together", "N", o.QUESTIONS, read=o.integer())] = 24,
    model: Annotated[str | None, o.option(MODEL, "ID_OR_FOLDER", o.MODEL, complete=o.complete_models)] = None,
    prompt_template: o.Template = "checkpoint",
    image_padding: o.Padding = "checkpoint",
    max_new_tokens: Annotated[int | None, o.option(LONGEST, "N", o.MODEL, read=o.integer())] = None,
    device: o.Device = None,
    dtype: o.DtypeOption = None,
    attn: o.Attn = None,
    load_in_8bit: o.Load8Bit = False,
    load_in_4bit: o.Load4Bit = False,
    device_map: o.DeviceMap = None,
    methods: o.Methods = None,
    keep: o.Keep = None,
    scope: o.ScopeOption = "image",
    crops: o.CropsOption = "all",
    positions: o.PositionsOption = "compact",
    attention: o.AttentionOption = "plain",
    corrupt: Annotated[
        Sequence[str] | None, o.option(CORRUPT, "C...", o.IMAGES, read=o.several(), complete=o.complete_corruptions)
    ] = None,
    seeds: Annotated[Sequence[int] | None, o.option(SEEDS, "SEED...", o.IMAGES, read=o.several(SEED))] = None,
    output: Annotated[Path | None, o.option(OUTPUT, "FOLDER", RUN, "-o", "--output")] = None,
    engine: Annotated[EngineName, o.option("where to run", panel=RUN, choices=EngineName)] = "local",
    address: Annotated[str | None, o.option(ADDRESS, "HOST", RUN)] = None,
    workers: Annotated[int | None, o.option(WORKERS, "N", RUN, read=o.integer())] = None,
    no_retry: Annotated[bool, o.flag("keep failed answers instead of asking again", "--no-retry", RUN)] = False,
    max_failures: Annotated[int, o.option(FAILURES, "N", RUN, read=o.integer())] = 50,
    quiet: Annotated[bool, o.flag("no progress bar", "--quiet", RUN)] = False,
) -> int:
    """Measure methods under corruption.

    Asks a model all questions of a task with every method, budget and corruption, and writes a report.
    """
    if model is not None:
        folder_of(model)  # a mistyped name is refused at once
    runner = make_engine(engine, address, workers)
    settled = configuration(given_options(ctx))
    folder = output or default_folder(settled)
    base.check_folder("--output", folder)

    from clustrs.evaluation.runner import run
    from clustrs.models.load import quiet_transformers

    quiet_transformers()
    print(f"run: {folder}", file=sys.stderr)
    summary = run(
        settled,
        folder,
        runner,
        retry=not no_retry,
        max_failures=max_failures,
        progress=not quiet,
        tell=None if quiet else base.say,
    )
    base.print_report(folder)
    return FAILED_ANSWERS if summary.failed else 0


def make_engine(engine: EngineName, address: str | None, workers: int | None) -> "Engine":
    """Return the engine; what only Ray has is refused elsewhere."""
    from clustrs.evaluation.engines import get_engine

    for name, value in (("address", address), ("workers", workers)):
        if value is not None and engine != "ray":
            raise ValueError(f"--{name} {value} needs --engine ray")
    return get_engine(engine, **({"address": address, "workers": workers} if engine == "ray" else {}))


def configuration(given: Mapping[str, Any]) -> "Config":
    """Build the run's configuration from the given options: defaults, then the file, then the options."""
    from clustrs.corruptions import missing_reason
    from clustrs.evaluation.config import Config, expand_corruptions, expand_methods
    from clustrs.evaluation.tasks import check_task

    chosen = {**DEFAULTS, **(file_settings(given["config"]) if "config" in given else {})}
    chosen |= {name: given[name] for name in SETTABLE if name in given}
    chosen["model"], chosen["task"] = model_and_task(chosen.get("model"), chosen.get("task"))
    for name in DEFAULTS:
        try:
            chosen[name] = as_list(chosen[name], o.split_methods if name == "methods" else o.split)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if given.get("set_task"):
        check_task_options(given["set_task"])
        chosen["task_options"] = {**chosen.get("task_options", {}), **given["set_task"]}
    keeps = [file_keep(value) if isinstance(value, str) else value for value in chosen.pop("keep")]
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
    return choose_levels(config, corruptions, given) if by_loss else config


def choose_levels(config: "Config", corruptions: Sequence[str], given: Mapping[str, Any]) -> "Config":
    """Replace losses by levels from the unpruned model's curve; what that was measured on is kept beside the run.

    The curve is a run of its own: without --output in a folder of its own, so that other runs find it again.
    """
    from clustrs.evaluation.config import expand_corruptions
    from clustrs.evaluation.levels import curve_config, ladder, parse_loss, resolve_losses
    from clustrs.models.load import quiet_transformers

    asked = [text for text in corruptions if "@" in text]
    ladders = {name: ladder(name) for name in (parse_loss(text)[0] for text in asked)}
    output = given.get("output")
    curve = output / "curve" if output else default_folder(curve_config(config, ladders))
    base.check_folder("--output", curve)
    quiet_transformers()
    print(f"curve of the unpruned model: {curve}", file=sys.stderr)
    levels = resolve_losses(asked, config, curve, progress=not given.get("quiet", False))
    for text, level in levels.items():
        print(f"  {text} is {level}", file=sys.stderr)
    return replace(config, corruptions=expand_corruptions([levels.get(text, text) for text in corruptions]))


def file_settings(path: Path) -> dict[str, Any]:
    """Read the options in a configuration file."""
    from clustrs.evaluation.config import read_settings

    loaded = read_settings(path)
    unknown = set(loaded) - {*SETTABLE, "task_options", "reproduces"}
    if unknown:
        raise ValueError(f"config {str(path)!r}: unknown option {sorted(unknown)[0]!r}")
    return loaded


def file_keep(text: str) -> int | float:
    """Read a budget that a configuration file has as text."""
    try:
        return o.read_keep(text)
    except ValueError as error:
        raise ValueError(f"keep {error}, got {text!r}") from None


def as_list(value: Any, split: Callable[[Sequence[str]], list[str]] = o.split) -> list[Any]:
    """Return a list, however a configuration file has it: as a list, as one value, or as a string with commas."""
    given = value if isinstance(value, list | tuple) else [value]
    parts: list[Any] = []
    for one in given:
        parts += split([one]) if isinstance(one, str) else [one]
    return parts


def check_task_options(given: Mapping[str, Any]) -> None:
    """Refuse options of the task that are options of the command."""
    for name in ("data", "limit"):
        if name in given:
            raise ValueError(f"--set-task must not contain {name} (write --{name} {given[name]})")


def default_folder(config: "Config") -> Path:
    """Return a folder of its own for each configuration, so that the same command finds its run again."""
    stored = json.dumps(config.decisive(), sort_keys=True)
    model = Path(config.model).name[:60]
    return Path("runs") / f"{config.task[:60]}-{model}-{hashlib.sha256(stored.encode()).hexdigest()[:8]}"
