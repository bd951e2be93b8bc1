"""Base class for adapters: how a model family encodes its images, and where their tokens stand in the prompt."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from clustrs import validation
from clustrs.models.prompt import Compaction, PrunedImage, mismatch
from clustrs.models.scoring import Reduction, ScoreRecorder, StageTimer, record_scores
from clustrs.plugins import load_plugins
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops

Modality = Literal["image", "video"]
Chosen = Literal["compact", "original"]


@dataclass(frozen=True, kw_only=True)
class VisualTokens:
    """Visual tokens of one image or video before pruning; `on_grid` makes them for an image without newlines.

    Attributes:
        features: [M, D], the rows that the unpruned model reads (or the base crop's part of them).
        candidates: [N], indices of the rows that compete to be kept; newlines do not.
        scores: [N], the attention that each candidate gets in the vision tower.
        layout: Tile, row and column of each candidate.
        grids: Height and width of each tile in tokens. Tile 0 is the whole image, or the first frame.
        slots: Number of placeholders of the prompt that belong to the image.
        hidden: [N, H], hidden states of the tower, for methods that read them.
        keys: [N, K], keys of the scoring layer, mean over heads, for methods that read them.
        more: Further inputs of single methods by name (`clustrs.pruners.inputs.FURTHER`), [N] or [N, ...] each.
        cls_hidden: [tiles, 1 or 0, H], hidden states of the CLS tokens.
        cls_keys: [tiles, 1 or 0, K], their keys. Without both, the tower counts as one without CLS tokens.
        project: Maps hidden states [..., H] to features [..., D].
        planes: [L, M, D], features that later layers of the language model add (Qwen3-VL's deepstack features).
        places: [M], the placeholder that each row of `features` takes, counted within the image; by default in order.
        runs: [N], the run of placeholders of each candidate, where the prompt has text between tiles: none leaves it.
        modality: "image" or "video".
        columns: How many of the tiles after the first lie side by side, where the image's shape does not say it.
        sizes: [N], how many tokens each candidate stands for, where a selection was made before; None: itself.
        missing_states_reason: Why `hidden` or `keys` is None, for the error of a method that needs them.
    """

    features: Tensor
    candidates: Tensor
    scores: Tensor
    layout: Layout
    grids: list[tuple[int, int]]
    slots: int
    hidden: Tensor | None = None
    keys: Tensor | None = None
    more: dict[str, Tensor] = field(default_factory=dict)
    cls_hidden: Tensor | None = None
    cls_keys: Tensor | None = None
    project: Callable[[Tensor], Tensor] | None = None
    planes: Tensor | None = None
    places: Tensor = None  # type: ignore[assignment]
    runs: Tensor | None = None
    modality: Modality = "image"
    columns: int | None = None
    sizes: Tensor | None = None
    missing_states_reason: str = "the adapter of this family does not return them"

    def __post_init__(self) -> None:
        if self.places is None:
            object.__setattr__(self, "places", torch.arange(len(self.features), device=self.features.device))
        if self.modality == "video" and self.layout.frame is None:  # a tile of a video is a frame
            object.__setattr__(self, "layout", replace(self.layout, frame=self.layout.tile))

    @property
    def tokens(self) -> Tensor:
        """Features [N, D] of the candidates."""
        return self.features[self.candidates]

    @classmethod
    def on_grid(cls, features: Tensor, scores: Tensor, grid: tuple[int, int], **others: Any) -> Self:
        """Return tokens that stand in the prompt tile by tile and line by line.

        Args:
            features: [M, D], the rows that the unpruned model reads. Rows after the first N are not candidates.
            scores: [N], attention scores.
            grid: Height and width of a tile in tokens; there are N / (height * width) tiles.
            **others: Further fields, or other values for those that follow from these.
        """
        height, width = grid
        cell = torch.arange(len(scores), device=features.device)
        derived = {
            "candidates": cell,
            "layout": Layout(cell // (height * width), cell // width % height, cell % width),
            "grids": [grid] * (len(scores) // (height * width)),
            "slots": len(features),
        }
        return cls(features=features, scores=scores, **{**derived, **others})


@dataclass(frozen=True)
class Source:
    """An image or video that is not encoded yet: its placeholders in the prompt, and its frames."""

    modality: Modality
    slots: int
    frames: int = 1


@dataclass(frozen=True)
class PatchGrid:
    """Size of an image or video in patches, for families that take any size: for Qwen's, `image_grid_thw`.

    `padded` is the number of patches that the processor pads an image (or frame) to: rows of Gemma 4's `pixel_values`.
    """

    height: int
    width: int
    frames: int = 1
    padded: int | None = None

    def check(self, multiple: int) -> None:
        """Raise ValueError for sizes that no processor makes: sides are positive multiples of a number of patches."""
        for name in ("height", "width"):
            value, what = getattr(self, name), f"a positive multiple of {multiple} patches"
            validation.check(value >= 1 and value % multiple == 0, f"grid.{name}", what, value)
        validation.check(self.frames >= 1, "grid.frames", "at least 1", self.frames)


class Adapter:
    """Base class for model families; found by `config.model_type`, one object for each attached model.

    A subclass names its `model_types`, the `scoring_layer` and how images are encoded (`encode`); the rest is the same
    for all families whose prompt has one placeholder token for each visual token.

    Args:
        inner: The model without its language head (`model.model`).

    Attributes:
        model_types: Values of `config.model_type` that this adapter is for.
        pixel_arguments: Arguments of `forward` that hold images or videos.
        vision_kwargs: Further arguments that only the vision part reads; removed once images are encoded.
        first_position: First position id that `forward` assigns when it is given none.
        auto_positions: Positions that "auto" chooses. With each survivor's own, none is at a place the model never saw.
        has_planes: True if later layers of the language model add further features (`VisualTokens.planes`).
        nested_images: True if the processor takes a list of images for each prompt.
        one_tensor: True if the model asks for the features of all images in one tensor.
        takes_grid: True if images may have any size, so that `encode_blank` needs their grid of patches.
        written_text: Text that the processor writes before tiles or frames, which belongs to no question; a regular
            expression without spaces.
        tokens_per_image: Number of visual tokens of an image, for `clustrs models`, as are the following.
        tested: Tested features.
        takes_video: Support for videos: "yes", "no", or "frames as images".
        published_weights: Published checkpoint that the family was tested with: "no", or a checkpoint's id.
        gpu: GPU that the family was tested on: "no", or the device.
        records: Names of `FURTHER` inputs to record; whoever encodes sets them.

    Examples:
        A family with one crop of fixed size per image, as LLaVA-1.5 has it:

        >>> from clustrs.models.adapters.base import attention_layer, recorded, register_adapter
        >>> from clustrs.models.scoring import record_scores
        >>> class ToyAdapter(Adapter):
        ...     model_types = ("toy_llava",)
        ...
        ...     def scoring_layer(self):
        ...         return attention_layer(self.inner.vision_tower, -2)
        ...
        ...     def encode(self, inputs, timer, crops="all"):
        ...         with timer.time("vision"), record_scores(self.scoring_layer(), "cls", timer) as recorder:
        ...             out = self.inner.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True)
        ...         scores, keys = recorded(recorder)  # [images, N] and, CLS token first, [images, 1 + N, K]
        ...         grid = (int(scores.shape[1] ** 0.5),) * 2
        ...         parts = zip(out.pooler_output, scores, keys[:, 1:], keys[:, None, :1])
        ...         return [VisualTokens.on_grid(f, s, grid, keys=k, cls_keys=cls) for f, s, k, cls in parts]

        `@register_adapter` makes it known, or an entry point of the group `clustrs.adapters`.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    pixel_arguments: ClassVar[tuple[str, ...]] = ("pixel_values",)
    vision_kwargs: ClassVar[tuple[str, ...]] = ()
    first_position: ClassVar[int] = 0
    auto_positions: ClassVar[Chosen] = "original"
    has_planes: ClassVar[bool] = False
    nested_images: ClassVar[bool] = False
    one_tensor: ClassVar[bool] = False
    takes_grid: ClassVar[bool] = False
    written_text: ClassVar[str] = ""
    tokens_per_image: ClassVar[str] = "not stated"
    tested: ClassVar[str] = "not stated"
    takes_video: ClassVar[str] = "no"
    published_weights: ClassVar[str] = "no"
    gpu: ClassVar[str] = "no"
    records: Collection[str] = ()

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.config = inner.config

    def scoring_layer(self) -> Any:
        """Return the attention module whose output the projector reads; its attention scores the tokens."""
        raise NotImplementedError(f"{type(self).__name__} must define scoring_layer")

    def attention_layers(self) -> Sequence[Any]:
        """Return the attention modules of the tower by depth, None for those that do not see the whole image. Without
        any, methods that read further layers are refused."""
        return ()

    def hooked_layers(self) -> list[Any]:
        """Return the scoring layer and the further ones that `records` needs."""
        layer = self.scoring_layer()
        return list(dict.fromkeys([layer, *(one for one, _ in self._further(layer, "cls").values())]))

    def recording(
        self, layer: Any, reduction: Reduction, timer: StageTimer, valid: Tensor | None = None
    ) -> AbstractContextManager[ScoreRecorder]:
        """Record the scores of a layer, and what `records` names, until the block ends."""
        return record_scores(layer, reduction, timer, valid, self._further(layer, reduction))

    def _further(self, layer: Any, own: Reduction) -> dict[str, tuple[Any, Reduction]]:
        """Return the layer and reduction of each of `records`; of two equally near layers the deeper one."""
        layers, found = self.attention_layers(), {}
        usable = [depth for depth, one in enumerate(layers, 1) if one is not None]
        for name, (share, kind) in FURTHER_LAYERS.items() if usable else ():
            if name in self.records:
                at = round((share or 0) * len(layers))
                there = layer if share is None else layers[min(usable, key=lambda d: (abs(d - at), -d)) - 1]
                found[name] = there, own if kind is None or (kind == "joint" and own != "cls") else kind
        return found

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        """Encode the images and videos of a call.

        Args:
            inputs: Arguments of `forward` by name.
            timer: Times the stages "vision" and "scoring".
            crops: "base" encodes the whole image alone, where a family has crops.

        Returns:
            One `VisualTokens` for each image, then one for each video, in the order of their placeholders.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def placeholder(self, modality: Modality) -> int:
        """Return the token id that stands for a visual token in the prompt."""
        return int(getattr(self.config, f"{modality}_token_id"))

    def positions(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return position ids [..., B, S] of the prompt before pruning, which survivors keep; None: counted."""
        return None

    def image_arguments(self, encoded: Sequence[VisualTokens]) -> dict[str, Any]:
        """Return the arguments that `positions` reads, for images that are encoded already."""
        return {}

    def outputs(self, kept: Sequence[PrunedImage], modality: Modality) -> Any:
        """Return what `mm_encoder_outputs` takes for the pruned images or videos; a new object for each call."""
        features: Any = [tokens.features for tokens in kept]
        if self.one_tensor:
            features = torch.cat(features)[:, None].as_subclass(TokenRows)
        return BaseModelOutputWithPooling(pooler_output=features)

    def set_position_ids(self, arguments: dict[str, Any], compaction: Compaction, positions: Tensor | None) -> None:
        """Set `position_ids`, and what else the family needs, for a compacted prompt.

        Args:
            arguments: Arguments of the call, changed in place.
            compaction: How the prompt was compacted.
            positions: [..., B, W], the positions that the survivors had; None where they are counted.
        """
        if positions is not None:
            arguments["position_ids"] = positions

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        """Return the arguments that hold images, for some of the images alone."""
        names = (*self.pixel_arguments, *self.vision_kwargs)
        return {name: inputs[name][list(indices)] for name in names if isinstance(inputs.get(name), Tensor)}

    def image_sources(self, inputs: dict[str, Any]) -> list[Source]:
        """Return the images of a call, for `chunk` with scope="video"; here each has equally many placeholders."""
        slots, images = int((inputs["input_ids"] == self.placeholder("image")).sum()), len(inputs["pixel_values"])
        if slots % images:
            raise mismatch(slots, images)
        return [Source("image", slots // images)] * images

    def video_sources(self, inputs: dict[str, Any]) -> list[Source]:
        """Return the videos of a call, for `chunk`."""
        return []

    def take_frames(self, inputs: dict[str, Any], video: int, frames: slice) -> dict[str, Any]:
        """Return the arguments that hold videos, for some frames of one video alone."""
        raise NotImplementedError(f"{type(self).__name__} must define take_frames")

    def batch_images(self, images: Sequence[Any]) -> list[Any]:
        """Arrange the images of prompts with one image each as the family's processor takes them."""
        return [[image] for image in images] if self.nested_images else list(images)

    def projectors(self) -> list[nn.Module]:
        """Return the modules between vision tower and language model, for `count_cost`."""
        return [self.inner.multi_modal_projector]

    def encode_blank(self, grid: PatchGrid | None) -> None:
        """Run tower and projector on one blank crop, or on an image of that grid, on the meta device."""
        self.inner.get_image_features(blank_pixels(self.config.vision_config))


class TokenRows(Tensor):
    """Features [K, 1, D] of the images of all prompts, in one tensor: images may keep different numbers of tokens.

    Beam search repeats the rows of a prompt as a whole; transformers 5.18 would repeat each row for itself. Models call
    `to` before they use the features, and get a plain tensor.
    """

    def repeat_interleave(self, repeats: Any, dim: int | None = None, **_: Any) -> Tensor:
        return self.repeat(repeats, 1, 1)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_subclass(Tensor).to(*args, **kwargs)


FURTHER_LAYERS: dict[str, tuple[float | None, Reduction | None]] = {
    "received": (None, "received"),
    "object_scores": (9 / 24, "received"),
    "early_scores": (6 / 24, None),
    "joint_scores": (None, "joint"),
    "joint_keys": (None, "keys"),
}
"""Further inputs: the layer as a share of the depth (None: that of the scores), and what is recorded (None: scores)."""
Kind = TypeVar("Kind", bound=type[Adapter])

_adapters: dict[str, type[Adapter]] = {}
WITHOUT_TOWER = ("gemma4_unified",)
"""Model types that read pixels without a vision tower, so that no attention scores their tokens."""


def register_adapter(adapter: Kind) -> Kind:
    """Make an `Adapter` known for its `model_types`; a class decorator. The same module may register again."""
    for model_type in adapter.model_types:
        known = _adapters.get(model_type, adapter)
        if (known.__module__, known.__qualname__) != (adapter.__module__, adapter.__qualname__):
            owner = f"{known.__module__}.{known.__qualname__}"
            raise ValueError(f"model type {model_type!r} has an adapter already: {owner}")
        _adapters[model_type] = adapter
    return adapter


@cache
def _load_all() -> None:
    """Import our own adapters, then those of installed packages."""
    package = import_module("clustrs.models.adapters")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    load_plugins("clustrs.adapters", lambda found: register_adapter(found) if isinstance(found, type) else None)


def list_model_types() -> list[str]:
    """Return the model types that can be opened."""
    _load_all()
    return sorted(_adapters)


def adapter_class(model_type: str) -> type[Adapter]:
    """Return the adapter of a model type; the error names the known ones."""
    known = list_model_types()
    if model_type in _adapters:
        return _adapters[model_type]
    reason = f"{validation.nearest(model_type, known)}: known are {', '.join(known)}; for others use select(...)"
    if model_type in WITHOUT_TOWER:
        reason = ": it has no vision tower whose attention scores its tokens; use select(...) with scores of your own"
    raise ValueError(f"a model of type {model_type!r} is not supported{reason}")


def get_adapter(model: Any) -> Adapter:
    """Return an adapter for a loaded model, with or without its language head."""
    kind = adapter_class(getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__)
    return kind(getattr(model, "model", model))


HAS_CLS = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False}
"""Supported towers by `config.model_type`, and whether their first token is a CLS token."""


def has_cls(tower: Any) -> bool:
    """Return whether the first token of a tower is a CLS token; raise ValueError for an unknown tower."""
    kind = getattr(tower.config, "model_type", type(tower).__name__)
    if kind not in HAS_CLS:
        known = ", ".join(HAS_CLS)
        raise ValueError(f"vision tower {kind!r} is not supported: known are {known}; for others use select(...)")
    return HAS_CLS[kind]


def tower_layers(tower: Any) -> list[nn.Module]:
    encoder: Any = getattr(tower, "vision_model", tower).encoder
    blocks = encoder.layers if hasattr(encoder, "layers") else encoder.layer
    return [getattr(block, "self_attn", None) or block.attention for block in blocks]


def attention_layer(tower: Any, feature_layer: int) -> nn.Module:
    """Return the attention layer of the block whose output is `hidden_states[feature_layer]`."""
    layers = tower_layers(tower)
    index = feature_layer - 1 if feature_layer >= 0 else len(layers) + feature_layer
    if not 0 <= index < len(layers):
        raise ValueError(f"vision_feature_layer={feature_layer}: no layer of the {len(layers)} makes that output")
    return layers[index]


def recorded(recorder: ScoreRecorder) -> tuple[Tensor, Tensor]:
    """Return the scores and keys of the only call that was recorded."""
    if len(recorder.scores) != 1:
        name = type(recorder.layer).__name__
        raise ValueError(f"the attention of {name} was recorded {len(recorder.scores)} times, expected once")
    return recorder.scores[0], recorder.keys[0]


def recorded_more(recorder: ScoreRecorder) -> dict[str, Tensor]:
    """Return the further inputs [C, P, 1] or [C, P, H] of the only call, for patches alone."""
    patches = recorder.scores[0].shape[1]
    parts = {name: part[:, -patches:] for name, (part,) in recorder.more.items()}
    return {name: part if part.dim() == 3 else part.unsqueeze(-1) for name, part in parts.items()}


def split_more(more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return further inputs [N, F] of an image as methods take them: scores [N], keys [N, H]."""
    return {name: part if name == "joint_keys" else part.mean(-1) for name, part in more.items()}


def setting(config: Any, inputs: dict[str, Any], name: str) -> Any:
    """Return an argument of the call, or the model's configured value."""
    given = inputs.get(name)
    return getattr(config, name) if given is None else given


def present(inputs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: inputs[name] for name in names if inputs.get(name) is not None}


def required(inputs: dict[str, Any], name: str, partner: str) -> Any:
    """Return an argument that must come along with another."""
    if inputs.get(name) is None:
        raise ValueError(f"{name} is missing, expected it with {partner}, as the processor returns them")
    return inputs[name]


def blank_pixels(config: Any) -> Tensor:
    """Return pixels [1, 3, H, W] of one crop on the meta device; takes the config of the vision tower."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(1, config.num_channels, height, width, device="meta")
