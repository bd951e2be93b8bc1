"""The image processor of LLaVA-1.5's evaluation: transformers' own, with a bound on what an image may cost."""

from typing import Any

from transformers import LlavaImageProcessorPil

MAX_PADDED_PIXELS = 100_000_000
"""Of a padded square: 10,000 pixels a side. A strip of 65,500 x 2 pixels would need 12 GB."""


class SquareImageProcessor(LlavaImageProcessorPil):  # type: ignore[misc]
    """Pads images to a square with the mean colour before they are resized."""

    def pad_to_square(self, image: Any, background_color: Any = 0) -> Any:
        """Pad an image [channels, height, width], unless the square would be too large to hold."""
        height, width = image.shape[1:]
        if max(height, width) ** 2 > MAX_PADDED_PIXELS:
            raise ValueError(
                f"image of {width} x {height} pixels: padded to a square it would have {max(height, width) ** 2}, "
                f"give one with sides of at most {int(MAX_PADDED_PIXELS**0.5)}"
            )
        return super().pad_to_square(image, background_color)
