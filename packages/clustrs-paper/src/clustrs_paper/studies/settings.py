"""Configs that the studies share: declaration and checks of settings, and the methods and corruptions they name.

The type of a field, and the bounds of its `setting`, are all that is needed to check a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from clustrs import validation
from clustrs.embedded import model_and_task
from clustrs.validation import ImagePadding, LoadOptions, PromptTemplate, plain_hint

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.pruners import Pruner


Keep = int | float
"""A count (int) or a fraction (float) of the visual tokens."""
LARGEST = 2**31 - 1
"""The largest integer that a setting may have unless it says otherwise: no count of anything here comes near."""
LARGEST_SEED = 2**63 - 1


def setting(default: Any, *, low: int = 1, high: int = LARGEST, repeats: bool = False) -> Any:
    """Declare a field with bounds for integers; with `repeats`, a value may come twice in a tuple."""
    return field(default=default, metadata={"low": low, "high": high, "repeats": repeats})


@dataclass(frozen=True, kw_only=True)
class StudyConfig(LoadOptions):
    """Settings of every study. Lists become tuples, and a single value a tuple of one where there may be several.

    Without `model`, the embedded model that knows the task is taken; without `task`, the one that measures the model.
    """

    model: str = None  # type: ignore[assignment]
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    progress: bool = True

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
    """Settings of studies of images: the user's own (files, folders, sample:NAME), or `count` images of a task."""

    images: tuple[str, ...] = setting((), repeats=True)
    count: int = 1
    task: str = None  # type: ignore[assignment]
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Levels by what they cost the unpruned model, for studies that look beside the paper's levels.

    `losses` are shares of its clean score, None for 0.1 and 0.35 unless levels are given; `curve_questions` are asked
    at each level to find those levels.
    """

    losses: tuple[float, ...] | None = None
    curve_questions: int = 200


@dataclass(frozen=True, kw_only=True)
class LossImageStudyConfig(LossSettings, ImageStudyConfig):
    """Settings of studies of images that also look at such levels. The answers from which the levels are read are kept
    in `folder`, where a stopped study resumes; None: nowhere."""

    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class TaskStudyConfig(StudyConfig):
    """Settings of studies that ask the questions of a task. A study that was stopped resumes from its `folder`."""

    folder: Path
    task: str = None  # type: ignore[assignment]
    data: str | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int = 24


@dataclass(frozen=True, kw_only=True)
class GridStudyConfig(TaskStudyConfig):
    """Settings of studies that run a grid of the evaluation."""

    keep: tuple[Keep, ...] = (16, 50, 144)
    seeds: tuple[int, ...] = setting((0,), low=0, high=LARGEST_SEED)
    judge_model: str | None = None


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
        validation.integer(name, value, about.get("low", 1))
        high = about.get("high", LARGEST)
        if value > high:
            raise ValueError(f"{name} must be an integer of at most {high}, got {value!r}")
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
