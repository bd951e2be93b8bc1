"""Effects of the paper's corruptions on an RGB image; `level` is the strength, all randomness comes from `random`."""

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance


def to_array(image: Image.Image) -> NDArray[np.float32]:
    """Pixels as numbers from 0 to 1: [height, width, 3]."""
    return np.asarray(image, dtype=np.float32) / np.float32(255)


def to_image(pixels: NDArray[np.float32]) -> Image.Image:
    """The image of numbers from 0 to 1: clipped, and rounded to the nearest of the 256 levels."""
    return Image.fromarray(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8))


def gaussian(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Add independent normal noise of standard deviation `level` to every pixel and channel."""
    pixels = to_array(image)
    return to_image(pixels + np.float32(level) * random.standard_normal(pixels.shape, dtype=np.float32))


def salt_pepper(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Turn whole pixels black or white, each with probability `level` / 2."""
    pixels = np.array(image)
    draw = random.random(pixels.shape[:2])
    pixels[draw < level / 2] = 0
    pixels[draw >= 1 - level / 2] = 255
    return Image.fromarray(pixels)


def brightness(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Multiply by `level`."""
    return to_image(to_array(image) * np.float32(level))


def contrast(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blend with the mean gray of the image: 0 is all gray, 1 changes nothing."""
    return ImageEnhance.Contrast(image).enhance(level)


def cutout(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blacken one square covering the fraction `level` of the image; a rectangle where a square would not fit."""
    pixels = np.array(image)
    height, width = pixels.shape[:2]
    cut_height, cut_width = cutout_size(height, width, level)
    top, left = random.integers(0, height - cut_height + 1), random.integers(0, width - cut_width + 1)
    pixels[top : top + cut_height, left : left + cut_width] = 0
    return Image.fromarray(pixels)


def cutout_size(height: int, width: int, fraction: float) -> tuple[int, int]:
    """Return height and width of the square of this fraction of the image's area, or of a rectangle if none fits."""
    area = fraction * height * width
    side = math.sqrt(area)
    if side <= min(height, width):
        return round(side), round(side)
    return (height, round(area / height)) if height < width else (round(area / width), width)


def motion_blur(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Blur along a line of `level` pixels at a random angle. Beyond the border the image's edge repeats."""
    size = int(level)
    kernel = line_kernel(size, random.uniform(0, math.pi))
    pixels = to_array(image)
    height, width = pixels.shape[:2]
    reach = size // 2
    padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    blurred = np.zeros_like(pixels)
    for y, x in zip(*kernel.nonzero(), strict=True):  # a line has few entries: faster than a general convolution
        blurred += np.float32(kernel[y, x]) * padded[y : y + height, x : x + width]
    return to_image(blurred)


def line_kernel(size: int, angle: float) -> NDArray[np.float64]:
    """A line of `size` points through the center of a size x size kernel, each shared among its four neighbors."""
    kernel = np.zeros((size + 1, size + 1))
    steps = np.arange(size) - size // 2
    x, y = size // 2 + steps * math.cos(angle), size // 2 + steps * math.sin(angle)
    column, row = np.floor(x).astype(int), np.floor(y).astype(int)
    for down in (0, 1):
        for right in (0, 1):
            share = (1 - np.abs(y - row - down)) * (1 - np.abs(x - column - right))
            np.add.at(kernel, (row + down, column + right), share)
    kernel = kernel[:size, :size]  # nothing but rounding errors can fall beyond
    return kernel / kernel.sum()


def jpeg(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
    """Store as JPEG of quality `level` and read it back."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=int(level))
    with Image.open(file) as stored:
        return stored.convert("RGB")
