"""How images are fitted to the model: as its checkpoint says, or padded to a square as LLaVA-1.5's evaluation does."""

from copy import copy
from typing import Any

from clustrs.validation import ImagePadding

CARRIED_OVER = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std")
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")


def apply_image_padding(processor: Any, padding: ImagePadding = "checkpoint") -> Any:
    """Return a processor that fits images this way; the one given stays as it is."""
    if padding == "checkpoint":
        return processor
    if padding != "square":
        raise ValueError(f"image_padding={padding!r}: give one of 'checkpoint', 'square'")
    from transformers import LlavaProcessor

    from clustrs.models.square_images import SquareImageProcessor

    if not isinstance(processor, LlavaProcessor):
        raise ValueError(
            f"image_padding='square': {type(processor).__name__} fits images in a way of its own, only that of "
            "LLaVA-1.5 (LlavaProcessor) can be replaced: give 'checkpoint'"
        )
    original = processor.image_processor
    settings = {name: value for name in CARRIED_OVER if (value := getattr(original, name, None)) is not None}
    steps = {name: bool(getattr(original, name, None)) for name in STEPS}
    padded = copy(processor)
    padded.image_processor = SquareImageProcessor(do_pad=True, **steps, **settings)
    return padded
