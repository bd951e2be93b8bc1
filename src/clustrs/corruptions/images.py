"""Open an image file safely: one clear error for whatever is wrong with it."""

import errno
import os
import stat
from io import BufferedReader

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")
"""Formats that Pillow decodes in this process, without starting a program such as Ghostscript."""
MAX_PIXELS = 64_000_000
"""An image may have this many: corruptions and processors work on several copies in floating point."""
MAX_ASPECT_RATIO = 100
"""The longer side may be this many times the shorter one: processors resize the shorter one to hundreds of pixels."""


class ImageTooLarge(ValueError):
    """An image that would cost more memory than any image should."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file to read its bytes; an OSError for anything else.

    A FIFO without a writer or a device would block the caller for ever. The file is checked before it is opened, since
    opening a device may do something, and after, since it may have been replaced in between.
    """
    if stat.S_ISREG(os.stat(path).st_mode):
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


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
    width, height = size
    if width * height > MAX_PIXELS:
        raise ImageTooLarge(f"{where}: too large, {width} x {height}: at most {MAX_PIXELS} pixels are allowed")
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise ImageTooLarge(
            f"{where}: too long, {width} x {height}: at most {MAX_ASPECT_RATIO} times as long as wide is allowed"
        )


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().split(". ")[0].rstrip(".:")
