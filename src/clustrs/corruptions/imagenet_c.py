"""The 15 families of ImageNet-C at five severities, for images of any size.

What they do, and their constants, are those of the package `imagecorruptions`, which the tests compare with. That
package breaks with current versions of numpy and scikit-image; of it, only the photographs of frost are used.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clustrs.corruptions import effects

Pixels = NDArray[np.float64]
"""An image as an array: [height, width] or [height, width, channels]."""
GET_PHOTOGRAPHS = "pip install --no-deps imagecorruptions"
PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")


def to_array(image: Image.Image) -> Pixels:
    """Pixels as numbers from 0 to 1: [height, width, 3]."""
    return np.asarray(image) / 255


def to_bytes(pixels: Pixels) -> NDArray[np.uint8]:
    """The 256 levels of numbers from 0 to 1: clipped and cut off, as in ImageNet-C, but blind to rounding errors."""
    return (pixels.clip(0, 1) * 255 + 1e-6).astype(np.uint8)


def to_image(pixels: Pixels) -> Image.Image:
    return Image.fromarray(to_bytes(pixels))


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

    Every finer grid is the mean of its neighbors plus noise, and the amplitude of the noise falls by `decay` squared.
    """
    sky = np.zeros((side, side))
    step, wobble = side, 100.0

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


def gaussian_noise(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Add independent normal noise to every pixel and channel."""
    sigma = (0.08, 0.12, 0.18, 0.26, 0.38)[int(level) - 1]
    pixels = to_array(image)
    return to_image(pixels + sigma * random.standard_normal(pixels.shape))


def shot_noise(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Count so few photons that their number is uncertain."""
    photons = (60, 25, 12, 5, 3)[int(level) - 1]
    return to_image(random.poisson(to_array(image) * photons) / photons)


def impulse_noise(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Set single channels of single pixels to 0 or 1, as often the one as the other."""
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[int(level) - 1]
    pixels = np.array(image)
    hit = random.random(pixels.shape) <= share
    bright = random.random(pixels.shape) <= 0.5
    pixels[hit] = np.where(bright[hit], 255, 0)
    return Image.fromarray(pixels)


def defocus_blur(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Spread every point over a disk."""
    radius, sigma = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))[int(level) - 1]
    return to_image(convolve(to_array(image), disk(radius, sigma), "reflect"))


def glass_blur(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blur, take every pixel from somewhere near it, blur again."""
    sigma, far, rounds = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[int(level) - 1]
    weights = bell(sigma, int(4 * sigma + 0.5))
    kernel = np.outer(weights, weights)
    levels = to_bytes(convolve(to_array(image), kernel, "edge"))
    for _ in range(rounds):
        source = wandering(levels.shape[0], levels.shape[1], far, random)
        levels = levels.reshape(-1, 3)[source].reshape(levels.shape)
    return to_image(convolve(levels / 255, kernel, "edge"))


def wandering(height: int, width: int, far: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the source of each pixel of [height * width], if one pixel after the other copies a near one.

    From the last to the first: who copies a pixel that has copied already gets what that one got. So each pixel
    points to a copy or to an original, and doubling the pointers' reach leads all of them to originals.
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


def motion_blur(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blur to one side, at a random angle within 45 degrees of the horizontal."""
    reach, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[int(level) - 1]
    return to_image(smear(to_array(image), reach, sigma, math.radians(random.uniform(-45, 45))))


def zoom_blur(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """The mean of the image and of ever larger versions of it."""
    stop, step = ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))[int(level) - 1]
    factors = np.arange(1, stop, step)
    pixels = to_array(image)
    height, width = pixels.shape[:2]
    total = pixels.copy()
    for factor in factors:
        total += magnify(pixels, float(factor))[:height, :width]
    return to_image(total / (len(factors) + 1))


