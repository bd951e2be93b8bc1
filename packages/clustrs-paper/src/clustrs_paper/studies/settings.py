"""Configs that the studies share: declaration and checks of settings, and the methods and corruptions they name.

The type of a field and its `setting` are all that is needed to check a value and to make an option of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from clustrs import validation
from clustrs.embedded import DEFAULT, model_and_task
from clustrs.validation import ImagePadding, LoadOptions, PromptTemplate, plain_hint

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.pruners import Pruner


Keep = int | float
"""A count (int) or a fraction (float) of the visual tokens."""
LARGEST = 2**31 - 1
"""The largest integer that a setting may have unless it says otherwise: no count of anything here comes near."""
LARGEST_SEED = 2**63 - 1


def setting(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    low: int = 1,
    high: int = LARGEST,
    repeats: bool = False,
    positional: bool = False,
) -> Any:
    """A field of a config. `help` and `metavar` are for the command line, where its name is the option's unless there
    is a `flag`, or it is given by its position there; `low` and `high` bound integers; only with `repeats` a value may
    come twice in a tuple."""
    about = {"help": help, "flag": flag, "metavar": metavar, "low": low, "high": high, "repeats": repeats}
    return field(default=default, metadata={**about, "positional": positional})


def seed_setting(help: str = "seed of the corruption", high: int = LARGEST_SEED) -> Any:
    """The field of a seed."""
    return setting(0, help, low=0, high=high)


def losses_setting(unless: str) -> Any:
    """Declare `losses`; `unless` says when there is no default, in options of the study."""
    text = "also the levels at which the unpruned model loses these shares of its clean score"
    return setting(None, f"{text} (default: 0.1 0.35, unless {unless})", metavar="SHARE")


@dataclass(frozen=True, kw_only=True)
class StudyConfig(LoadOptions):
    """Settings of every study. Lists become tuples, and a single value a tuple of one where there may be several."""

    model: str = setting(
        None,
        f"an embedded model, a folder, or a Hugging Face id (default: {DEFAULT}, or the one that knows the task)",
        metavar="ID_OR_FOLDER",
    )
    prompt_template: PromptTemplate = setting(
        "checkpoint", "the model's own chat template, or LLaVA-1.5's with its system line"
    )
    image_padding: ImagePadding = setting(
        "checkpoint",
        "as the model's processor has it, or padded to a square with the mean color instead of cropped, as "
        "LLaVA-1.5 is evaluated",
    )
    progress: bool = setting(True, "show no progress bar", flag="--quiet")

    def __post_init__(self) -> None:
        meant = model_and_task(self.model, getattr(self, "task", None))
        for name, chosen in zip(("model", "task"), meant, strict=True):
            if getattr(self, name, "") is None:
                object.__setattr__(self, name, chosen)
        hints = get_type_hints(type(self))
        for one in fields(self):
            value, hint = getattr(self, one.name), plain_hint(hints[one.name])
            if value is None and one.default is None:
                continue
            if get_origin(hint) is tuple:
                value = tuple(value) if isinstance(value, list | tuple) else (value,)
                object.__setattr__(self, one.name, value)
                check_several(one.name, value, get_args(hint)[0], one.metadata)
            else:
                check(one.name, value, hint, one.metadata)


@dataclass(frozen=True, kw_only=True)
class ImageStudyConfig(StudyConfig):
    """Settings of studies of images."""

    images: tuple[str, ...] = setting(
        (),
        "image files, folders of them, or sample:NAME (default: images of the task)",
        metavar="IMAGE",
        repeats=True,
        positional=True,
    )
    count: int = setting(1, "number of images of the task, when no image is given")
    task: str = setting(None, "the task whose images are taken, see clustrs tasks (default: the model's own)")
    data: str | None = setting(None, "the folder (or file) of the task", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Levels by what they cost the unpruned model, for studies that look beside the paper's levels."""

    losses: tuple[float, ...] | None = losses_setting("--levels is given")
    curve_questions: int = setting(200, "questions of the task that are asked at each level to find those")


@dataclass(frozen=True, kw_only=True)
class LossImageStudyConfig(LossSettings, ImageStudyConfig):
    """Settings of studies of images that also look at such levels. The answers from which the levels are read are kept
    in `folder`, where a stopped study resumes; None: nowhere."""

    folder: Path | None = None
    losses: tuple[float, ...] | None = losses_setting("--levels or images are given")


