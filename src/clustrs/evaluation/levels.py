"""Levels of a corruption, chosen by the score that the unpruned model loses.

Sensitivity to corruption differs between models, and where a model fails on everything all methods look alike. So the
unpruned model is measured at a ladder of levels, from mild to severe, and a level is read off its curve: the one at
which it loses 10 %, say, of its score on clean images.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clustrs.corruptions import Corruption, corruption_rule
from clustrs.evaluation import metrics
from clustrs.evaluation.config import CLEAN, Config, expand_methods
from clustrs.evaluation.results import load_run
from clustrs.evaluation.runner import open_task
from clustrs.evaluation.runner import run as run_evaluation

QUESTIONS = 200  # questions at each level: the interval of a score is about 7 points to either side
LADDERS: dict[str, tuple[float, ...]] = {
    "gaussian": (0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0),
    "salt_pepper": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    "brightness": (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05),
    "contrast": (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05),
    "cutout": (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7),
    "motion_blur": (3, 5, 9, 15, 21, 31, 45),
    "jpeg": (60, 40, 30, 20, 10, 5, 2),
}
"""Levels from mild to severe; other corruptions have the levels that they are registered with. Brightness and contrast
decrease, since increasing them ends where everything is white."""
HARMLESS = {"brightness": 1.0, "contrast": 1.0, "motion_blur": 1.0, "jpeg": 100.0}  # the level without effect, if not 0
LOSS = re.compile(r"(?P<name>[^@:]+)@(?P<percent>[0-9]+(\.[0-9]+)?)%")  # gaussian@10%


@dataclass(frozen=True)
class Rung:
    """Score of the unpruned model at one level; `loss` is a fraction of its clean score, bounds are 95 % intervals."""

    level: float
    n: int
    score: float
    low: float
    high: float
    loss: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True)
class Curve:
    """Scores (0 to 1) of the unpruned model under one corruption, from mild to severe."""

    corruption: str
    clean: float
    rungs: tuple[Rung, ...]

    def level_at(self, loss: float) -> float | None:
        """Return the level at which a fraction of the clean score is lost, interpolated; a gain counts as no loss."""
        level, reached = HARMLESS.get(self.corruption, 0.0), 0.0
        for rung in self.rungs:
            worst = max(reached, rung.loss)
            if worst >= loss:
                share = (loss - reached) / (worst - reached) if worst > reached else 1.0
                return round_level(self.corruption, level + share * (rung.level - level))
            level, reached = rung.level, worst
        return None

    @property
    def largest_loss(self) -> float:
        return max(rung.loss for rung in self.rungs)


def round_level(name: str, level: float) -> float:
    """Round to a level that the corruption accepts: an integer, an odd one, or about two significant digits."""
    rule = corruption_rule(name)
    if rule.kind == "any":
        rounded = round(level, 2) if 0.05 <= level < 1 else float(f"{level:.2g}")
    else:
        rounded = 2.0 * round((level - 1) / 2) + 1 if rule.kind == "odd" else float(round(level))
    return min(max(rounded, rule.low), rule.high)


def ladder(name: str) -> tuple[float, ...]:
    return LADDERS.get(name) or corruption_rule(name).levels


def curve_config(config: Config, ladders: Mapping[str, Sequence[float]], questions: int = QUESTIONS) -> Config:
    rungs = [str(Corruption(name, level)) for name, levels in ladders.items() for level in levels]
    return replace(
        config,
        methods=expand_methods(["none"], ()),
        corruptions=(CLEAN, *rungs),
        seeds=config.seeds[:1],
        limit=questions if config.limit is None else min(questions, config.limit),
        reproduces=None,
    )


def measure_curves(
    config: Config,
    ladders: Mapping[str, Sequence[float]],
    folder: Path,
    questions: int = QUESTIONS,
    progress: bool = True,
) -> dict[str, Curve]:
    """Measure the curve of each corruption; a stopped measurement resumes from the run in `folder`."""
    if open_task(config).judged:
        raise ValueError(f"task {config.task!r} needs a judge to score its answers (write levels instead of losses)")
    run_evaluation(curve_config(config, ladders, questions), folder, progress=progress)
    run = load_run(folder)
    by_condition = {(c.name, c.level): run.scores[0, i] for i, c in enumerate(run.conditions)}
    clean = by_condition[CLEAN, None]
    (unharmed,) = metrics.estimates(metrics.question_means(clean[None]))
    if not unharmed.mean or unharmed.n < 2:
        raise ValueError(
            f"model {config.model!r} has none of {run.config['items']} questions of the task {config.task!r} right on "
            "clean images, so nothing can be lost (write levels instead of losses)"
        )
    curves = {}
    for name, levels in ladders.items():
        noisy = np.stack([by_condition[name, level] for level in levels])
        scores = metrics.estimates(metrics.question_means(noisy))
        losses = metrics.differences(np.broadcast_to(clean, noisy.shape), noisy)
        rungs = []
        for level, score, loss in zip(levels, scores, losses, strict=True):
            numbers = [score.mean, score.low, score.high, loss.mean, loss.low, loss.high]
            known = [float("nan") if value is None else value for value in numbers]
            rungs.append(Rung(level, score.n, *known[:3], *(value / unharmed.mean for value in known[3:])))
        curves[name] = Curve(name, unharmed.mean, tuple(rungs))
    return curves


def parse_loss(text: str) -> tuple[str, float]:
    match = LOSS.fullmatch(text)
    percent = float(match["percent"]) if match else 0.0
    if match is None or not 0 < percent < 100:
        raise ValueError(f"corruption must be NAME@LOSS% with 0 < loss < 100, got {text!r} (write gaussian@10%)")
    corruption_rule(match["name"])
    return match["name"], percent / 100


def resolve_losses(asked: Sequence[str], config: Config, folder: Path, progress: bool = True) -> dict[str, str]:
    """Turn corruptions given by a loss (gaussian@10%) into ones with a level (gaussian:0.21), see `measure_curves`."""
    losses = {text: parse_loss(text) for text in asked}
    curves = measure_curves(config, {name: ladder(name) for name, _ in losses.values()}, folder, progress=progress)
    resolved = {}
    for text, (name, loss) in losses.items():
        level = curves[name].level_at(loss)
        if level is None:
            raise ValueError(
                f"{name}@{100 * loss:g}%: {config.model} loses at most {curves[name].largest_loss:.1%} of its clean "
                f"score, up to level {curves[name].rungs[-1].level:g} (write a smaller loss, or a level)"
            )
        resolved[text] = str(Corruption(name, level))
    return resolved
