"""Clips: methods at three budgets for a whole clip, clean and noisy, as published.

The level of noise is picked on questions that the grid does not ask.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clustrs.cli import main as clustrs
from clustrs.evaluation.results import Condition, load_run
from clustrs.evaluation.tasks import get_task
from clustrs_paper.evidence import results
from clustrs_paper.evidence.place_and_weight import CLEAN, reach
from clustrs_paper.evidence.results import LABELS, UNPRUNED, Answers, compact_rows, read_answers, read_rows, table

STORED = results.STORED.parent / "clips"
MODEL, TASK, QUESTIONS = "mini-onevision-clips", "clips", 120
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


def eval_options(corruption: str) -> list[str]:
    """Return the options of `clustrs eval` for a part of the grid."""
    options = ["--model", MODEL, "--task", TASK, "--limit", str(QUESTIONS), "--methods", *METHODS]
    options += ["--keep", *map(str, BUDGETS), "--positions", "compact", "--attention", "plain"]
    return [*options, "--corrupt", corruption]


def run(folder: Path, extra: Sequence[str] = ()) -> int:
    """Measure, and store what is complete; stopped, the same call resumes."""
    shared = ["--model", MODEL, "--task", TASK, "--limit", str(2 * QUESTIONS), "--methods", UNPRUNED]
    shared += ["--batch-size", "3"]  # a clip: whole clips of different lengths would be padded
    noise = [f"gaussian:{level}" for level in LEVELS]
    code = clustrs(["eval", *shared, "--corrupt", "clean", *noise, "--output", str(folder / "levels"), *extra])
    if code:
        return code
    results.write_rows(STORED / f"{MODEL}-levels.csv", compact_rows(load_run(folder / "levels")))
    curve = levels()
    assert curve is not None
    rows: list[dict[str, Any]] = []
    for corruption in ("clean", f"gaussian:{chosen_level(curve)}"):
        target = folder / f"compact-plain-{corruption}"
        code = clustrs(["eval", *eval_options(corruption), "--output", str(target), *extra])
        if code:
            return code
        rows += compact_rows(load_run(target))
        results.write_rows(STORED / f"{MODEL}-grid.csv", rows)
    return 0


def stored_grid() -> Answers | None:
    return read_answers(read_rows(STORED / f"{MODEL}-grid.csv"))


def most_frequent(questions: int) -> float:
    """Return the per cent that the most frequent answer of each kind of question has right."""
    answers: dict[str, Counter[str]] = {}
    for item in get_task(TASK, limit=questions).items:
        answers.setdefault(item.question if item.kinds == ("second",) else item.kinds[0], Counter())[item.answer] += 1
    return 100 * sum(max(counts.values()) for counts in answers.values()) / questions


def left_out(columns: Sequence[tuple[int | None, Condition]]) -> str:
    """Say what is missing of the planned grid, or how its level of noise was picked."""
    missing = [f"k = {keep}" for keep in BUDGETS if keep not in {k for k, _ in columns}]
    if all(condition == CLEAN for _, condition in columns):
        missing.append("noise")
    if missing:
        return f"Planned and not run: {', '.join(missing)}, and more questions ({QUESTIONS})."
    return (
        "Noise is Gaussian and fresh in each frame; its level is the one at which the unpruned model\nloses nearest to "
        f"{LOSS:.0%} of its score on other questions."
    )


def section() -> str:
    """Build the section of the evidence page; empty where nothing is stored."""
    grid, curve = stored_grid(), levels()
    if grid is None or curve is None:
        return ""
    columns = list(dict.fromkeys((keep, condition) for _, keep, condition in grid.right if keep))
    whole = {c: 100 * curve.right[UNPRUNED, None, c][: grid.questions].astype(np.float64) for c in grid.conditions}
    rows = [["all tokens", *(f"{whole[condition].mean():.1f}" for _, condition in columns)]]
    halves = [reach(values) for values in whole.values()]
    for method, name in METHODS.items():
        cells = [100 * grid.right[method, keep, condition].astype(np.float64) for keep, condition in columns]
        halves += map(reach, cells)
        rows.append([name, *(f"{values.mean():.1f}" for values in cells)])
    text = f"""\
## Clips

Drawn clips of 8 to 32 frames (392 to 1,568 visual tokens), one budget for all frames of a clip: right answers of
{MODEL} in per cent, compact positions and plain attention, on {grid.questions} questions of the task `clips`; the most
frequent answers have {most_frequent(grid.questions):.1f} %. 95 % intervals reach at most {max(halves):.0f} points to
either side: the table shows what pruning costs, and ranks no methods. {left_out(columns)}

"""
    keeps = " ".join(map(str, dict.fromkeys(keep for keep, _ in columns)))
    conditions = " ".join(map(str, grid.conditions))
    methods = " ".join(f"'{method}'" if " " in method else method for method in METHODS)
    repeat = f"""
To repeat it; `python -m clustrs_paper.evidence clips` runs the whole grid:

    clustrs eval --model {MODEL} --task {TASK} --limit {grid.questions} --methods {methods} \\
        --keep {keeps} --positions compact --attention plain --corrupt {conditions}
"""
    return text + table(["", *(f"{c}, k = {k}" for k, c in columns)], rows, numbers=len(columns)) + repeat
