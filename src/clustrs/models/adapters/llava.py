"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: one crop, or a base crop and a grid of crops with newlines; videos.

The model's own code packs the crops of an image: unpads, scales down, adds newlines. Scores, hidden states, keys and
the places of the tokens are packed by the same code, as further channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models import scoring
from clustrs.models.adapters.base import (
    Adapter,
    Modality,
    PatchGrid,
    VisualTokens,
    attention_layer,
    blank_pixels,
    has_cls,
    recorded,
    reduction,
    register_adapter,
    setting,
)
from clustrs.models.scoring import StageTimer
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@dataclass(frozen=True)
class EncodedCrops:
    """Scores [C, P], hidden states and keys of all crops, the CLS token apart."""

    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    side: int


@register_adapter
class LlavaAdapter(Adapter):
    """LLaVA-1.5, with a CLIP, SigLIP or DINOv2 tower."""

    model_types = ("llava",)
    auto_positions = "original"  # every image had 576 tokens in training; measured on mini-llava and photo-llava
    tokens_per_image = "576 (CLIP ViT-L/14 at 336 px)"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches"
    vision_kwargs: ClassVar[tuple[str, ...]] = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy")
    feature_arguments: ClassVar[tuple[str, ...]] = ("vision_feature_layer", "vision_feature_select_strategy")

    def scoring_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        return attention_layer(self.inner.vision_tower, self.feature_layers(inputs or {})[-1])

    def feature_layers(self, inputs: dict[str, Any]) -> list[int]:
        """The hidden states that the projector reads, side by side."""
        layer = setting(self.config, inputs, "vision_feature_layer")
        return [layer] if isinstance(layer, int) else list(layer)

    def given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the call that the model's own encoding takes."""
        return {name: inputs[name] for name in self.feature_arguments if inputs.get(name) is not None}

    def check(self, inputs: dict[str, Any]) -> bool:
        """Return whether the tower has a CLS token; raise ValueError if the projector would read it."""
        cls = has_cls(self.inner.vision_tower)
        strategy = setting(self.config, inputs, "vision_feature_select_strategy")
        if (strategy == "default") != cls:
            other = "default" if cls else "full"
            raise ValueError(f"vision_feature_select_strategy must be {other!r} for this tower, got {strategy!r}")
        return cls

    def crops(self, inputs: dict[str, Any], hidden_states: Any, recorder: scoring.ScoreRecorder) -> EncodedCrops:
        """Scores, hidden states and keys of all crops."""
        scores, keys = recorded(recorder)
        hidden = torch.cat([hidden_states[i] for i in self.feature_layers(inputs)], -1)
        first = int(has_cls(self.inner.vision_tower))
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        return EncodedCrops(scores, hidden[:, first:], keys[:, first:], hidden[:, :first], keys[:, :first], side)

    def record(self, inputs: dict[str, Any], timer: StageTimer) -> Any:
        return scoring.record_scores(self.scoring_layer(inputs), reduction(self.inner.vision_tower), timer)

    def encode_blank(self, grid: PatchGrid | None) -> None:
        tower = self.inner.vision_tower
        states = tower(blank_pixels(self.config.vision_config), output_hidden_states=True).hidden_states
        first = int(self.config.vision_feature_select_strategy == "default")
        self.inner.multi_modal_projector(torch.cat([states[i][:, first:] for i in self.feature_layers({})], -1))

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        self.check(inputs)
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            out = self.inner.get_image_features(
                pixel_values=inputs["pixel_values"], return_dict=True, **self.given(inputs)
            )
        with timer.time("scoring"):
            encoded = self.crops(inputs, out.hidden_states, recorder)
            return [self.single_crop(features, encoded, i) for i, features in enumerate(out.pooler_output)]

    def single_crop(
        self, features: Tensor, encoded: EncodedCrops, index: int, slots: int | None = None
    ) -> VisualTokens:
        """An image of one crop, the `index`-th of those encoded."""
        cell = torch.arange(len(features), device=features.device)
        side = encoded.side
        return VisualTokens(
            features=features,
            candidates=cell,
            scores=encoded.scores[index],
            layout=Layout(torch.zeros_like(cell), cell // side, cell % side),
            grids=[(side, side)],
            slots=len(features) if slots is None else slots,
            hidden=encoded.hidden[index],
            keys=encoded.keys[index],
            cls_hidden=encoded.cls_hidden[index : index + 1],
            cls_keys=encoded.cls_keys[index : index + 1],
            project=self.inner.multi_modal_projector,
        )


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
    vision_kwargs: ClassVar[tuple[str, ...]] = (*LlavaAdapter.vision_kwargs, "batch_num_images")

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        if inputs.get("pixel_values") is None:
            return []
        self.check(inputs)
        if inputs.get("image_sizes") is None:
            raise ValueError("image_sizes is missing, expected it with pixel_values, as the processor returns them")
        counts = self.crop_counts(inputs)
        return self.base_crops(inputs, counts, timer) if crops == "base" else self.all_crops(inputs, counts, timer)

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        """Return the number of crops of each image."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        pinpoints, side = self.config.image_grid_pinpoints, self.config.vision_config.image_size
        return [image_size_to_num_patches(size, pinpoints, side) for size in inputs["image_sizes"]]

    def packing(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model's own packing."""
        strategy = inputs.get("vision_feature_select_strategy") or self.config.vision_feature_select_strategy
        return {"vision_feature_select_strategy": strategy}

    def all_crops(self, inputs: dict[str, Any], counts: list[int], timer: StageTimer) -> list[VisualTokens]:
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            out = self.inner.get_image_features(
                pixel_values=inputs["pixel_values"],
                image_sizes=inputs["image_sizes"],
                return_dict=True,
                **self.given(inputs),
            )
        with timer.time("scoring"), torch.no_grad():
            encoded = self.crops(inputs, out.hidden_states, recorder)
            columns = [self.grid_columns(size, n) for size, n in zip(inputs["image_sizes"], counts, strict=True)]
            starts = [sum(counts[:i]) for i in range(len(counts))]
            channels = [channel_map(encoded, n, c, s) for n, c, s in zip(counts, columns, starts, strict=True)]
            newline = channels[0].new_full((channels[0].shape[-1],), -1)
            packed, _ = self.inner.pack_image_features(
                channels, inputs["image_sizes"], image_newline=newline, **self.packing(inputs)
            )
            parts = zip(packed, out.pooler_output, counts, columns, starts, strict=True)
            return [self.unpack(p, features, encoded, n, c, s) for p, features, n, c, s in parts]

    def unpack(
        self, packed: Tensor, features: Tensor, encoded: EncodedCrops, crops: int, columns: int, start: int
    ) -> VisualTokens:
        """One image from its packed channels [M, ...]; its tiles are the base crop and the grid's crops."""
        side, width = encoded.side, encoded.hidden.shape[-1]
        candidates, layout, scores = unpack_channels(packed, side, columns)
        real = packed[candidates]
        return VisualTokens(
            features=features,
            candidates=candidates,
            scores=scores,
            layout=layout,
            grids=[(side, side)] * crops,
            slots=len(packed),
            hidden=real[:, FIXED : FIXED + width].to(encoded.hidden.dtype),
            keys=real[:, FIXED + width :],
            cls_hidden=encoded.cls_hidden[start : start + crops],
            cls_keys=encoded.cls_keys[start : start + crops],
            project=self.inner.multi_modal_projector,
            columns=columns,
        )

    def base_crops(self, inputs: dict[str, Any], counts: list[int], timer: StageTimer) -> list[VisualTokens]:
        """The base crops alone go through the tower."""
        pixels = inputs["pixel_values"]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        pixels = pixels[starts] if pixels.dim() == 4 else pixels[:, 0]
        tower = self.inner.vision_tower
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            hidden_states = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
            first = int(has_cls(tower))
            read = [hidden_states[i][:, first:] for i in self.feature_layers(inputs)]
            features = self.inner.multi_modal_projector(torch.cat(read, -1))
        with timer.time("scoring"), torch.no_grad():
            encoded = self.crops(inputs, hidden_states, recorder)
            shapes = [encoded.scores.new_zeros(count, encoded.side**2, 1) for count in counts]
            _, lengths = self.inner.pack_image_features(
                shapes, inputs["image_sizes"], image_newline=encoded.scores.new_zeros(1), **self.packing(inputs)
            )
            return [self.single_crop(features[i], encoded, i, int(n)) for i, n in enumerate(lengths)]

    def grid_columns(self, image_size: Any, crops: int) -> int:
        """Return how many crops lie side by side in an image of some height and width."""
        if crops == 1:
            return 1
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        pinpoints, side = self.config.image_grid_pinpoints, self.config.vision_config.image_size
        return int(get_anyres_image_grid_shape(image_size, pinpoints, side)[1])


@register_adapter
class LlavaOnevisionAdapter(LlavaNextAdapter):
    """LLaVA-OneVision: several images in a prompt have a base crop each and nothing else; videos are pooled."""

    model_types = ("llava_onevision",)
    tokens_per_image = "729 per crop, without padding; 196 per frame"
    tested = "CLIP, SigLIP and DINOv2 towers; several images, batches, crops, video"
    takes_video = "yes"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    vision_kwargs: ClassVar[tuple[str, ...]] = (
        *LlavaNextAdapter.vision_kwargs,
        "image_sizes_videos",
        "vision_aspect_ratio",
    )
    feature_arguments: ClassVar[tuple[str, ...]] = (
        *LlavaNextAdapter.feature_arguments,
        "batch_num_images",
        "vision_aspect_ratio",
    )

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        counts = super().crop_counts(inputs)
        if inputs.get("batch_num_images") is None:
            return counts
        together = [int(n) for n in inputs["batch_num_images"] for _ in range(int(n))]
        return [count if n == 1 else 1 for count, n in zip(counts, together, strict=True)]

    def packing(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"vision_aspect_ratio": inputs.get("vision_aspect_ratio") or self.config.vision_aspect_ratio}

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        images = super().encode(inputs, timer, crops)
        return images if inputs.get("pixel_values_videos") is None else images + self.videos(inputs, timer)

    def videos(self, inputs: dict[str, Any], timer: StageTimer) -> list[VisualTokens]:
        """Pooled frames, one newline at the end; a frame stands as a tile.

        Pooling mixes places, so these are counted anew; scores, hidden states and keys are pooled as the features are.
        """
        pixels = inputs["pixel_values_videos"]
        self.check(inputs)
        given = {name: value for name, value in self.given(inputs).items() if name in LlavaAdapter.feature_arguments}
        with timer.time("vision"), self.record(inputs, timer) as recorder:
            out = self.inner.get_video_features(pixels, return_dict=True, **given)
        with timer.time("scoring"), torch.no_grad():
            encoded = self.crops(inputs, out.hidden_states, recorder)
            count, frames = pixels.shape[:2]
            return [self.video(out.pooler_output[i], encoded, frames, i * frames) for i in range(count)]

    def video(self, features: Tensor, encoded: EncodedCrops, frames: int, start: int) -> VisualTokens:
        pooled = self.inner.apply_pooling(channel_map(encoded, frames, 1, start))
        cells, width = pooled.shape[1], encoded.hidden.shape[-1]
        side = int(cells**0.5)
        index = torch.arange(frames * cells, device=pooled.device)
        flat = pooled.flatten(0, 1)
        return VisualTokens(
            features=features,
            candidates=index,
            scores=flat[:, SCORE],
            layout=Layout(index // cells, index % cells // side, index % side),
            grids=[(side, side)] * frames,
            slots=len(features),
            hidden=flat[:, FIXED : FIXED + width].to(encoded.hidden.dtype),
            keys=flat[:, FIXED + width :],
            cls_hidden=encoded.cls_hidden[start : start + frames],
            cls_keys=encoded.cls_keys[start : start + frames],
            project=self.inner.multi_modal_projector,
            modality="video",
        )

    def outputs(self, kept: Any, modality: Modality) -> Any:
        out = super().outputs(kept, modality)
        if modality == "video":  # the model wants one tensor
            lengths = {len(video) for video in out.pooler_output}
            out.pooler_output = (
                torch.stack(out.pooler_output) if len(lengths) == 1 else torch.cat(out.pooler_output)[None]
            )
        return out

    def batch_images(self, images: Any) -> list[Any]:
        return [[image] for image in images]


def channel_map(encoded: EncodedCrops, crops: int, columns: int, start: int) -> Tensor:
    """Channels [crops, side * side, ...] of one image, to be packed as its features are.

    Crop 0 is the base; the others lie in a grid of `columns`, and have their places in that grid's coordinates.
    """
    side, stop = encoded.side, start + crops
    cell = torch.arange(side * side, device=encoded.scores.device)
    crop = torch.arange(crops, device=cell.device)[:, None]
    tile = (crop - 1).clamp(min=0)
    y = cell // side + (tile // columns) * side
    x = cell % side + (tile % columns) * side
    fixed = torch.stack([torch.ones_like(y), (crop == 0).expand_as(y), y, x], -1).float()
    scores, hidden, keys = (part[start:stop].float() for part in (encoded.scores, encoded.hidden, encoded.keys))
    return torch.cat([fixed, scores[..., None], hidden, keys], -1)


def unpack_channels(packed: Tensor, side: int, columns: int) -> tuple[Tensor, Layout, Tensor]:
    """Return the indices of packed rows [M, ...] that are tokens, their layout and scores. Tile 0 is the base crop."""
    candidates = (packed[:, REAL] > 0).nonzero()[:, 0]
    real = packed[candidates]
    base = real[:, BASE] > 0.5
    y, x = real[:, Y].round().long(), real[:, X].round().long()
    tile = torch.where(base, 0, 1 + (y // side) * columns + x // side)
    layout = Layout(tile, torch.where(base, y, y % side), torch.where(base, x, x % side))
    return candidates, layout, real[:, SCORE]
