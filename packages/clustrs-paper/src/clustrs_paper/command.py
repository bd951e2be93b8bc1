"""`clustrs study`: the paper's studies on any model and images, one Typer command each.

A command hands the options that were given to the config of its study, which knows the defaults and checks the values.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from clustrs.cli import base
from clustrs.cli import options as o
from clustrs.cli.base import SETTINGS, Command, Group, given_options
from clustrs.cli.base import parse as parse_command
from clustrs.embedded import DEFAULT
from clustrs.validation import is_number

Function = TypeVar("Function", bound=Callable[..., None])
Parameter = Literal["tau", "clip", "centroid"]
LISTS = "Separate the values of a list by spaces or commas"
IMAGES = "Images come before the options."


def number(text: str) -> float:
    """Read a finite number."""
    with suppress(ValueError):
        if is_number(value := float(text)):
            return value
    raise ValueError("must be a number")


# The model.
MODEL = f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT}, or the one that knows the task)"
Model = Annotated[str | None, o.option(MODEL, "ID_OR_FOLDER", o.MODEL, complete=o.complete_models)]
Quiet = Annotated[bool, o.flag("no progress bar", "--quiet")]

# Images and questions.
IMAGE = "image files, folders of them, or sample:NAME (default: images of the task)"
Images = Annotated[list[str] | None, typer.Argument(metavar="IMAGE...", help=IMAGE, autocompletion=o.complete_images)]
Count = Annotated[
    int, o.option("number of images of the task, when no image is given", "N", o.IMAGES, read=o.integer())
]
TASK = "the task, see clustrs tasks (default: the model's own)"
Task = Annotated[str | None, o.option(TASK, "TASK", o.QUESTIONS, complete=o.complete_tasks)]
Data = Annotated[str | None, o.option("the folder (or file) of the task", "PATH", o.QUESTIONS)]
TaskOptions = Annotated[
    Mapping[str, Any] | None,
    o.option("options of the task", SETTINGS, o.QUESTIONS, "--set-task", read=o.read_settings("data", "limit")),
]
LIMIT = "number of questions, from the first on (default: some of scenes and photos, all of other tasks)"
Limit = Annotated[int | None, o.option(LIMIT, "N", o.QUESTIONS, read=o.integer())]
BatchSize = Annotated[int, o.option("questions answered together", "N", o.QUESTIONS, read=o.integer())]
JUDGE = "judge whose verdicts count, for tasks that are scored by one"
JudgeModel = Annotated[str | None, o.option(JUDGE, "NAME", o.QUESTIONS)]

# Methods.
METHODS = 'methods, see clustrs methods; parameters may follow ("clustrs tau=2"), "all" is every one'


def methods_option(default: str) -> Any:
    """Declare `--methods` with its default in the help."""
    read = o.several(split=o.split_methods)
    text = f"{METHODS} (default: {default})"
    return o.option(text, "METHOD...", o.PRUNING, read=read, complete=o.complete_methods)


Budget = Annotated[float, o.option("a count (16) or a fraction (0.25)", "K", o.PRUNING, read=o.read_keep)]


def budgets_option(default: str) -> Any:
    """Declare `--keep` for several budgets, with its default in the help."""
    text = f"budgets: counts (16) or fractions (0.25) (default: {default})"
    return o.option(text, "K...", o.PRUNING, read=o.several(o.read_keep))


Budgets = Annotated[Sequence[float] | None, budgets_option("16 50 144")]

# Corruptions.
CORRUPTION = "a corruption, see clustrs corruptions"
Corruption = Annotated[str, o.option(CORRUPTION, "NAME", o.IMAGES, "--corrupt", complete=o.complete_corruptions)]
Levels = Annotated[
    Sequence[float] | None,
    o.option("levels of the corruption (default: the paper's)", "LEVEL...", o.IMAGES, read=o.several(number)),
]
Seed = Annotated[int, o.option("seed of the corruption", "SEED", o.IMAGES, read=o.integer(0, o.LARGEST_SEED))]
Seeds = Annotated[
    Sequence[int] | None,
    o.option(
        "seeds of the corruptions (default: 0)", "SEED...", o.IMAGES, read=o.several(o.integer(0, o.LARGEST_SEED))
    ),
]
CONDITIONS = "corruptions as NAME:LEVEL, clean, or a NAME for all its levels"


def conditions_option(default: str) -> Any:
    """Declare `--corrupt` for several conditions, with its default in the help."""
    text = f"{CONDITIONS} (default: {default})"
    return o.option(text, "C...", o.IMAGES, "--corrupt", read=o.several(), complete=o.complete_corruptions)


def losses_option(unless: str) -> Any:
    """Declare `--losses`; `unless` says when there is no default."""
    text = "also the levels at which the unpruned model loses these shares of its clean score"
    return o.option(f"{text} (default: 0.1 0.35, unless {unless})", "SHARE...", o.IMAGES, read=o.several(number))


CURVE = "questions of the task that are asked at each level to find those"
CurveQuestions = Annotated[int, o.option(CURVE, "N", o.IMAGES, read=o.integer())]

group = typer.Typer(cls=Group, rich_help_panel="Measure")


@group.callback()
def describe() -> None:
    """Run one of the paper's studies.

    Each study draws a figure (PNG, SVG), writes its numbers (CSV), and says what they show.
    """


def study(*notes: str) -> Callable[[Function], Function]:
    """Register a function as the command of the study of its name; `notes` end the help."""

    def register(function: Function) -> Function:
        epilog = "".join(f"{note}\n" for note in notes)
        group.command(function.__name__, cls=Command, epilog=epilog)(o.takes(o.prompting, o.loading)(function))
        return function

    return register


def rows_option(each: str) -> Any:
    """Declare `--levels` for studies that draw something for each level."""
    return o.option(
        f"levels of the corruption, {each} (default: its last one)", "LEVEL...", o.IMAGES, read=o.several(number)
    )


LADDER = "the ladder, from mild to severe, when there is one corruption (default: built in)"
LONGEST = 100_000
"""Longest answer that is timed, in tokens."""


@study(IMAGES, f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def stability(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 40,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    methods: Annotated[
        Sequence[str] | None, methods_option("clustrs fastervlm divprune visionzip vispruner random grid")
    ] = None,
    keep: Budget = 16,
    top: Annotated[int, o.option("tokens of the ranking that count", "N", o.PRUNING, read=o.integer())] = 15,
    corruption: Corruption = "gaussian",
    levels: Levels = None,
    losses: Annotated[Sequence[float] | None, losses_option("--levels or images are given")] = None,
    curve_questions: CurveQuestions = 200,
    seed: Seed = 0,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/stability"),
    **shared: Any,
) -> None:
    """Show how the ranking by attention, and what each method keeps, change under noise."""
    run_study(ctx)


@study(IMAGES, f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def manifold(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 1,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    methods: Annotated[Sequence[str] | None, methods_option("clustrs fastervlm divprune")] = None,
    keep: Budget = 16,
    corruption: Corruption = "gaussian",
    levels: Annotated[Sequence[float] | None, rows_option("one row of panels each")] = None,
    no_umap: Annotated[bool, o.flag("draw PCA alone; UMAP needs umap-learn", "--no-umap")] = False,
    seed: Annotated[
        int, o.option("seed of the corruption and of UMAP", "SEED", o.IMAGES, read=o.integer(0, 2**32 - 1))
    ] = 0,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/manifold"),
    **shared: Any,
) -> None:
    """Draw the tokens of an image in two dimensions, clean and noisy, and which of them each method keeps."""
    run_study(ctx)


@study(IMAGES, f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def movement(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 1,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    keep: Budget = 16,
    corruption: Annotated[
        str | None, o.option(f"{CORRUPTION} (default: clean images)", "NAME", o.IMAGES, "--corrupt")
    ] = None,
    levels: Annotated[Sequence[float] | None, rows_option("one figure each")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/movement"),
    **shared: Any,
) -> None:
    """Show where the shrinkage moves the kept tokens."""
    run_study(ctx)


@study(IMAGES, f"{LISTS}: --keep 16 50 is --keep 16,50")
def overhead(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 1,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    methods: Annotated[Sequence[str] | None, methods_option("none fastervlm divprune visionzip clustrs")] = None,
    keep: Annotated[Sequence[float] | None, budgets_option("16 144")] = None,
    new_tokens: Annotated[
        Sequence[int] | None,
        o.option(
            "lengths of an answer in tokens (default: 14 64)", "N...", o.MODEL, read=o.several(o.integer(1, LONGEST))
        ),
    ] = None,
    repeats: Annotated[int, o.option("runs that count, after a warm-up", "N", read=o.integer())] = 10,
    crops: o.CropsOption = "all",
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/overhead"),
    **shared: Any,
) -> None:
    """Time the vision tower, scoring and selection, for each method and budget."""
    run_study(ctx)


@study(f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def ablation(
    ctx: typer.Context,
    task: Task = None,
    data: Data = None,
    task_options: TaskOptions = None,
    limit: Limit = None,
    batch_size: BatchSize = 24,
    seeds: Seeds = None,
    judge_model: JudgeModel = None,
    model: Model = None,
    keep: Budgets = None,
    corruption: Corruption = "gaussian",
    levels: Levels = None,
    losses: Annotated[Sequence[float] | None, losses_option("--levels is given")] = None,
    curve_questions: CurveQuestions = 200,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/ablation"),
    **shared: Any,
) -> None:
    """Compare Clustering, C+H and ClustRS, over noise and budgets."""
    run_study(ctx)


@study(f"{LISTS}: --keep 16 50 is --keep 16,50")
def sensitivity(
    ctx: typer.Context,
    task: Task = None,
    data: Data = None,
    task_options: TaskOptions = None,
    limit: Limit = None,
    batch_size: BatchSize = 24,
    seeds: Seeds = None,
    judge_model: JudgeModel = None,
    model: Model = None,
    keep: Budgets = None,
    corruptions: Annotated[Sequence[str] | None, conditions_option("the paper's")] = None,
    losses: Annotated[Sequence[float] | None, losses_option("--corrupt is given")] = None,
    curve_questions: CurveQuestions = 200,
    parameters: Annotated[
        Sequence[str] | None,
        o.option("parameters to vary (default: all)", "PARAMETER...", o.PRUNING, read=o.several(o.one_of(Parameter))),
    ] = None,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/sensitivity"),
    **shared: Any,
) -> None:
    """Vary tau, the clip interval, and the centroid."""
    run_study(ctx)


@study(f"{LISTS}: --keep 16 50 is --keep 16,50")
def variants(
    ctx: typer.Context,
    task: Task = None,
    data: Data = None,
    task_options: TaskOptions = None,
    limit: Limit = None,
    batch_size: BatchSize = 24,
    seeds: Seeds = None,
    judge_model: JudgeModel = None,
    model: Model = None,
    keep: Annotated[Sequence[float] | None, budgets_option("8 16 50")] = None,
    corruptions: Annotated[
        Sequence[str] | None, conditions_option("clean gaussian:0.11 gaussian:0.24 salt_pepper:0.07")
    ] = None,
    split_seed: Annotated[
        int, o.option("seed of the split into two halves", "SEED", o.QUESTIONS, read=o.integer(0, o.LARGEST_SEED))
    ] = 0,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/variants"),
    **shared: Any,
) -> None:
    """Compare switches of ClustRS beyond the paper, picked on one half of the images, on the other half."""
    run_study(ctx)


@study(IMAGES, f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def denoising(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 24,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    keep: Annotated[Sequence[float] | None, budgets_option("16")] = None,
    corruption: Corruption = "gaussian",
    levels: Levels = None,
    losses: Annotated[Sequence[float] | None, losses_option("--levels or images are given")] = None,
    curve_questions: CurveQuestions = 200,
    seed: Seed = 0,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/denoising"),
    **shared: Any,
) -> None:
    """Measure how far noisy kept tokens are from the clean ones, before and after shrinkage."""
    run_study(ctx)


@study(f"{LISTS}: --levels 0.1 1 is --levels 0.1,1")
def levels(
    ctx: typer.Context,
    task: Task = None,
    data: Data = None,
    task_options: TaskOptions = None,
    limit: Annotated[int, o.option("number of questions, from the first on", "N", o.QUESTIONS, read=o.integer())] = 200,
    batch_size: BatchSize = 24,
    model: Model = None,
    corruptions: Annotated[
        Sequence[str] | None,
        o.option("corruptions (default: gaussian salt_pepper)", "NAME...", o.IMAGES, "--corrupt", read=o.several()),
    ] = None,
    levels: Annotated[Sequence[float] | None, o.option(LADDER, "LEVEL...", o.IMAGES, read=o.several(number))] = None,
    losses: Annotated[
        Sequence[float] | None,
        o.option("shares of the clean score (default: 0.1 0.35)", "SHARE...", o.IMAGES, read=o.several(number)),
    ] = None,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/levels"),
    **shared: Any,
) -> None:
    """Measure what each level of a corruption costs the unpruned model, and which level costs a given share."""
    run_study(ctx)


@study(IMAGES)
def geometry(
    ctx: typer.Context,
    images: Images = None,
    count: Count = 40,
    task: Task = None,
    data: Data = None,
    model: Model = None,
    keep: Annotated[int, o.option("number of clusters", "K", o.PRUNING, read=o.integer())] = 16,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/geometry"),
    **shared: Any,
) -> None:
    """Measure how the tokens of a model lie: norms, distances, main direction, contrast of the attention."""
    run_study(ctx)


@study(f"{LISTS}: --keep 64 16 is --keep 64,16")
def tuning(
    ctx: typer.Context,
    task: Task = None,
    data: Data = None,
    limit: Annotated[int, o.option("number of questions", "N", o.QUESTIONS, read=o.integer())] = 200,
    model: Model = None,
    methods: Annotated[
        Sequence[str] | None,
        methods_option(
            "clustermeans clustrs divprune downsample fastervlm hiprune holov mmr prumerge-plus tome visionzip vscan"
        ),
    ] = None,
    keep: Annotated[Sequence[float] | None, budgets_option("64 16 4")] = None,
    quiet: Quiet = False,
    output: o.OutputFolder = Path("out/tuning"),
    **shared: Any,
) -> None:
    """Compare the label-free measures of clustrs tune with true accuracy, over many candidates."""
    run_study(ctx)


STUDIES = tuple(str(command.name) for command in typer.main.get_group(group).commands.values())


def config_class(name: str) -> Any:
    """Return the config of a study."""
    return getattr(importlib.import_module(f"clustrs_paper.studies.{name}"), f"{name.capitalize()}Config")


def make_config(name: str, given: Mapping[str, Any]) -> Any:
    """Return the config that the options of a study stand for."""
    config = config_class(name)
    known = {one.name for one in fields(config)}
    chosen = {key: value for key, value in given.items() if key in known}
    if given.get("quiet"):
        chosen["progress"] = False
    if given.get("no_umap"):
        chosen["umap"] = False
    if "folder" in known:
        chosen["folder"] = given.get("output", Path("out") / name) / "run"
    return config(**chosen)


def run_study(ctx: typer.Context) -> None:
    """Run a study, print what it shows, and save its files."""
    from clustrs.models.load import quiet_transformers

    name, given = str(ctx.command.name), given_options(ctx)
    config = make_config(name, given)
    output = given.get("output", Path("out") / name)
    base.check_folder("--output", output)
    quiet_transformers()
    if config.progress and base.is_rich(sys.stderr):
        base.say(f"loading {config.model} ...")
    result = importlib.import_module(f"clustrs_paper.studies.{name}").run(config)
    for part in result.parts:
        print(part.findings)
        for path in part.save(output):
            print(path)


def parse(words: Sequence[str]) -> Any:
    """Return the options that `clustrs study WORDS` sets."""
    return parse_command(["study", *words])
