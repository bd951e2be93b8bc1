"""The grid on clips: what is stored is what the page shows."""

import re

import pytest

from clustrs.evaluation.results import Condition
from clustrs_paper.evidence import clips
from clustrs_paper.evidence.page import PAGE
from clustrs_paper.evidence.place_and_weight import BOTH, CLEAN


@pytest.mark.parametrize("setting", clips.FILES)
def test_every_method_is_in_every_cell(setting: str) -> None:
    grid = clips.stored_grid(setting)
    if grid is None:
        assert setting == BOTH
        return
    columns = {(keep, condition) for _, keep, condition in grid.right if keep}
    assert columns
    assert {keep for keep, _ in columns} == set(clips.BUDGETS)
    assert {(m, *column) for m in clips.METHODS for column in columns} == {key for key in grid.right if key[1]}
    assert len({len(bits) for bits in grid.right.values()}) == 1


def test_the_page_has_the_stored_numbers() -> None:
    text, grid = PAGE.read_text(), clips.stored_grid()
    assert grid is not None
    assert clips.section() in text
    row = next(line for line in text.splitlines() if line.startswith("| EVS |"))
    shown = [float(number) for number in re.findall(r"\d+\.\d", row)]
    expected = [100 * bits.mean() for (method, _, _), bits in grid.right.items() if method == "evs"]
    assert shown == pytest.approx(expected, abs=0.051)


def test_the_level_is_chosen_on_questions_that_the_grid_does_not_ask() -> None:
    curve, start = clips.levels(), clips.QUESTIONS
    assert curve is not None
    assert len(curve.right["none", None, CLEAN]) == start + clips.OTHERS
    assert clips.stored_grid().questions <= start  # type: ignore[union-attr]
    others = {level: curve.right["none", None, Condition("gaussian", float(level))][start:] for level in clips.LEVELS}
    clean = curve.right["none", None, CLEAN][start:].sum()
    losses = {level: 1 - bits.sum() / clean for level, bits in others.items()}
    nearest = min(abs(loss - clips.LOSS) for loss in losses.values())
    assert abs(losses[clips.chosen_level(curve)] - clips.LOSS) == pytest.approx(nearest)
