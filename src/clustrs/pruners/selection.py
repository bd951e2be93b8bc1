"""What goes into a selection besides tokens and attention, and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class EncoderStates:
    """What a vision encoder knows beyond the projected tokens; a method asks for the parts it needs.

    `hidden` [B, N, H] and `keys` [B, N, K] belong to the layer the projector reads (keys: its k-projection, mean
    over heads). With `cls`, both have one token more, in front: the CLS token. `projector` maps [B, k, H] to
    [B, k, D]. For one image without a batch dimension, leave it out here too.
    """

    hidden: Tensor | None = None
    keys: Tensor | None = None
    projector: Callable[[Tensor], Tensor] | None = None
    cls: bool = True


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie, integers, each [N] or [B, N]: in which `tile` (crop or frame; 0 is the base), and at
    which `y` and `x` of that tile's grid."""

    tile: Tensor
    y: Tensor
    x: Tensor


@dataclass(frozen=True)
class PrunerInputs:
    """Everything that a batch of images has to say to a method; what the caller did not have is None.

    `tokens` [B, N, D], after the projector. `scores` [B, N]: the encoder's attention to each of them. `layout`: where
    they lie, [B, N] each. `hidden` [B, N, H], `keys` [B, N, K], `projector` and `cls` as in `EncoderStates`.
    `question` [B, T, D]: the embeddings of the question's tokens.
    """

    tokens: Tensor
    scores: Tensor | None = None
    layout: Layout | None = None
    hidden: Tensor | None = None
    keys: Tensor | None = None
    projector: Callable[[Tensor], Tensor] | None = None
    cls: bool = True
    question: Tensor | None = None

    @property
    def patch_hidden(self) -> Tensor | None:
        """The hidden states without the CLS token."""
        return None if self.hidden is None else self.hidden[:, int(self.cls) :]

    @property
    def patch_keys(self) -> Tensor | None:
        """The keys without the CLS token."""
        return None if self.keys is None else self.keys[:, int(self.cls) :]


@dataclass(frozen=True)
class Selection:
    """The tokens that survive. Without a batch in, there is none here: [k, D] instead of [B, k, D], and so on.

    `tokens` [B, k, D] is what the language model gets. `indices` [B, k] is the input token that each of these stands
    for, ascending; VisionZip's come as its authors order them, and -1 stands for the CLS token.
    `labels` [B, N] is the output token that each input token belongs to, for methods that group tokens (-1: to none).
    `centroids` [B, k, D] and `alpha` [B, k] are cluster centres and shrink factors (alpha 1: unchanged).
    `merged` [B, k] marks output tokens that are a mixture of input tokens.
    `shares` [B, N] is what each input token contributes to the centre of its cluster; a cluster's sum to 1.
    """

    tokens: Tensor
    indices: Tensor
    labels: Tensor | None = None
    centroids: Tensor | None = None
    alpha: Tensor | None = None
    merged: Tensor | None = None
    shares: Tensor | None = None

    def map(self, function: Callable[..., Tensor], *others: "Selection") -> "Selection":
        """Return a selection with `function` applied to every tensor, together with the same ones of `others`."""
        names = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return replace(self, **{name: function(*(getattr(one, name) for one in (self, *others))) for name in names})

    def image(self, index: int) -> "Selection":
        """One image of a batch."""
        return self.map(lambda part: part[index])
