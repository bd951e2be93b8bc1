"""Images: opening a file safely, with one clear error for whatever is wrong with it, and the paper's corruptions.

An effect gets an RGB image, the strength `level`, and the generator from which all randomness comes.
"""

import io
import math
import os

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps, UnidentifiedImageError

from clustrs.validation import open_regular

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")  # decoded without starting another program
MAX_PIXELS = 64_000_000  # corruptions and processors work on several copies in floating point
MAX_ASPECT_RATIO = 100  # of the sides: processors resize the shorter one to hundreds of pixels


class ImageTooLarge(ValueError):
    """An image that would cost more memory than any image should."""


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image file, upright and in RGB.

    Args:
        path: a regular file in one of `FORMATS`, of at most `MAX_PIXELS` pixels.

    Returns:
        The image, rotated as its EXIF data say; of 16-bit images the upper 8 bits.

    Raises:
        ValueError: there is no such file, it is not an image, it is damaged, or it is too large.
    """
    where = f"image {str(path)!r}"
    if not os.path.isfile(path):  # unlike Path.is_file, also for names that are too long
        raise ValueError(f"{where}: {'not a file' if os.path.exists(path) else 'there is no such file'}")
    try:
        with open_regular(path) as opened, Image.open(opened, formats=FORMATS) as file:
            check_size(where, file.size)
            file.load()
            return to_rgb(ImageOps.exif_transpose(file))
    except UnidentifiedImageError:
        raise ValueError(f"{where}: not an image in any format that is read here ({', '.join(FORMATS)})") from None
    except ImageTooLarge:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = min(MAX_PIXELS, 2 * (Image.MAX_IMAGE_PIXELS or MAX_PIXELS))
        raise ImageTooLarge(f"{where}: too large, more than {limit} pixels") from None
    except Exception as error:  # damaged files make the decoders raise many kinds
        raise ValueError(f"{where} could not be read: {first_sentence(error)}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, of 16-bit images the upper 8 bits; ValueError for 32-bit pixels."""
    if image.mode.startswith("I;16"):  # Pillow would cut off the values above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("it has 32-bit pixels; 8 or 16 bits are supported")
    return image.convert("RGB")


def check_size(where: str, size: tuple[int, int]) -> None:
    """Refuse an image, before it is decoded or processed, that would cost too much memory."""
    shown = f"{size[0]} x {size[1]}"
    if size[0] * size[1] > MAX_PIXELS:
        raise ImageTooLarge(f"{where}: too large, {shown}: at most {MAX_PIXELS} pixels are allowed")
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise ImageTooLarge(f"{where}: too long, {shown}: at most {MAX_ASPECT_RATIO} times as long as wide is allowed")


def first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().split(". ")[0].rstrip(".:")


def to_array(image: Image.Image) -> NDArray[np.float32]:
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
    pixels, reach = to_array(image), size // 2
    height, width = pixels.shape[:2]
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
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
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
