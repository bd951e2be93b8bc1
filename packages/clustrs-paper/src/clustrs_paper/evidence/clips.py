"""Clips: methods at three budgets for a whole clip, clean and noisy, as published and with place and weight.

The level of noise is picked on questions that the grid does not ask.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.cli import main as clustrs
from clustrs.evaluation.metrics import estimates
from clustrs.evaluation.results import Condition, load_run
from clustrs.evaluation.tasks import get_task
from clustrs_paper.evidence import results
from clustrs_paper.evidence.place_and_weight import BOTH, CLEAN, PUBLISHED, SETTINGS, reach
from clustrs_paper.evidence.results import LABELS, UNPRUNED, Answers, compact_rows, read_answers, read_rows, table

STORED = results.STORED.parent / "clips"
MODEL, TASK, QUESTIONS, OTHERS = "mini-onevision-clips", "clips", 180, 60
"""Of the task's questions, in order, the grid asks the first ones; the level of noise is picked on those after them."""
ACROSS = "clustermeans across_frames=true"
OURS = ("clustermeans", ACROSS, "clustrs")
METHODS = {
    "clustermeans": "**ClusterMeans** (ours)",
    ACROSS: "**ClusterMeans**, clusters across frames (ours)",
    "clustrs": "ClustRS (the paper)",
    "evs": "EVS",
    "vidcom2": "VidCom2",
    **{name: LABELS[name] for name in ("divprune", "visionzip", "fastervlm", "tome", "grid", "random")},
}
BUDGETS = (32, 64, 256)
LEVELS = ("0.2", "0.3", "0.4")
FILES = {PUBLISHED: f"{MODEL}-grid.csv", BOTH: f"{MODEL}-grid-both.csv"}
LOSS = 0.3
"""Share of its clean score that the unpruned model loses at the level of noise, about."""


def levels() -> Answers | None:
    """Return the answers of the unpruned model by level of noise, as stored."""
    return read_answers(read_rows(STORED / f"{MODEL}-levels.csv"))


def chosen_level(curve: Answers) -> str:
    """Return the level at which the loss on the questions after the grid's is nearest to `LOSS`, the milder of two."""
    clean = curve.right[UNPRUNED, None, CLEAN][QUESTIONS:].mean()
    noisy = {
        text: curve.right[UNPRUNED, None, Condition("gaussian", float(text))][QUESTIONS:].mean() for text in LEVELS
    }
    return min(noisy, key=lambda text: round(abs(1 - noisy[text] / clean - LOSS), 6))


def eval_options(setting: str, corruption: str) -> list[str]:
    """Return the options of `clustrs eval` for a part of the grid."""
    positions, attention = SETTINGS[setting]
    options = ["--model", MODEL, "--task", TASK, "--limit", str(QUESTIONS), "--methods", *METHODS]
    options += ["--keep", *map(str, BUDGETS), "--positions", positions, "--attention", attention]
    return [*options, "--corrupt", corruption]


def run(folder: Path, extra: Sequence[str] = ()) -> int:
    """Measure, and store what is complete; stopped, the same call resumes."""
    shared = ["--model", MODEL, "--task", TASK, "--limit", str(QUESTIONS + OTHERS), "--methods", UNPRUNED]
    shared += ["--batch-size", "3"]  # a clip: whole clips of different lengths would be padded
    noise = [f"gaussian:{level}" for level in LEVELS]
    code = clustrs(["eval", *shared, "--corrupt", "clean", *noise, "--output", str(folder / "levels"), *extra])
    if code:
        return code
    results.write_rows(STORED / f"{MODEL}-levels.csv", compact_rows(load_run(folder / "levels")))
    curve = levels()
    assert curve is not None
    for setting in FILES:
        rows: list[dict[str, Any]] = []
        for corruption in ("clean", f"gaussian:{chosen_level(curve)}"):
            target = folder / f"{'-'.join(SETTINGS[setting])}-{corruption}"
            code = clustrs(["eval", *eval_options(setting, corruption), "--output", str(target), *extra])
            if code:
                return code
            rows += compact_rows(load_run(target))
            results.write_rows(STORED / FILES[setting], rows)
    return 0


