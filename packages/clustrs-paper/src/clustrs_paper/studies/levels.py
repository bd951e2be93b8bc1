"""Levels: what a corruption costs the unpruned model, level by level, and which level costs a given share."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from clustrs import palette
from clustrs_paper.studies.curves import LOSSES, curve_text, evaluation_config, requested_losses
from clustrs_paper.studies.result import StudyResult, pyplot, single
from clustrs_paper.studies.settings import TaskStudyConfig

if TYPE_CHECKING:
    from clustrs.evaluation.levels import Curve

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LevelsConfig(TaskStudyConfig):
    """Settings of the study: corruptions, ladders of levels, and losses in shares of the clean score."""

    limit: int | None = 200
    corruptions: tuple[str, ...] = ("gaussian", "salt_pepper")
    levels: tuple[float, ...] | None = None
    losses: tuple[float, ...] = LOSSES


def run(config: LevelsConfig) -> StudyResult:
    """Ask the unpruned model at every level of the ladders, and read off the levels of the losses."""
    from clustrs.evaluation.levels import QUESTIONS, ladder, measure_curves

    losses = requested_losses(config.losses, other_levels=False)
    if config.levels is not None and len(config.corruptions) > 1:
        raise ValueError(f"levels must be given for one corruption only, got {len(config.corruptions)} corruptions")
    ladders = {name: config.levels or ladder(name) for name in config.corruptions}
    questions = config.limit or QUESTIONS
    curves = measure_curves(evaluation_config(config), ladders, config.folder, questions, config.progress)
    rows = [row for curve in curves.values() for row in table(curve, losses)]
    text = "\n".join(curve_text(curve, losses, config.model) for curve in curves.values())
    return single("levels", draw(curves, losses, f"{config.task}, {config.model}, all tokens"), rows, text)


def table(curve: "Curve", losses: Sequence[float]) -> list[Row]:
    """The measured levels, and those that were chosen: of these the loss is the one asked for, and there is no level
    where it is never reached."""
    measured: list[Row] = [
        {"corruption": curve.corruption, "chosen": False, "clean": curve.clean, **asdict(rung)} for rung in curve.rungs
    ]
    same: Row = {**dict.fromkeys(measured[0]), "corruption": curve.corruption, "chosen": True, "clean": curve.clean}
    return [*measured, *({**same, "level": curve.level_at(loss), "loss": loss} for loss in losses)]


def draw(curves: "Mapping[str, Curve]", losses: Sequence[float], about: str) -> Any:
    """One panel per corruption: the loss at every level, with lines at what was chosen."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.8), layout="constrained", squeeze=False)
    plt.close(figure)  # pyplot would hold on to it; it can be saved all the same
    for axis, curve in zip(axes[0], curves.values(), strict=True):
        x = range(len(curve.rungs))
        axis.plot(x, [100 * rung.loss for rung in curve.rungs], color=palette.color("none"), marker="o")
        bounds = [[100 * getattr(rung, name) for rung in curve.rungs] for name in ("loss_low", "loss_high")]
        axis.fill_between(x, *bounds, color=palette.color("none"), alpha=0.15, linewidth=0)
        for loss in losses:
            level = curve.level_at(loss)
            axis.axhline(100 * loss, color="#777777", linestyle=":")
            text = "never" if level is None else f"{level:g}"
            axis.annotate(f"{loss:.0%}: {text}", (0, 100 * loss), textcoords="offset points", xytext=(0, 3), fontsize=9)
        axis.set_xticks(x, [f"{rung.level:g}" for rung in curve.rungs])
        axis.set(xlabel=f"{curve.corruption} level", title=curve.corruption)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("loss, % of the clean score")
    figure.suptitle(f"{about}; band: 95 % interval over questions", fontsize=10, parse_math=False)
    return figure
