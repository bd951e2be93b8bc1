"""What goes into a selection besides tokens and attention, and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class EncoderStates:
    """What a vision encoder knows beyond the projected tokens; a method asks for the parts it needs.

    `hidden` [B, N, H] and `keys` [B, N, K] belong to the layer the projector reads (keys: its k-projection, mean
    over heads). With `cls`, both have one row more, in front: the CLS token. `projector` maps [B, k, H] to [B, k, D].
    For one image without a batch dimension, leave it out here too.
    """

    hidden: Tensor | None = None
    keys: Tensor | None = None
    projector: Callable[[Tensor], Tensor] | None = None
    cls: bool = True

    def batched(self) -> "EncoderStates":
        """The same with a batch of one in front."""
        hidden, keys = (None if part is None else part[None] for part in (self.hidden, self.keys))
        return replace(self, hidden=hidden, keys=keys)


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie, each [N] or [B, N]: in which `tile` (crop or frame; 0 is the base), and at which `y` and
    `x` of that tile's grid."""

    tile: Tensor
    y: Tensor
    x: Tensor


@dataclass(frozen=True)
class Selection:
    """The tokens that survive. Without a batch in, there is none here: [k, D] instead of [B, k, D], and so on.

    `tokens` [B, k, D] is what the language model gets. `indices` [B, k] is the token each of these rows stands for,
    ascending; VisionZip's rows come as its authors order them, and -1 stands for the CLS token.
    `labels` [B, N] is the output row that each input token belongs to, for methods that group tokens (-1: to none).
    `centroids` [B, k, D] and `alpha` [B, k] are the cluster centres and shrink factors of ClustRS (alpha 1: unchanged).
    `merged` [B, k] marks rows that are a mixture of tokens.
    """

    tokens: Tensor
    indices: Tensor
    labels: Tensor | None = None
    centroids: Tensor | None = None
    alpha: Tensor | None = None
    merged: Tensor | None = None

    def image(self, number: int) -> "Selection":
        """One image of a batch."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: part[number] for name, part in parts.items() if part is not None})
