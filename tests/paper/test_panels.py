"""What the drawings of several studies have in common."""

from typing import Any

import pytest

from clustrs_paper.studies.result import draw_panel, pyplot, series, share_text


@pytest.mark.parametrize(
    ("share", "text"), [(0.98, "98%"), (0.1, "10%"), (0.0049, "0.5%"), (0.0004, "under 0.1%"), (0.0, "0%")]
)
def test_a_small_share_is_not_nothing(share: float, text: str) -> None:
    assert share_text(share) == text


@pytest.mark.parametrize("lines", [True, False])
def test_lines_have_their_markers_at_the_ticks(lines: bool) -> None:
    """Points without lines stand next to each other."""
    rows: list[dict[str, Any]] = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": None}]
    axis = pyplot().figure().add_subplot()
    draw_panel(axis, ["x", "y"], [series(rows, name, name, ("#000000", "o")) for name in "ab"], lines=lines)
    places = [list(line.get_xdata()) for line in axis.get_lines()]
    expected: list[list[float]] = [[0, 1], [0]] if lines else [[-0.06, 0.94], [0.06]]
    assert [pytest.approx(place) for place in places] == expected