def stored_grid(setting: str = PUBLISHED) -> Answers | None:
    return read_answers(read_rows(STORED / FILES[setting]))


def most_frequent(questions: int) -> float:
    """Return the per cent that the most frequent answer of each kind of question has right."""
    answers: dict[str, Counter[str]] = {}
    for item in get_task(TASK, limit=questions).items:
        answers.setdefault(item.question if item.kinds == ("second",) else item.kinds[0], Counter())[item.answer] += 1
    return 100 * sum(max(counts.values()) for counts in answers.values()) / questions


def left_out(grid: Answers) -> str:
    """Say what is missing of the planned grid, or how its level of noise was picked."""
    if set(grid.conditions) == {CLEAN}:
        return "Planned and not run: noise."
    return (
        "Noise is Gaussian and fresh in each frame; its level is the one at which the unpruned model\nloses nearest to "
        f"{LOSS:.0%} of its score on other questions."
    )


def pairs_won(grid: Answers) -> str:
    """Say against how many of the other methods' cells each of ours is better and worse, paired by question."""
    columns = list(dict.fromkeys((keep, condition) for _, keep, condition in grid.right if keep))
    others = [method for method in METHODS if method not in OURS]
    parts = []
    for ours in OURS:
        differences = [
            100.0 * grid.right[ours, *c] - 100.0 * grid.right[other, *c] for c in columns for other in others
        ]
        found = estimates(np.array(differences))
        better = sum(one.low is not None and one.low > 0 for one in found)
        worse = sum(one.high is not None and one.high < 0 for one in found)
        parts.append(
            f"{METHODS[ours].replace('*', '').removesuffix(' (ours)')} is better in {better}, worse in {worse}"
        )
    return (
        f"Of {len(columns) * len(others)} paired differences to the other methods (95 % intervals), {'; '.join(parts)}."
    )


def grid_table(grid: Answers, curve: Answers) -> tuple[str, float]:
    """Return the table of a grid, and half of its widest interval. The unpruned row is the same in each setting."""
    columns = list(dict.fromkeys((keep, condition) for _, keep, condition in grid.right if keep))
    whole = {c: 100 * curve.right[UNPRUNED, None, c][: grid.questions].astype(np.float64) for c in grid.conditions}
    rows = [["all tokens", *(f"{whole[condition].mean():.1f}" for _, condition in columns)]]
    halves = [reach(values) for values in whole.values()]
    for method, name in METHODS.items():
        cells = [100 * grid.right[method, keep, condition].astype(np.float64) for keep, condition in columns]
        halves += map(reach, cells)
        rows.append([name, *(f"{values.mean():.1f}" for values in cells)])
    return table(["", *(f"{c}, k = {k}" for k, c in columns)], rows, numbers=len(columns)), max(halves)


def section() -> str:
    """Build the section of the evidence page; empty where nothing is stored."""
    grid, both, curve = stored_grid(), stored_grid(BOTH), levels()
    if grid is None or curve is None:
        return ""
    shown, half = grid_table(grid, curve)
    text = f"""\
## Clips

Drawn clips of 8 to 32 frames (392 to 1,568 visual tokens), one budget for all frames of a clip: right answers of
{MODEL} in per cent, compact positions and plain attention, on {grid.questions} questions of the task `clips`; the most
frequent answers have {most_frequent(grid.questions):.1f} %. 95 % intervals reach at most {half:.0f} points to
either side. {left_out(grid)}
{pairs_won(grid)}

{shown}"""
    if both is None:
        text += "\nWith original positions and proportional attention: planned and not run.\n"
    else:
        shown, half = grid_table(both, curve)
        text += f"""
With [original positions and proportional attention](place-and-weight.md) on {both.questions} of these questions (up to
{half:.0f} points to either side). {pairs_won(both)}

{shown}"""
    keeps = " ".join(map(str, BUDGETS))
    conditions = " ".join(map(str, grid.conditions))
    methods = " ".join(f"'{method}'" if " " in method else method for method in METHODS)
    return f"""{text}
To repeat it; `python -m clustrs_paper.evidence clips` runs everything:

    clustrs eval --model {MODEL} --task {TASK} --limit {grid.questions} --methods {methods} \\
        --keep {keeps} --positions compact --attention plain --corrupt {conditions}
"""
