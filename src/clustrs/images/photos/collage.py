"""Images of 336 pixels: one photograph, or four of them in two rows."""

from collections.abc import Sequence

from PIL import Image

SIDE = 336
PLACES = ("top left", "top right", "bottom left", "bottom right")
"""The four photographs of a collage, in this order."""


def square(photo: Image.Image, side: int, zoom: float = 1.0, x: float = 0.5, y: float = 0.5) -> Image.Image:
    """The largest square of a photograph, or the part `zoom` of its side, in RGB and resized to `side` pixels.

    `x` and `y` say where it lies, from 0 (left, top) to 1; the default is the middle.
    """
    photo = photo.convert("RGB")
    length = zoom * min(photo.size)
    left, top = x * (photo.width - length), y * (photo.height - length)
    box = (left, top, left + length, top + length)
    return photo.resize((side, side), Image.Resampling.BICUBIC, box)


def collage(squares: Sequence[Image.Image]) -> Image.Image:
    """Put four square photographs into two rows, or one alone, without a border."""
    if len(squares) == 1:
        return squares[0]
    if len(squares) != len(PLACES):
        raise ValueError(f"squares={len(squares)} photographs: give 1 or {len(PLACES)}")
    half = SIDE // 2
    image = Image.new("RGB", (SIDE, SIDE))
    for i, photo in enumerate(squares):
        image.paste(photo, (i % 2 * half, i // 2 * half))
    return image
