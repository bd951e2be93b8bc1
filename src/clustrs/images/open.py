"""Open an image file safely: one clear error for whatever is wrong with it."""

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError


def open_image(path: str | os.PathLike[str]) -> Image.Image:
    """The image in a file, upright and in RGB. A ValueError says what is wrong with a file that has none."""
    if not Path(path).is_file():
        raise ValueError(f"image {str(path)!r}: {'not a file' if Path(path).exists() else 'there is no such file'}")
    try:
        with Image.open(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I;16"):  # Pillow would cut off the values above 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError("it has 32-bit pixels, give 8 or 16 bits")
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"image {str(path)!r}: not an image in any format that Pillow reads") from None
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"image {str(path)!r}: too large, more than {limit} pixels") from None
    except Exception as error:  # damaged files make the decoders raise many kinds
        raise ValueError(f"image {str(path)!r} could not be read: {first_sentence(error)}") from error


def first_sentence(error: Exception) -> str:
    """The start of a long message, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().split(". ")[0].rstrip(".:")
