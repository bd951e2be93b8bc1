"""Blurs, magnification and clouds for images as arrays: [height, width] or [height, width, channels]."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.float64]


def convolve(pixels: Pixels, kernel: Pixels, border: Literal["edge", "reflect", "symmetric"]) -> Pixels:
    """Convolution with a kernel of odd height and width. What lies beyond the border is said in `np.pad`'s words."""
    if pixels.ndim == 3:
        return np.stack([convolve(channel, kernel, border) for channel in np.moveaxis(pixels, 2, 0)], axis=2)
    down, right = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(pixels, ((down, down), (right, right)), mode=border)
    spectrum = np.fft.rfft2(padded) * np.fft.rfft2(kernel, padded.shape)
    return np.fft.irfft2(spectrum, padded.shape)[2 * down :, 2 * right :]


def bell(sigma: float, reach: int) -> Pixels:
    """A normal density at the 2 reach + 1 whole numbers around 0; it sums to 1."""
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    return weights / weights.sum()


def disk(radius: int, sigma: float) -> Pixels:
    """A disk with softened rim, as an open lens makes of a point."""
    offsets = np.arange(-max(radius, 8), max(radius, 8) + 1)
    inside = (offsets**2 + offsets[:, None] ** 2 <= radius**2).astype(np.float64)
    rim = bell(sigma, 1 if radius <= 8 else 2)
    return convolve(inside / inside.sum(), np.outer(rim, rim), "reflect")


def smear(pixels: Pixels, reach: int, sigma: float, angle: float) -> Pixels:
    """Blur to one side, along a line of 2 reach + 1 points with weights that fade. The image's edge repeats."""
    points = 2 * reach + 1
    weights = np.exp(-0.5 * (np.arange(points) / sigma) ** 2)
    weights /= weights.sum()
    height, width = pixels.shape[:2]
    margin = [(points, points), (points, points), (0, 0)][: pixels.ndim]
    padded = np.pad(pixels, margin, mode="edge")
    smeared = np.zeros_like(pixels)
    for point, weight in enumerate(weights):
        top = points + math.ceil(point * math.sin(angle) - 0.5)
        left = points + math.ceil(point * math.cos(angle) - 0.5)
        smeared += weight * padded[top : top + height, left : left + width]
    return smeared


def magnify(pixels: Pixels, factor: float) -> Pixels:
    """The middle of the image, `factor` times as large, interpolated; at least as large as the whole was."""
    for axis in (0, 1):
        size = pixels.shape[axis]
        part = math.ceil(size / factor)
        at = np.linspace(0, part - 1, round(part * factor))
        before = np.minimum(at.astype(np.int64), max(part - 2, 0))
        share = (at - before).reshape([-1 if axis == along else 1 for along in range(pixels.ndim)])
        start = before + (size - part) // 2
        after = np.minimum(start + 1, size - 1)
        pixels = pixels.take(start, axis) * (1 - share) + pixels.take(after, axis) * share
    return pixels


def displaced(pixels: Pixels, down: Pixels, right: Pixels) -> Pixels:
    """Each pixel from `down` rows below and `right` columns to its right, interpolated; borders mirror."""
    height, width = pixels.shape[:2]
    row, column = np.mgrid[:height, :width] + np.stack([down, right])
    top, left = np.floor(row), np.floor(column)
    result = np.zeros_like(pixels)
    for below in (0, 1):
        for across in (0, 1):
            share = (1 - np.abs(row - top - below)) * (1 - np.abs(column - left - across))
            result += share[..., None] * pixels[mirrored(top + below, height), mirrored(left + across, width)]
    return result


def mirrored(index: Pixels, size: int) -> NDArray[np.int64]:
    """The index inside 0 ... size - 1 that mirrors at the borders lead to."""
    folded = index.astype(np.int64) % (2 * size)
    return np.minimum(folded, 2 * size - 1 - folded)


def clouds(side: int, decay: float, random: np.random.Generator) -> Pixels:
    """A cloudy sky from 0 to 1 by midpoint displacement, on a square whose borders meet; `side` is a power of two.

    Every finer grid is the mean of its neighbours plus noise, and the amplitude of the noise falls by `decay` squared.
    """
    sky = np.zeros((side, side))
    step, wobble = side, 100.0

    def between(four: Pixels) -> Pixels:
        return four / 4 + wobble * random.uniform(-wobble, wobble, four.shape)

    while step > 1:
        half = step // 2
        corners = sky[::step, ::step]
        across, downwards = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 0)
        centres = between(across + np.roll(across, -1, 0))
        sky[half::step, half::step] = centres
        sky[::step, half::step] = between(across + centres + np.roll(centres, 1, 0))
        sky[half::step, ::step] = between(downwards + centres + np.roll(centres, 1, 1))
        step, wobble = half, wobble / decay
    sky -= sky.min()
    return sky / sky.max()
