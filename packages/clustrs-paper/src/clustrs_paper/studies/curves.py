"""Levels from the unpruned model's curve, beside the paper's: where the model at hand still answers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from clustrs_paper.studies.result import StudyPart, StudyResult
from clustrs_paper.studies.settings import ImageStudyConfig, TaskStudyConfig, resolve_corruptions

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.evaluation.config import Config
    from clustrs.evaluation.levels import Curve
    from clustrs_paper.studies.ablation import AblationConfig
    from clustrs_paper.studies.denoising import DenoisingConfig
    from clustrs_paper.studies.sensitivity import SensitivityConfig
    from clustrs_paper.studies.stability import StabilityConfig

LOSSES = (0.1, 0.35)
"""Of the clean score: the model is disturbed, and it still answers more than it guesses."""


@dataclass(frozen=True)
class ChosenLevels:
    """Levels by corruption, in the order of the losses that were asked for, and how they came about in words."""

    levels: Mapping[str, tuple[float, ...]]
    text: str


def requested_losses(given: Sequence[float] | None, other_levels: bool) -> tuple[float, ...]:
    """The losses to look for: those that were given; the default ones, unless other levels were given instead."""
    if given is None:
        return () if other_levels else LOSSES
    for loss in given:
        if not 0 < loss < 1:
            raise ValueError(f"losses must be shares of the clean score between 0 and 1, got {loss!r} (write 0.1)")
    return tuple(given)


def evaluation_config(config: ImageStudyConfig | TaskStudyConfig) -> "Config":
    """The unpruned model of a study on its task."""
    from clustrs.evaluation.config import Config, expand_methods

    plain = Config(
        task=config.task,
        model=config.model,
        methods=expand_methods(["none"], ()),
        data=config.data,
        positions="compact",
        attention="plain",
        prompt_template=config.prompt_template,
        image_padding=config.image_padding,
        **config.given(),
    )
    if not isinstance(config, TaskStudyConfig):
        return plain
    return replace(plain, task_options=dict(config.task_options), limit=config.limit, batch_size=config.batch_size)


def choose_levels(
    config: ImageStudyConfig | TaskStudyConfig,
    corruptions: Sequence[str],
    losses: Sequence[float],
    questions: int,
    folder: Path | None,
) -> ChosenLevels:
    """Measure the curve of each corruption in `folder` (None: a temporary one), and read the levels off it."""
    from clustrs.evaluation.levels import ladder, measure_curves
    from clustrs.evaluation.runner import open_task

    nothing: dict[str, tuple[float, ...]] = dict.fromkeys(corruptions, ())
    if not losses:
        return ChosenLevels(nothing, "")
    evaluation = evaluation_config(config)
    if open_task(evaluation).judged:
        return ChosenLevels(nothing, f"No levels from the model's own curve: a judge has to score {config.task}.")
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory())) if folder is None else folder
        ladders = {name: ladder(name) for name in corruptions}
        curves = measure_curves(evaluation, ladders, place, questions, config.progress)
    levels = {name: levels_of(curve, losses) for name, curve in curves.items()}
    return ChosenLevels(levels, " ".join(curve_text(curve, losses, config.model) for curve in curves.values()))


def levels_of(curve: "Curve", losses: Sequence[float]) -> tuple[float, ...]:
    """The levels of those losses that are reached, each once."""
    found = (curve.level_at(loss) for loss in losses)
    return tuple(dict.fromkeys(level for level in found if level is not None))


def curve_text(curve: "Curve", losses: Sequence[float], model: str) -> str:
    """Report the level of each loss, and the losses that are never reached."""
    levels = {loss: curve.level_at(loss) for loss in losses}
    parts = [f"{loss:.0%} at {level:g}" for loss, level in levels.items() if level is not None]
    never = [f"{loss:.0%}" for loss, level in levels.items() if level is None]
    if never:
        last = curve.rungs[-1].level
        parts.append(f"never {' and '.join(never)} (at most {curve.largest_loss:.0%}, up to level {last:g})")
    n = curve.rungs[0].n
    return (
        f"Under {curve.corruption} the unpruned {model} loses of its clean score ({curve.clean:.3f}, {n} questions) "
        f"{', '.join(parts)}."
    )


def study_corruptions(
    config: "StabilityConfig | DenoisingConfig", default: Sequence[float] | None = None
) -> "tuple[list[Corruption], str]":
    """The corruption of a study of images at its levels and at those of its losses, from mild to severe, and how the
    latter came about in words."""
    given = resolve_corruptions(config.corruption, config.levels, default)
    losses = requested_losses(config.losses, config.levels is not None or bool(config.images))
    folder = None if config.folder is None else Path(config.folder) / "curve"
    chosen = choose_levels(config, [config.corruption], losses, config.curve_questions, folder)
    extra = resolve_corruptions(config.corruption, chosen.levels[config.corruption])
    levels = {corruption.level: corruption for corruption in (*given, *extra)}
    if not extra:
        return given, chosen.text
    descending = given[0].level > given[-1].level
    return [levels[level] for level in sorted(levels, reverse=descending)], chosen.text


def run_with_chosen_levels(
    name: str,
    part: "Callable[[str, Any, Sequence[str]], StudyPart]",
    config: "AblationConfig | SensitivityConfig",
    corruptions: Sequence[str],
    chosen_of: Sequence[str],
    levels_given: bool,
    before: Sequence[str] = (),
) -> StudyResult:
    """Run a study under its corruptions, and again at the levels of `chosen_of` that cost the model its losses.

    The second has a run of its own in the folder `chosen`; the conditions `before` come first there.
    """
    from clustrs.corruptions import Corruption

    folder = Path(config.folder)
    losses = requested_losses(config.losses, levels_given)
    chosen = choose_levels(config, chosen_of, losses, config.curve_questions, folder / "curve")
    parts = [part(name, config, corruptions)]
    levels = [str(Corruption(one, level)) for one in chosen_of for level in chosen.levels[one]]
    if levels:
        parts.append(part(f"{name}-chosen", replace(config, folder=folder / "chosen"), [*before, *levels]))
    return StudyResult((*parts[:-1], replace(parts[-1], findings=f"{parts[-1].findings}\n{chosen.text}".rstrip())))
