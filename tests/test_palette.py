"""Colours and markers of methods."""

import subprocess
import sys
from pathlib import Path

import pytest

import clustrs
from clustrs import palette


def test_every_method_has_a_color_of_its_own() -> None:
    names = [*clustrs.list_methods(), "mine", "yours", "denoise:divprune", "a method with spaces"]
    colors = [palette.color(name) for name in names]
    assert len(set(colors)) == len(names)
    assert all(len(color) == 7 and int(color[1:], 16) >= 0 for color in colors)
    assert [palette.color(name) for name in names] == colors
    assert palette.color("clustrs") == "#0072b2"


@pytest.mark.parametrize("name", ["tome", "mine", "x" * 500, ""])
def test_other_names_stay_clear_of_the_fixed_colors(name: str) -> None:
    assert palette._clearance(palette.color(name)) > 40**2
    assert palette.marker(name) in palette.OTHER_MARKERS
    assert palette.marker(name) not in palette.MARKERS.values()


def test_what_is_not_a_method_has_no_method_s_color() -> None:
    assert all(palette._clearance(color) > 40**2 for color in palette.SERIES)
    assert len(set(palette.SERIES)) == len(palette.SERIES)


def test_a_color_has_one_stand_in_on_every_dark_page() -> None:
    assert all(light in palette.COLORS.values() for light in palette.DARK)
    assert '.dark [style*="color: #0072b2"] { color: #2a8fd6 !important; }' in palette.dark_css(".dark")
    page = (Path(clustrs.__file__).parent / "app" / "style.css").read_text()
    assert f".dark .cl-plane .kept:not(.member) {{ fill: {palette.DARK[palette.color('clustrs')]}; }}" in page


def test_markers_are_known_to_matplotlib() -> None:
    markers = pytest.importorskip("matplotlib.markers")
    assert {*palette.MARKERS.values(), *palette.OTHER_MARKERS} <= set(markers.MarkerStyle.markers)


def test_the_palette_needs_no_torch() -> None:
    code = "import sys; from clustrs import palette; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
