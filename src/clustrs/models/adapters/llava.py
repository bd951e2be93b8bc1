"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: one crop, or a base crop and a grid of crops with newlines; videos.

The model's own code packs the crops of an image: unpads, scales down, adds newlines. Scores, hidden states, keys and
the places of the tokens are packed by the same code, as further channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs import validation
from clustrs.models.adapters import base
from clustrs.models.adapters.base import (
    Adapter,
    Chosen,
    Modality,
    PatchGrid,
    Source,
    VisualTokens,
    has_cls,
    register_adapter,
)
from clustrs.models.prompt import mismatch
from clustrs.models.scoring import Reduction, ScoreRecorder, StageTimer
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@dataclass(frozen=True)
class EncodedCrops:
    """Scores [C, P], hidden states and keys of all crops, the CLS token apart; further inputs [C, P, ...]."""

    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    side: int
    more: dict[str, Tensor]

    def states(self, start: int, crops: int, channels: Tensor | None = None) -> dict[str, Any]:
        """Return states and further inputs of an image's crops, or what packing made of them (`channels`)."""
        some, maps = slice(start, start + crops), (self.hidden, self.keys, *self.more.values())
        if channels is None:
            hidden, keys, *more = (part[some].flatten(0, 1) for part in maps)
        else:
            hidden, keys, *more = channels[:, FIXED:].split([part.shape[-1] for part in maps], -1)
            hidden = hidden.to(self.hidden.dtype)
        further = base.split_more(dict(zip(self.more, more, strict=True)))
        cls = {"cls_hidden": self.cls_hidden[some], "cls_keys": self.cls_keys[some]}
        return {"hidden": hidden, "keys": keys, "more": further, **cls}


