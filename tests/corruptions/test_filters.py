"""The filters against plain loops and against cases with a known answer."""

import math
from typing import Literal

import numpy as np
import pytest

from clustrs_models.imagenet_c import Pixels, bell, clouds, convolve, disk, displaced, magnify, smear


def noise(*shape: int) -> Pixels:
    return np.random.default_rng(sum(shape)).random(shape)


@pytest.mark.parametrize("border", ["edge", "reflect", "symmetric"])
@pytest.mark.parametrize("shape", [(9, 12), (8, 7, 3), (2, 3), (1, 6, 3)])
def test_convolve(border: Literal["edge", "reflect", "symmetric"], shape: tuple[int, ...]) -> None:
    pixels, kernel = noise(*shape), noise(3, 5)
    margin = [(1, 1), (2, 2), (0, 0)][: pixels.ndim]
    padded = np.pad(pixels, margin, mode=border)
    expected = np.zeros(shape)
    for y, x in np.ndindex(shape[:2]):
        for (down, right), weight in np.ndenumerate(kernel[::-1, ::-1]):
            expected[y, x] += weight * padded[y + down, x + right]
    np.testing.assert_allclose(convolve(pixels, kernel, border), expected, atol=1e-12)


def test_bell() -> None:
    weights = bell(1.5, 6)
    assert weights.sum() == pytest.approx(1)
    assert weights[6] / weights[9] == pytest.approx(math.exp(0.5 * (3 / 1.5) ** 2))
    assert (np.arange(-6, 7) ** 2 * weights).sum() == pytest.approx(1.5**2, rel=0.01)
    assert bell(0.01, 0).tolist() == [1]


@pytest.mark.parametrize(("radius", "side"), [(3, 17), (6, 17), (10, 21)])
def test_disk(radius: int, side: int) -> None:
    kernel = disk(radius, 0.1)  # a rim so hard that nothing is softened
    y, x = np.mgrid[:side, :side] - side // 2
    inside = np.hypot(x, y) <= radius
    np.testing.assert_allclose(kernel, inside / inside.sum(), atol=1e-12)
    assert disk(radius, 0.5)[~inside].sum() > 0.01


def test_smear_of_a_point() -> None:
    point = np.zeros((60, 60))
    point[30, 40] = 1
    smeared = smear(point, 10, 4, 0)
    weights = np.exp(-0.5 * (np.arange(21) / 4) ** 2)
    np.testing.assert_allclose(smeared[30, 20:41][::-1], weights / weights.sum())
    assert (np.delete(smeared, 30, axis=0) == 0).all()
    np.testing.assert_allclose(smear(point.T, 10, 4, math.pi / 2), smeared.T)
    np.testing.assert_allclose(smear(point, 10, 4, 1.0).sum(), 1)


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 5), (60, 3)])
def test_smear_keeps_one_color(shape: tuple[int, ...]) -> None:
    np.testing.assert_allclose(smear(np.full(shape, 0.3), 20, 15, 0.7), 0.3)


@pytest.mark.parametrize("factor", [1.0, 1.07, 2.5, 4.0])
@pytest.mark.parametrize("size", [1, 2, 9, 50])
def test_magnify(size: int, factor: float) -> None:
    pixels = noise(size, 7)
    part = math.ceil(size / factor)
    start = (size - part) // 2
    result = magnify(pixels, factor)
    assert result.shape[0] >= size
    at = np.linspace(start, start + part - 1, result.shape[0])
    by_rows = np.stack([np.interp(at, np.arange(size), column) for column in pixels.T], axis=1)
    across = magnify(np.arange(7.0)[None], factor)[0]
    expected = np.stack([np.interp(across, np.arange(7), row) for row in by_rows])
    np.testing.assert_allclose(result, expected, atol=1e-12)


def test_displaced() -> None:
    pixels = noise(6, 8, 3)
    nothing = np.zeros((6, 8))
    np.testing.assert_allclose(displaced(pixels, nothing, nothing), pixels)
    mirror = np.pad(pixels, ((0, 9), (9, 0), (0, 0)), mode="symmetric")
    np.testing.assert_allclose(displaced(pixels, nothing + 9, nothing - 9), mirror[9:, :8], atol=1e-12)
    half = displaced(pixels, nothing + 0.25, nothing)
    np.testing.assert_allclose(half[:-1], 0.75 * pixels[:-1] + 0.25 * pixels[1:])
    np.testing.assert_allclose(half[-1], pixels[-1])


@pytest.mark.parametrize("side", [2, 8, 256])
def test_clouds(side: int) -> None:
    sky = clouds(side, 2, np.random.default_rng(0))
    assert sky.shape == (side, side)
    assert (sky.min(), sky.max()) == (0, 1)


def test_clouds_are_soft_and_their_borders_meet() -> None:
    sky = clouds(256, 2, np.random.default_rng(0))
    steps = np.abs(np.diff(sky, axis=0)).mean()
    assert steps < 0.02
    assert np.abs(sky[0] - sky[-1]).mean() < 2 * steps
    assert np.abs(sky[:, 0] - sky[:, -1]).mean() < 2 * steps
    assert np.abs(np.diff(clouds(256, 1.4, np.random.default_rng(0)), axis=0)).mean() > 2 * steps
