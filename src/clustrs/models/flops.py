"""FLOPs that several parts of a model have in common, the size of an image, and the check of what can be counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PatchGrid:
    """The size of an image in patches, for families that take images of any size; a video has several `frames`.

    For Qwen's families these are the numbers of `image_grid_thw`. `padded` is how many patches the processor pads each
    image (or frame) to, for families that pad: Gemma 4's `pixel_values` has that many rows.
    """

    height: int
    width: int
    frames: int = 1
    padded: int | None = None

    def check(self, multiple: int) -> None:
        """Refuse sizes that no processor makes: sides are positive multiples of some number of patches."""
        for name in ("height", "width"):
            value = getattr(self, name)
            if value < 1 or value % multiple:
                raise ValueError(f"grid.{name}={value!r}: give a multiple of {multiple} patches, at least {multiple}")
        if self.frames < 1:
            raise ValueError(f"grid.frames={self.frames!r}: a number of at least 1 is needed")


def attention_flops(queries: int, keys: int, width: int) -> int:
    """FLOPs of q k^T and of weights times v over all heads, `width` numbers together."""
    return 4 * queries * keys * width


def check_known(config: Any, accepted: Sequence[str], name: str) -> None:
    if getattr(config, "model_type", None) not in accepted:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"{name}: model_type {kind!r} cannot be counted; accepted: {', '.join(accepted)}")
