"""Colours and markers of methods."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("name", ["denoise", "mine", "x" * 500, ""])
def test_other_names_stay_clear_of_the_fixed_colors(name: str) -> None:
    assert palette._clearance(palette.color(name)) > 40**2
    assert palette.marker(name) in palette.OTHER_MARKERS
    assert palette.marker(name) not in palette.MARKERS.values()


SIMULATED = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


@pytest.mark.parametrize("seen", SIMULATED)
def test_fixed_colors_can_be_told_apart_by_the_color_blind(seen: str) -> None:
    """By color (CIE76 distance in Lab of at least 10), or, for the gray of random, by its marker."""

    def lab(color: str) -> np.ndarray:
        rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        linear = np.clip(np.array(SIMULATED[seen]) @ linear, 0, 1)
        to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        x, y, z = np.cbrt(to_xyz @ linear / (0.9505, 1, 1.089))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    for first, second in combinations(palette.COLORS, 2):
        near = np.linalg.norm(lab(palette.color(first)) - lab(palette.color(second))) < 10
        assert not near or "random" in (first, second), (first, second)
        assert not near or palette.marker(first) != palette.marker(second), (first, second)


def test_what_is_not_a_method_has_no_method_s_color() -> None:
    assert all(palette._clearance(color) > 40**2 for color in palette.SERIES)
    assert len(set(palette.SERIES)) == len(palette.SERIES)


def test_a_color_has_one_stand_in_on_every_dark_page() -> None:
    assert all(light in palette.COLORS.values() for light in palette.DARK)
    assert '.dark [style*="color: #0072b2"] { color: #2a8fd6 !important; }' in palette.dark_css(".dark")
    page = (Path(clustrs.__file__).parent / "app" / "style.css").read_text()
    assert f".dark .cl-plane .kept {{ fill: var(--c, {palette.DARK[palette.color('clustrs')]}); }}" in page


def test_markers_are_known_to_matplotlib() -> None:
    markers = pytest.importorskip("matplotlib.markers")
    assert {*palette.MARKERS.values(), *palette.OTHER_MARKERS} <= set(markers.MarkerStyle.markers)


def test_the_palette_needs_no_torch() -> None:
    code = "import sys; from clustrs import palette; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
