"""The 15 families of ImageNet-C at five severities, for images of any size.

Constants are those of the package `imagecorruptions`, which breaks with current versions of numpy and scikit-image.
"""

import math
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from clustrs.corruptions import images

Pixels = NDArray[np.float64]  # an image as an array: [height, width] or [height, width, channels]
PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")


def to_array(image: Image.Image) -> Pixels:
    return np.asarray(image) / 255


def to_bytes(pixels: Pixels) -> NDArray[np.uint8]:
    """The 256 levels of numbers from 0 to 1: clipped and cut off, as in ImageNet-C, but blind to rounding errors."""
    return (pixels.clip(0, 1) * 255 + 1e-6).astype(np.uint8)


def to_image(pixels: Pixels) -> Image.Image:
    return Image.fromarray(to_bytes(pixels))


FAMILIES: dict[str, Callable[[Image.Image, float, Generator], Image.Image]] = {}  # in the order of ImageNet-C


def severities(*constants: Any) -> Callable[[Callable[..., Pixels]], Callable[..., Pixels]]:
    """Register a function of pixels, random numbers and constants, which differ between the five severities."""

    def register(effect: Callable[..., Pixels]) -> Callable[..., Pixels]:
        @wraps(effect)
        def apply(image: Image.Image, level: float, random: Generator) -> Image.Image:
            chosen = constants[int(level) - 1]
            return to_image(effect(to_array(image), random, *(chosen if isinstance(chosen, tuple) else (chosen,))))

        FAMILIES[effect.__name__] = apply
        return effect

    return register


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
    padded = np.pad(pixels, [(points, points), (points, points), (0, 0)][: pixels.ndim], mode="edge")
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
    """Take each pixel from `down` rows below and `right` columns to its right, interpolated; borders mirror."""
    size = np.array(pixels.shape[:2]).reshape(2, 1, 1)
    place = np.mgrid[: pixels.shape[0], : pixels.shape[1]] + np.stack([down, right])
    corner, result = np.floor(place), np.zeros_like(pixels)
    for step in np.array([(0, 0), (0, 1), (1, 0), (1, 1)]).reshape(4, 2, 1, 1):
        share = (1 - np.abs(place - corner - step)).prod(0)
        folded = (corner + step).astype(np.int64) % (2 * size)
        result += share[..., None] * pixels[tuple(np.minimum(folded, 2 * size - 1 - folded))]
    return result


def clouds(side: int, decay: float, random: Generator) -> Pixels:
    """A cloudy sky from 0 to 1 by midpoint displacement, on a square whose borders meet; `side` is a power of two."""
    sky, step, wobble = np.zeros((side, side)), side, 100.0  # the noise of a finer grid falls by `decay` squared

    def between(four: Pixels) -> Pixels:
        return four / 4 + wobble * random.uniform(-wobble, wobble, four.shape)

    while step > 1:
        half = step // 2
        corners = sky[::step, ::step]
        across, downwards = corners + np.roll(corners, -1, 1), corners + np.roll(corners, -1, 0)
        centers = between(across + np.roll(across, -1, 0))
        sky[half::step, half::step] = centers
        sky[::step, half::step] = between(across + centers + np.roll(centers, 1, 0))
        sky[half::step, ::step] = between(downwards + centers + np.roll(centers, 1, 1))
        step, wobble = half, wobble / decay
    sky -= sky.min()
    return sky / sky.max()


@severities(0.08, 0.12, 0.18, 0.26, 0.38)
def gaussian_noise(pixels: Pixels, random: Generator, sigma: float) -> Pixels:
    return pixels + sigma * random.standard_normal(pixels.shape)


@severities(60, 25, 12, 5, 3)
def shot_noise(pixels: Pixels, random: Generator, photons: int) -> Pixels:
    """Count so few photons that their number is uncertain."""
    return random.poisson(pixels * photons) / photons


@severities(0.03, 0.06, 0.09, 0.17, 0.27)
def impulse_noise(pixels: Pixels, random: Generator, share: float) -> Pixels:
    """Set single channels of single pixels to 0 or 1, as often the one as the other."""
    hit = random.random(pixels.shape) <= share
    return np.where(hit, random.random(pixels.shape) <= 0.5, pixels)