@register_adapter
class LlavaAdapter(Adapter):
    """LLaVA-1.5, with a CLIP, SigLIP or DINOv2 tower."""

    model_types = ("llava",)
    auto_positions: ClassVar[Chosen] = "original"  # every image had 576 tokens in training; measured on photo-llava
    tokens_per_image = "576 (CLIP ViT-L/14 at 336 px)"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches"
    feature_arguments: ClassVar[tuple[str, ...]] = ("vision_feature_layer", "vision_feature_select_strategy")
    vision_kwargs = ("image_sizes", *feature_arguments)

    def scoring_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        return base.attention_layer(self.inner.vision_tower, self.feature_layers(inputs or {})[-1])

    def feature_layers(self, inputs: dict[str, Any]) -> list[int]:
        """Return the hidden states that the projector reads, side by side."""
        layer = base.setting(self.config, inputs, "vision_feature_layer")
        return [layer] if isinstance(layer, int) else list(layer)

    def check(self, inputs: dict[str, Any]) -> bool:
        """Return whether the tower has a CLS token; raise ValueError if the projector would read it."""
        cls = has_cls(self.inner.vision_tower)
        strategy = base.setting(self.config, inputs, "vision_feature_select_strategy")
        what = f"{'default' if cls else 'full'!r} for this tower"
        validation.check((strategy == "default") == cls, "vision_feature_select_strategy", what, strategy)
        return cls

    def record(self, inputs: dict[str, Any], timer: StageTimer) -> Any:
        reduction: Reduction = "cls" if has_cls(self.inner.vision_tower) else "received"
        return self.recording(self.scoring_layer(inputs), reduction, timer)

    def attention_layers(self) -> Any:
        return base.tower_layers(self.inner.vision_tower)

    def run_tower(self, pixels: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return the features [C, P, D] of crops, and all hidden states of the tower."""
        states = self.inner.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        first = int(base.setting(self.config, inputs, "vision_feature_select_strategy") == "default")
        read = torch.cat([states[i][:, first:] for i in self.feature_layers(inputs)], -1)
        return self.inner.multi_modal_projector(read), states

    def crops(self, inputs: dict[str, Any], hidden_states: Any, recorder: ScoreRecorder) -> EncodedCrops:
        scores, keys = base.recorded(recorder)
        hidden = torch.cat([hidden_states[i] for i in self.feature_layers(inputs)], -1)
        first = int(has_cls(self.inner.vision_tower))
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        (cls_hidden, patches), (cls_keys, keys) = (part.tensor_split([first], 1) for part in (hidden, keys))
        return EncodedCrops(scores, patches, keys, cls_hidden, cls_keys, side, base.recorded_more(recorder))

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        self.check(inputs)
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            out = self.get_features(inputs)
        with timer.time("scoring"):
            encoded = self.crops(inputs, out.hidden_states, recorder)
            return [self.image(features, encoded, i) for i, features in enumerate(out.pooler_output)]

    def get_features(self, inputs: dict[str, Any], **others: Any) -> Any:
        given = base.present(inputs, self.feature_arguments)
        return self.inner.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True, **given, **others)

    def image(self, features: Tensor, encoded: EncodedCrops, index: int, **others: Any) -> VisualTokens:
        """Return an image of one crop, the `index`-th of those encoded; `others` has what is different for several."""
        known = {"scores": encoded.scores[index], "grid": (encoded.side, encoded.side), **encoded.states(index, 1)}
        return VisualTokens.on_grid(features, project=self.inner.multi_modal_projector, **{**known, **others})

    def encode_blank(self, grid: PatchGrid | None) -> None:
        self.run_tower(base.blank_pixels(self.config.vision_config), {})


REAL, BASE, Y, X, SCORE = range(5)
"""Channels before the hidden states and keys: a token or a newline, of the base crop or not, its place, its score."""
FIXED = 5


@register_adapter
class LlavaNextAdapter(LlavaAdapter):
    """LLaVA-NeXT."""

    model_types = ("llava_next",)
    auto_positions = "compact"  # trained on prompts of many lengths; measured on mini-onevision
    tokens_per_image = "576 per crop, without padding"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches, crops"
    vision_kwargs = (*LlavaAdapter.vision_kwargs, "batch_num_images")
    packing_argument: ClassVar[str] = "vision_feature_select_strategy"
    """Argument of a call that the model's own packing takes."""

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        if inputs.get("pixel_values") is None:
            return []
        self.check(inputs)
        sizes = base.required(inputs, "image_sizes", "pixel_values")
        counts, columns = zip(*self.crop_grids(inputs), strict=True)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            if crops == "base":  # the base crops alone go through the tower
                pixels = inputs["pixel_values"]
                features, hidden_states = self.run_tower(pixels[starts] if pixels.dim() == 4 else pixels[:, 0], inputs)
            else:
                out = self.get_features(inputs, image_sizes=sizes)
                features, hidden_states = out.pooler_output, out.hidden_states
        with timer.time("scoring"), torch.no_grad():
            encoded = self.crops(inputs, hidden_states, recorder)
            if crops == "base":
                shapes = [encoded.scores.new_zeros(count, encoded.side**2, 1) for count in counts]
                lengths = map(len, self.packed(shapes, 0, inputs))
                return [self.image(features[i], encoded, i, slots=n) for i, n in enumerate(lengths)]
            crop_grids = list(zip(counts, columns, starts, strict=True))
            packed = self.packed([channel_map(encoded, *image) for image in crop_grids], -1, inputs)
            images = []
            for some, channels, (count, across, start) in zip(features, packed, crop_grids, strict=True):
                candidates, layout, scores = unpack_channels(channels, encoded.side, across)
                others = {"candidates": candidates, "layout": layout, "scores": scores, "columns": across}
                others |= {"grids": [(encoded.side, encoded.side)] * count, "slots": len(channels)}
                others |= encoded.states(start, count, channels[candidates])
                images.append(self.image(some, encoded, start, **others))
            return images

    def packed(self, crops: list[Tensor], newline: float, inputs: dict[str, Any]) -> list[Tensor]:
        """Pack channels [crops, P, C] of each image by the model's own code, to [M, C]."""
        name, row = self.packing_argument, crops[0].new_full((crops[0].shape[-1],), newline)
        option = {name: inputs.get(name) or getattr(self.config, name)}
        return self.inner.pack_image_features(crops, inputs["image_sizes"], image_newline=row, **option)[0]

    def image_sources(self, inputs: dict[str, Any]) -> list[Source]:
        raise ValueError(f"chunk must be None for frames as images of a {self.config.model_type} model, with crops")

    def crop_grids(self, inputs: dict[str, Any]) -> list[tuple[int, int]]:
        """Return for each image the number of crops, and how many of those after the base lie side by side."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        pinpoints, side = self.config.image_grid_pinpoints, self.config.vision_config.image_size
        shapes = [get_anyres_image_grid_shape(size, pinpoints, side) for size in inputs["image_sizes"]]
        return [(1 + rows * columns, columns) for rows, columns in shapes]


@register_adapter
class LlavaOnevisionAdapter(LlavaNextAdapter):
    """LLaVA-OneVision: several images in a prompt have a base crop each and nothing else; videos are pooled."""

    model_types = ("llava_onevision",)
    tokens_per_image = "729 per crop, without padding; 196 per frame"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches, crops, video"
    takes_video = "yes"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    vision_kwargs = (*LlavaNextAdapter.vision_kwargs, "image_sizes_videos", "vision_aspect_ratio")
    feature_arguments = (*LlavaNextAdapter.feature_arguments, "batch_num_images", "vision_aspect_ratio")
    packing_argument = "vision_aspect_ratio"
    nested_images = True

    def crop_grids(self, inputs: dict[str, Any]) -> list[tuple[int, int]]:
        grids = super().crop_grids(inputs)
        if inputs.get("batch_num_images") is None:
            return grids
        together = [int(n) for n in inputs["batch_num_images"] for _ in range(int(n))]
        return [grid if n == 1 else (1, 1) for grid, n in zip(grids, together, strict=True)]

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        """Encode images, then videos: pooled frames, each a tile, and one newline at the end."""
        images, pixels = super().encode(inputs, timer, crops), inputs.get("pixel_values_videos")
        if pixels is None:
            return images
        self.check(inputs)
        given = base.present(inputs, LlavaAdapter.feature_arguments)
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            out = self.inner.get_video_features(pixels, return_dict=True, **given)
        with timer.time("scoring"), torch.no_grad():
            encoded, frames = self.crops(inputs, out.hidden_states, recorder), pixels.shape[1]
            for i, features in enumerate(out.pooler_output):
                pooled = self.inner.apply_pooling(channel_map(encoded, frames, 1, i * frames))
                side, flat = int(pooled.shape[1] ** 0.5), pooled.flatten(0, 1)
                others = {"scores": flat[:, SCORE], "grid": (side, side), **encoded.states(i * frames, frames, flat)}
                images.append(self.image(features, encoded, i * frames, modality="video", **others))
            return images

    def video_sources(self, inputs: dict[str, Any]) -> list[Source]:
        pixels = inputs.get("pixel_values_videos")
        if pixels is None:
            return []
        slots = int((inputs["input_ids"] == self.placeholder("video")).sum())
        if slots % len(pixels):
            raise mismatch(slots, len(pixels))
        return [Source("video", slots // len(pixels), pixels.shape[1])] * len(pixels)

    def take_frames(self, inputs: dict[str, Any], video: int, frames: slice) -> dict[str, Any]:
        return {"pixel_values_videos": inputs["pixel_values_videos"][video : video + 1, frames]}

    def outputs(self, kept: Any, modality: Modality) -> Any:
        out = super().outputs(kept, modality)
        if modality == "video":  # the model wants one tensor
            rows = out.pooler_output
            alike = len({len(video) for video in rows}) == 1
            out.pooler_output = torch.stack(rows) if alike else torch.cat(rows)[None]
        return out


def channel_map(encoded: EncodedCrops, crops: int, columns: int, start: int) -> Tensor:
    """Return channels [crops, side * side, ...] of one image, with places in the grid of crops, to be packed."""
    side, stop = encoded.side, start + crops
    cell = torch.arange(side * side, device=encoded.scores.device)
    crop = torch.arange(crops, device=cell.device)[:, None]
    tile = (crop - 1).clamp(min=0)
    y = cell // side + (tile // columns) * side
    x = cell % side + (tile % columns) * side
    fixed = torch.stack([torch.ones_like(y), (crop == 0).expand_as(y), y, x], -1).float()
    maps = (encoded.scores[..., None], encoded.hidden, encoded.keys, *encoded.more.values())
    return torch.cat([fixed, *(part[start:stop].float() for part in maps)], -1)


def unpack_channels(packed: Tensor, side: int, columns: int) -> tuple[Tensor, Layout, Tensor]:
    """Return the indices of packed rows [M, ...] that are tokens, their layout and scores. Tile 0 is the base crop."""
    candidates = (packed[:, REAL] > 0).nonzero()[:, 0]
    real = packed[candidates]
    base = real[:, BASE] > 0.5
    y, x = real[:, Y].round().long(), real[:, X].round().long()
    tile = torch.where(base, 0, 1 + (y // side) * columns + x // side)
    layout = Layout(tile, torch.where(base, y, y % side), torch.where(base, x, x % side))
    return candidates, layout, real[:, SCORE]
