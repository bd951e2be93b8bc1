"""What a family of models has to say about its images: their visual tokens, and where these go in the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from clustrs.models.clock import Clock
from clustrs.models.compaction import Compaction, KeptTokens
from clustrs.models.flops import PatchGrid
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops

Modality = Literal["image", "video"]


@dataclass(frozen=True)
class VisualTokens:
    """One image or video before pruning.

    `features` [M, D] are the rows that the unpruned model would feed (or the base crop's part of them); `candidates`
    [N] are those of the rows that compete to be kept: newlines do not. `scores`, `layout`, `hidden` [N, H] and `keys`
    [N, K] belong to the candidates; `cls_hidden` and `cls_keys` [tiles, 1 or 0, ...] to the tiles. `grids` has the
    height and width of each tile in tokens; `columns` says how many of those after the first lie side by side, where
    the image's shape alone does not. `project` maps hidden states to features. `planes` [L, M, D] are further features
    of every row, for models that feed some into later layers. `slots` is how many placeholders of the prompt belong to
    it, and `first_slot` the one that the first row of `features` takes. `runs` [N] says which run of placeholders a
    candidate stands in, where the prompt has text between those of one image: no token then leaves its run. `lacking`
    says why hidden states or keys are not there, for methods that need them.
    """

    features: Tensor
    candidates: Tensor
    scores: Tensor
    layout: Layout
    grids: list[tuple[int, int]]
    slots: int
    hidden: Tensor | None = None
    keys: Tensor | None = None
    cls_hidden: Tensor | None = None
    cls_keys: Tensor | None = None
    project: Callable[[Tensor], Tensor] | None = None
    planes: Tensor | None = None
    first_slot: int = 0
    runs: Tensor | None = None
    modality: Modality = "image"
    columns: int | None = None
    lacking: str = "this family does not give them"

    @property
    def tokens(self) -> Tensor:
        """The features [N, D] of the candidates."""
        return self.features[self.candidates]


class Adapter:
    """Base class for model families; found by `config.model_type`, one object for each attached model.

    `inner` is the model without its language head. A subclass names its `model_types` and says how images are encoded;
    where it is silent, the prompt has one placeholder token for each visual token, and positions count from 0.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    pixel_arguments: ClassVar[tuple[str, ...]] = ("pixel_values",)
    """Arguments of `forward` that bring images or videos."""
    consumed: ClassVar[tuple[str, ...]] = ()
    """Further arguments that are used up when these are encoded."""
    first_position: ClassVar[int] = 0
    """What `forward` counts positions from when it is given none."""
    has_planes: ClassVar[bool] = False
    """Whether some features are fed into later layers."""
    tokens_per_image: ClassVar[str] = "not stated"
    """How many visual tokens an image has, for `clustrs models`."""
    tested: ClassVar[str] = "not stated"
    """What was tested, for `clustrs models`."""
    takes_video: ClassVar[str] = "no"
    """Whether videos can be pruned: "yes", "no", or "frames as images"."""
    published_weights: ClassVar[str] = "no"
    """Whether the family was tested with weights that its authors published: "no", or a checkpoint's id."""
    gpu: ClassVar[str] = "no"
    """Whether the family was tested on a GPU: "no", or the device."""
    counts_vision: ClassVar[bool] = False
    """Whether `vision_flops` is defined."""
    takes_grid: ClassVar[bool] = False
    """Whether images may have any size, so that `vision_flops` needs their grid of patches."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config = inner.config

    def listened_layer(self) -> Any:
        """The attention layer whose output the projector reads."""
        raise NotImplementedError(f"{type(self).__name__} must say which layer is listened to")

    def encode(self, inputs: dict[str, Any], clock: Clock, crops: Crops = "all") -> list[VisualTokens]:
        """Encode all images and videos of a call, images first, each in the order of its placeholders."""
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def placeholder(self, modality: Modality) -> int:
        """The token id that stands for a visual token in the prompt."""
        return int(getattr(self.config, f"{modality}_token_id"))

    def positions(self, inputs: dict[str, Any]) -> Tensor | None:
        """Position ids [..., B, S] of the prompt before pruning, where the family computes its own, otherwise None.

        Survivors then always keep theirs.
        """
        return None

    def image_arguments(self, encoded: Sequence[VisualTokens]) -> dict[str, Any]:
        """Arguments that `positions` reads, for images that come encoded already instead of as pixels."""
        return {}

    def outputs(self, kept: Sequence[KeptTokens], modality: Modality) -> Any:
        """What `mm_encoder_outputs` takes for what is kept of each image or video; a fresh object for each call."""
        return encoder_output([tokens.features for tokens in kept])

    def arrange(self, arguments: dict[str, Any], compaction: Compaction, positions: Tensor | None) -> None:
        """Set what else the family needs for a compacted prompt. `positions` are those that the survivors had."""
        if positions is not None:
            arguments["position_ids"] = positions

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        """The arguments that bring images, for some of the images alone."""
        names = (*self.pixel_arguments, *self.consumed)
        return {name: inputs[name][list(indices)] for name in names if isinstance(inputs.get(name), Tensor)}

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        """FLOPs of the tower and of the projector for one crop (or for an image of that grid), from the config."""
        raise NotImplementedError(f"{cls.__name__} does not count the FLOPs of its vision tower")

    def batch_images(self, images: Sequence[Any]) -> list[Any]:
        """Images of prompts with one image each, as the family's processor wants them."""
        return list(images)


def setting(config: Any, inputs: dict[str, Any], name: str) -> Any:
    """An argument of the call, or the model's configured value."""
    given = inputs.get(name)
    return getattr(config, name) if given is None else given


def encoder_output(features: Any) -> Any:
    """An encoder output that holds features and nothing else."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(pooler_output=features)


class TokenRows(Tensor):
    """Features [K, 1, D] of the images of all prompts, for models that ask for one tensor: images may keep different
    numbers of tokens.

    Beam search looks for the rows that belong to a prompt, and repeats them as a whole; transformers 5.18 would repeat
    each row for itself instead. Models call `to` before they use the features, and get a plain tensor.
    """

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
        return self.repeat(repeats, 1, 1)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor).to(*args, **kwargs)


def token_rows(kept: Sequence[KeptTokens]) -> Any:
    """An encoder output with the tokens of all images, one after the other."""
    rows = torch.cat([tokens.features for tokens in kept])[:, None]
    return encoder_output(rows.as_subclass(TokenRows))