def snow(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Whiten the image, and let smeared flakes fall over it from both sides."""
    mean, sigma, size, least, reach, fade, own = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )[int(level) - 1]
    pixels = to_array(image)
    height, width = pixels.shape[:2]
    flakes = magnify(random.normal(mean, sigma, (height, width)), size)
    flakes = np.where(flakes < least, 0, flakes.clip(0, 1))
    flakes = smear(flakes, int(reach), fade, math.radians(random.uniform(-135, -45)))[:height, :width, None]
    flakes = np.rint(flakes * 255) / 255
    gray = pixels @ np.array([0.299, 0.587, 0.114])
    whitened = own * pixels + (1 - own) * np.maximum(pixels, gray[..., None] * 1.5 + 0.5)
    return to_image(whitened + flakes + flakes[::-1, ::-1])


def frost_photographs() -> list[Path]:
    """The photographs of frost, from the package `imagecorruptions` if it is installed (it is not imported)."""
    package = find_spec("imagecorruptions")
    folders = [Path(folder) / "frost" for folder in (package and package.submodule_search_locations) or []]
    paths = [folder / name for folder in folders for name in PHOTOGRAPHS]
    return paths if all(path.is_file() for path in paths) else []


def frost(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Lay a random part of a photograph of frost over the image."""
    own, other = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[int(level) - 1]
    paths = frost_photographs()
    if not paths:
        raise ValueError(f"imagenet_c/frost needs photographs of frost: {GET_PHOTOGRAPHS}")
    with Image.open(paths[random.integers(len(paths))]) as file:
        photograph = file.convert("RGB")
    scale = 1.1 * max(1, image.width / photograph.width, image.height / photograph.height)
    size = math.ceil(photograph.width * scale), math.ceil(photograph.height * scale)
    ice = to_array(photograph.resize(size, Image.Resampling.BICUBIC))
    top, left = random.integers(size[1] - image.height), random.integers(size[0] - image.width)
    ice = ice[top : top + image.height, left : left + image.width]
    return to_image(own * to_array(image) + other * ice)


def fog(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Add clouds, then bring the image back to the brightness it had at most."""
    thickness, decay = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))[int(level) - 1]
    pixels = to_array(image)
    height, width = pixels.shape[:2]
    sky = clouds(2 ** (max(height, width, 2) - 1).bit_length(), decay, random)[:height, :width, None]
    brightest = pixels.max()
    return to_image((pixels + thickness * sky) * brightest / (brightest + thickness))


def brightness(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Add to the value of each pixel (its largest channel); hue and saturation stay."""
    pixels = to_array(image)
    value = pixels.max(axis=2, keepdims=True)
    brighter = np.minimum(value + (0.1, 0.2, 0.3, 0.4, 0.5)[int(level) - 1], 1)
    return to_image(np.where(value > 0, pixels * (brighter / np.where(value > 0, value, 1)), brighter))


def contrast(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blend with the image's mean color."""
    own = (0.4, 0.3, 0.2, 0.1, 0.05)[int(level) - 1]
    pixels = to_array(image)
    return to_image(own * pixels + (1 - own) * pixels.mean(axis=(0, 1)))


def elastic_transform(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Push every pixel to a random place near it, neighbors to almost the same one."""
    strength = 250 * (0.05, 0.065, 0.085, 0.1, 0.12)[int(level) - 1]
    down, right = (0.01 * size for size in (image.height, image.width))
    kernel = np.outer(bell(down, int(3 * down + 0.5)), bell(right, int(3 * right + 0.5)))
    farthest = 0.005 * image.height
    to_right, to_below = (
        strength * convolve(random.uniform(-farthest, farthest, (image.height, image.width)), kernel, "symmetric")
        for _ in range(2)
    )
    return to_image(displaced(to_array(image), to_below, to_right))


def pixelate(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Make the image small, and large again without interpolation."""
    share = (0.6, 0.5, 0.4, 0.3, 0.25)[int(level) - 1]
    small = max(1, int(image.width * share)), max(1, int(image.height * share))
    return image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.NEAREST)


def jpeg_compression(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Store as JPEG of low quality and read it back."""
    return effects.jpeg(image, (25, 18, 15, 10, 7)[int(level) - 1], random)


FAMILIES = {
    effect.__name__: effect
    for effect in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
    )
}
"""By name, in the order in which ImageNet-C lists them."""