@dataclass(frozen=True, kw_only=True)
class TaskStudyConfig(StudyConfig):
    """Settings of studies that ask the questions of a task. A study that was stopped resumes from its `folder`."""

    folder: Path
    task: str = setting(None, "the task, see clustrs tasks (default: the model's own)")
    data: str | None = setting(None, "the folder (or file) of the task", metavar="PATH")
    task_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "options of the task", "flag": "--set-task", "metavar": "KEY=VALUE"}
    )
    limit: int | None = setting(
        None, "number of questions, from the first on (default: some of scenes and photos, all of other tasks)"
    )
    batch_size: int = setting(24, "questions answered together")


@dataclass(frozen=True, kw_only=True)
class GridStudyConfig(TaskStudyConfig):
    """Settings of studies that run a grid of the evaluation."""

    keep: tuple[Keep, ...] = setting((16, 50, 144), "budgets: counts (16) or fractions (0.25)", metavar="K")
    seeds: tuple[int, ...] = setting((0,), "seeds of the corruptions", metavar="SEED", low=0, high=LARGEST_SEED)
    judge_model: str | None = setting(None, "judge whose verdicts count, for tasks that are scored by one")


def check_several(name: str, values: tuple[Any, ...], hint: Any, about: Mapping[str, Any]) -> None:
    """Check the values of a tuple, one by one and as a whole."""
    for value in values:
        check(name, value, hint, about)
    if not about.get("repeats"):
        if not values:
            raise ValueError(f"{name} must have at least one value, got ()")
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"duplicate value in {name}: {value}")


def check(name: str, value: Any, hint: Any, about: Mapping[str, Any]) -> None:
    """Check one value against its type and bounds."""
    if get_origin(hint) is Literal:
        validation.choice(name, value, get_args(hint))
    elif hint is int:
        validation.integer(name, value, about["low"])
        if value > about["high"]:
            raise ValueError(f"{name} must be an integer of at most {about['high']}, got {value!r}")
    elif hint is float:
        if not validation.is_number(value):
            raise ValueError(f"{name} must be a number, got {value!r}")
    elif hint == Keep:
        validation.keep(value)
    elif hint in (str, bool) and not isinstance(value, hint):
        raise ValueError(f"{name} must be {'a string' if hint is str else 'True or False'}, got {value!r}")


def resolve_methods(specs: Sequence[str], keeps: Sequence[Keep]) -> list[tuple[str, "Pruner"]]:
    """Each method at each budget, with the text that names it ("clustrs", "clustrs tau=2"); "all" is every method.

    The method that keeps everything, and one that sets `keep` itself, come once.
    """
    from clustrs.evaluation.config import expand_methods
    from clustrs.pruners import from_dict

    return [
        (stored["name"] if spec == "all" else spec, from_dict(stored))
        for spec in specs
        for stored in expand_methods([spec], keeps)
    ]


def methods_by_label(specs: Sequence[str], keep: Keep) -> dict[str, "Pruner"]:
    """Methods at one budget by the text that names them."""
    methods: dict[str, Pruner] = {}
    for label, method in resolve_methods(specs, [keep]):
        if label in methods:
            raise ValueError(f"duplicate value in methods: {label}")
        methods[label] = method
    return methods


def resolve_corruptions(
    name: str, levels: Sequence[float] | None, default: Sequence[float] | None = None
) -> list["Corruption"]:
    """A corruption at some levels; without any at `default`, or else at those that it is registered with."""
    from clustrs.corruptions import Corruption, corruption_rule

    registered = corruption_rule(name).levels
    if levels is None:
        levels = registered if default is None else default
    return [Corruption(name, level) for level in levels]


def strongest(name: str) -> tuple[float]:
    """The last of the levels that a corruption is registered with."""
    from clustrs.corruptions import corruption_rule

    return (corruption_rule(name).levels[-1],)


def part_names(study: str, images: Sequence[str], corruptions: Sequence[str]) -> list[list[str]]:
    """A file name for each image under each corruption: what there is only one of, and clean, is not mentioned."""
    stems = [name.rpartition(".")[0] or name for name in images]
    marked = [f"{stem}-{stems[:i].count(stem) + 1}" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems)]
    suffixes = ["" if text == "clean" else "-" + text.replace("/", "-").replace(":", "-") for text in corruptions]
    return [
        [
            study + (f"-{stem}" if len(images) > 1 else "") + (suffix if len(corruptions) > 1 else "")
            for suffix in suffixes
        ]
        for stem in marked
    ]