@severities((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
def defocus_blur(pixels: Pixels, random: Generator, radius: int, sigma: float) -> Pixels:
    return convolve(pixels, disk(radius, sigma), "reflect")


@severities((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
def glass_blur(pixels: Pixels, random: Generator, sigma: float, far: int, rounds: int) -> Pixels:
    """Blur, take every pixel from somewhere near it, blur again."""
    weights = bell(sigma, int(4 * sigma + 0.5))
    kernel = np.outer(weights, weights)
    levels = to_bytes(convolve(pixels, kernel, "edge"))
    for _ in range(rounds):
        source = wandering(levels.shape[0], levels.shape[1], far, random)
        levels = levels.reshape(-1, 3)[source].reshape(levels.shape)
    return convolve(levels / 255, kernel, "edge")


def wandering(height: int, width: int, far: int, random: Generator) -> NDArray[np.int64]:
    """Return the source of each pixel of [height * width], if one after the other, from the last, copies a near one.

    Each points to a copy or to an original; doubling the pointers' reach leads all of them to originals.
    """
    size = height * width
    here = np.arange(size).reshape(height, width)[far + 1 : height - far + 1, far + 1 : width - far + 1]
    here = here[::-1, ::-1].ravel()
    right, down = random.integers(-far, far, (here.size, 2)).T
    there = here + down * width + right
    copied = np.zeros(size, dtype=bool)
    copied[here] = True
    pointer = np.concatenate([np.arange(size) + size, np.arange(size) + size])  # copies, then originals
    pointer[here] = np.where(copied[there] & (there > here), there, there + size)
    while (pointer[:size] < size).any():
        pointer = pointer[pointer]
    return pointer[:size] - size


@severities((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
def motion_blur(pixels: Pixels, random: Generator, reach: int, sigma: float) -> Pixels:
    """Blur to one side, at a random angle within 45 degrees of the horizontal."""
    return smear(pixels, reach, sigma, math.radians(random.uniform(-45, 45)))


@severities((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))
def zoom_blur(pixels: Pixels, random: Generator, stop: float, step: float) -> Pixels:
    """Return the mean of the image and of ever larger versions of it."""
    height, width = pixels.shape[:2]
    factors, total = np.arange(1, stop, step), pixels.copy()
    for factor in factors:
        total += magnify(pixels, float(factor))[:height, :width]
    return total / (len(factors) + 1)


@severities(
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
def snow(pixels: Pixels, random: Generator, *constants: float) -> Pixels:
    """Whiten the image, and let smeared flakes fall over it from both sides."""
    mean, sigma, size, least, reach, fade, own = constants
    height, width = pixels.shape[:2]
    flakes = magnify(random.normal(mean, sigma, (height, width)), size)
    flakes = np.where(flakes < least, 0, flakes.clip(0, 1))
    flakes = smear(flakes, int(reach), fade, math.radians(random.uniform(-135, -45)))[:height, :width, None]
    flakes = np.rint(flakes * 255) / 255
    gray = pixels @ np.array([0.299, 0.587, 0.114])
    whitened = own * pixels + (1 - own) * np.maximum(pixels, gray[..., None] * 1.5 + 0.5)
    return whitened + flakes + flakes[::-1, ::-1]


def frost_photographs() -> list[Path]:
    """Return the photographs of frost, from the package `imagecorruptions` if it is installed (it is not imported)."""
    package = find_spec("imagecorruptions")
    folders = [Path(folder) / "frost" for folder in (package and package.submodule_search_locations) or []]
    paths = [folder / name for folder in folders for name in PHOTOGRAPHS]
    return paths if all(path.is_file() for path in paths) else []


@severities((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
def frost(pixels: Pixels, random: Generator, own: float, other: float) -> Pixels:
    """Lay a random part of a photograph of frost over the image."""
    paths = frost_photographs()
    with Image.open(paths[random.integers(len(paths))]) as file:
        photograph = file.convert("RGB")
    height, width = pixels.shape[:2]
    scale = 1.1 * max(1, width / photograph.width, height / photograph.height)
    size = math.ceil(photograph.width * scale), math.ceil(photograph.height * scale)
    ice = to_array(photograph.resize(size, Image.Resampling.BICUBIC))
    top, left = random.integers(size[1] - height), random.integers(size[0] - width)
    return own * pixels + other * ice[top : top + height, left : left + width]


@severities((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))
def fog(pixels: Pixels, random: Generator, thickness: float, decay: float) -> Pixels:
    """Add clouds, then bring the image back to the brightness it had at most."""
    height, width = pixels.shape[:2]
    sky = clouds(2 ** (max(height, width, 2) - 1).bit_length(), decay, random)[:height, :width, None]
    brightest = pixels.max()
    return (pixels + thickness * sky) * brightest / (brightest + thickness)


@severities(0.1, 0.2, 0.3, 0.4, 0.5)
def brightness(pixels: Pixels, random: Generator, more: float) -> Pixels:
    """Add to the value of each pixel (its largest channel); hue and saturation stay."""
    value = pixels.max(axis=2, keepdims=True)
    brighter = np.minimum(value + more, 1)
    return np.where(value > 0, pixels * (brighter / np.where(value > 0, value, 1)), brighter)


@severities(0.4, 0.3, 0.2, 0.1, 0.05)
def contrast(pixels: Pixels, random: Generator, own: float) -> Pixels:
    return own * pixels + (1 - own) * pixels.mean(axis=(0, 1))


@severities(0.05, 0.065, 0.085, 0.1, 0.12)
def elastic_transform(pixels: Pixels, random: Generator, strength: float) -> Pixels:
    """Push every pixel to a random place near it, neighbors to almost the same one."""
    height, width = pixels.shape[:2]
    kernel = np.outer(*(bell(0.01 * size, int(3 * (0.01 * size) + 0.5)) for size in (height, width)))
    farthest = 0.005 * height
    to_right, to_below = (
        250 * strength * convolve(random.uniform(-farthest, farthest, (height, width)), kernel, "symmetric")
        for _ in range(2)
    )
    return displaced(pixels, to_below, to_right)


@severities(0.6, 0.5, 0.4, 0.3, 0.25)
def pixelate(pixels: Pixels, random: Generator, share: float) -> Pixels:
    image = to_image(pixels)
    small = max(1, int(image.width * share)), max(1, int(image.height * share))
    return to_array(image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.NEAREST))


@severities(25, 18, 15, 10, 7)
def jpeg_compression(pixels: Pixels, random: Generator, quality: int) -> Pixels:
    return to_array(images.jpeg(to_image(pixels), quality, random))
