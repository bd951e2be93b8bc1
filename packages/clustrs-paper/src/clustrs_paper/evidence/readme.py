"""The first table of the README, from what is stored of the default model."""

from pathlib import Path

import numpy as np

from clustrs.embedded import DEFAULT
from clustrs.evaluation.metrics import estimates
from clustrs.evaluation.results import Condition
from clustrs_paper.evidence.page import shown_methods, table
from clustrs_paper.evidence.results import UNPRUNED, Answers, load

README = Path(__file__).parents[5] / "README.md"
KEEP = 16
BEGIN, END = "<!-- evidence -->\n", "<!-- end -->"
COLUMNS = ("clean", "gaussian 1", "gaussian 2", "salt_pepper 1")
"""Groups of `Term`, of one condition each."""
NAMES = {"clean": "clean", "gaussian": "Gaussian noise", "salt_pepper": "salt and pepper"}


def heading(condition: Condition) -> str:
    level = "" if condition.level is None else f" {condition.level_text}"
    return f"{NAMES[condition.name]}{level}"


def score(grid: Answers, method: str, condition: Condition) -> str:
    """A mean in per cent, with its interval."""
    right = grid.right[method, None if method == UNPRUNED else KEEP, condition]
    found = estimates(100 * right[None].astype(np.float64))[0]
    assert found.mean is not None
    assert found.low is not None
    assert found.high is not None
    return f"{found.mean:.1f} ({found.low:.1f} to {found.high:.1f})"


def first_table(model: str = DEFAULT) -> str:
    """What the methods make of the model with 16 tokens: clean, and at levels of noise that it bears."""
    grid = load(model).grid
    if grid is None:
        raise ValueError(f"nothing is stored of {model}: python -m clustrs_paper.evidence run {model}")
    conditions = [condition for name in COLUMNS for condition in grid.group(name)]
    rows = [
        [f"**{label}**" if method == "clustrs" else label, *(score(grid, method, c) for c in conditions)]
        for method, label in shown_methods(grid, KEEP).items()
    ]
    words = f"Right answers in per cent, with 95 % intervals, of {model} on {grid.questions} questions of the task"
    head = [f"{KEEP} visual tokens", *map(heading, conditions)]
    return f"{words} `{grid.task}`:\n\n{table(head, rows)}"


def filled(text: str, block: str) -> str:
    """The README with the table in its place."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}{block}{END}{rest.split(END, 1)[1]}"
