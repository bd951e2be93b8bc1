"""Clips: methods at three budgets for a whole clip, clean and noisy, as published and with place and weight.

The level of noise and the better of the two settings are picked on every second group of six clips, and every number of
the page is of the others: six clips have all lengths, and questions of all kinds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.cli import main as clustrs
from clustrs.evaluation.metrics import Values
from clustrs.evaluation.results import Condition, load_run
from clustrs_paper.evidence import place_and_weight, results
from clustrs_paper.evidence.place_and_weight import BOTH, CLEAN, PUBLISHED, SETTINGS, reach, run_folder
from clustrs_paper.evidence.results import LABELS, UNPRUNED, Answers, compact_rows, read_answers, read_rows, table

STORED = results.STORED.parent / "clips"
MODEL, TASK, QUESTIONS = "mini-onevision-clips", "clips", 240
ACROSS = "clustermeans across_frames=true"
METHODS = {
    "clustermeans": "**ClusterMeans** (ours)",
    ACROSS: "**ClusterMeans**, clusters across frames (ours)",
    "clustrs": "ClustRS (the paper)",
    "evs": "EVS",
    "vidcom2": "VidCom2",
    **{name: LABELS[name] for name in ("divprune", "visionzip", "fastervlm", "tome", "grid", "random")},
}
BUDGETS = (32, 64, 256)
LEVELS = ("0.1", "0.15", "0.2", "0.3", "0.4", "0.5")
GROUP = 18
"""Questions about six clips."""
LOSS = 0.3
"""Share of its clean score that the unpruned model loses at the level of noise, about."""


def held_out(grid: Answers, method: str, keep: int | None, conditions: Sequence[Condition], half: int = 1) -> Values:
    """Return the scores [items] of a half of the questions, in per cent, averaged over conditions."""
    cells = np.stack([grid.right[method, keep, condition] for condition in conditions])
    own = np.arange(cells.shape[1]) // GROUP % 2 == half
    values: Values = 100 * cells[:, own].astype(np.float64).mean(axis=0)
    return values


def levels() -> Answers | None:
    """Return the answers of the unpruned model by level of noise, as stored."""
    return read_answers(read_rows(STORED / f"{MODEL}-levels.csv"))


def chosen_level(grid: Answers) -> str:
    """Return the level at which the loss on the picking half is nearest to `LOSS`."""
    clean = held_out(grid, UNPRUNED, None, [CLEAN], half=0).mean()
    losses = {
        text: 1 - held_out(grid, UNPRUNED, None, [Condition("gaussian", float(text))], half=0).mean() / clean
        for text in LEVELS
    }
    return min(losses, key=lambda text: abs(losses[text] - LOSS))


def eval_options(setting: str, level: str) -> list[str]:
    """Return the options of `clustrs eval` in a setting."""
    positions, attention = SETTINGS[setting]
    options = ["--model", MODEL, "--task", TASK, "--limit", str(QUESTIONS), "--methods", *METHODS]
    options += ["--keep", *map(str, BUDGETS), "--positions", positions, "--attention", attention]
    return [*options, "--corrupt", "clean", f"gaussian:{level}"]


def run(folder: Path, extra: Sequence[str] = ()) -> int:
    """Measure, and store what is complete; stopped, the same call resumes."""
    curve = ["--model", MODEL, "--task", TASK, "--limit", str(QUESTIONS), "--methods", UNPRUNED]
    noise = [f"gaussian:{level}" for level in LEVELS]
    curve += ["--batch-size", "3"]  # a clip: whole clips of different lengths would be padded
    code = clustrs(["eval", *curve, "--corrupt", "clean", *noise, "--output", str(folder / "levels"), *extra])
    if code:
        return code
    results.write_rows(STORED / f"{MODEL}-levels.csv", compact_rows(load_run(folder / "levels")))
    grid = levels()
    assert grid is not None
    rows: list[dict[str, Any]] = []
    for setting, (positions, attention) in SETTINGS.items():
        if setting in (PUBLISHED, BOTH):
            options = eval_options(setting, chosen_level(grid))
            code = clustrs(["eval", *options, "--output", str(folder / run_folder(setting)), *extra])
            if code:
                return code
            own = compact_rows(load_run(folder / run_folder(setting)))
            rows += [{"positions": positions, "attention": attention, **row} for row in own]
            results.write_rows(STORED / f"{MODEL}.csv", rows)
    return 0


def picked(settings: place_and_weight.Settings) -> str:
    """Return the setting that is best on the picking half: mean over methods, budgets and conditions."""
    return max(
        settings,
        key=lambda s: np.mean(
            [held_out(settings[s], m, k, settings[s].conditions, half=0) for m in METHODS for k in BUDGETS]
        ),
    )


def section(folder: Path = STORED) -> str:
    """Build the section of the evidence page; empty where nothing is stored."""
    settings, curve = place_and_weight.load(MODEL, folder), levels()
    if not settings or curve is None:
        return ""
    grid = settings[PUBLISHED]
    (noise,) = place_and_weight.noise_of(grid)
    columns = [(keep, condition) for keep in BUDGETS for condition in (CLEAN, noise)]
    whole = {c: held_out(curve, UNPRUNED, None, [c]) for c in (CLEAN, noise)}
    rows = [["all tokens", *(f"{whole[condition].mean():.1f}" for _, condition in columns)]]
    halves = [reach(values) for values in whole.values()]
    for method, name in METHODS.items():
        cells = []
        for keep, condition in columns:
            values = [held_out(own, method, keep, [condition]) for own in settings.values()]
            halves += map(reach, values)
            cells.append(" / ".join(f"{value.mean():.1f}" for value in values))
        rows.append([name, *cells])
    best = picked(settings)
    both = "as published / with place and weight" if BOTH in settings else "as published"
    text = f"""\
## Clips

Drawn clips of 8 to 32 frames (392 to 1,568 visual tokens) with one budget for all frames: right answers of {MODEL} in
per cent, {both}, on {len(whole[CLEAN])} questions of the task `clips` on which nothing was picked; 95 % intervals reach
at most {max(halves):.0f} points to either side. Noise is Gaussian and fresh in each frame, at the level where the
unpruned model loses about {LOSS:.0%} of its score on the other questions ({noise.level_text}). Picked there: {best}.

"""
    repeat = "\n    python -m clustrs_paper.evidence clips    # repeats it; stopped, the same command resumes\n"
    return text + table(["", *(f"k = {k}, {c.name}" for k, c in columns)], rows, numbers=len(columns)) + repeat
