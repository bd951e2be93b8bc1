"""Qwen's vision-language models: images and videos of any size, merged patches, positions with three axes (M-RoPE).

A visual token is a block of 2 x 2 patches that the merger joins, so a patch-wise quantity is pooled over blocks: scores
and keys as means, hidden states side by side, as the merger reads them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models.adapters.base import (
    Adapter,
    Modality,
    PatchGrid,
    Source,
    VisualTokens,
    present,
    register_adapter,
    required,
)
from clustrs.models.prompt import Compaction, PrunedImage, wrong_shape
from clustrs.models.scoring import StageTimer
from clustrs.validation import Crops

SOURCES: tuple[tuple[Modality, str, str], ...] = (
    ("image", "pixel_values", "image_grid_thw"),
    ("video", "pixel_values_videos", "video_grid_thw"),
)
"""Arguments of images and videos: the patches of all of them, and frames, height and width of each in patches."""


@register_adapter
class Qwen2VLAdapter(Adapter):
    """Qwen2-VL, and what all of Qwen's families share. A frame of a video is a tile; all frames share one budget."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    tokens_per_image = "one per 28 x 28 pixels"
    tested = "several images, batches, video"
    takes_video = "yes"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    vision_kwargs = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    takes_grid = True
    auto_positions = "original"  # M-RoPE: a position says where in the image a token lies

    @property
    def unit(self) -> int:
        """Number of patches of a token."""
        return int(self.inner.visual.spatial_merge_size) ** 2

    def scoring_layer(self) -> Any:
        return self.inner.visual.blocks[-1].attn

    def attention_layers(self) -> Any:
        return [block.attn for block in self.inner.visual.blocks]

    def given(self, inputs: dict[str, Any]) -> list[tuple[Modality, Tensor, Tensor]]:
        return [
            (modality, inputs[pixels], required(inputs, grids, pixels))
            for modality, pixels, grids in SOURCES
            if inputs.get(pixels) is not None
        ]

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        images, side = [], self.inner.visual.spatial_merge_size
        for modality, pixels, grids in self.given(inputs):
            encode = self.inner.get_image_features if modality == "image" else self.inner.get_video_features
            with timer.time("vision"), self.recording(self.scoring_layer(), "received", timer) as recorder:
                out = encode(pixels, grids, return_dict=True)
            with timer.time("scoring"):
                scores, keys, *further = (
                    torch.cat(parts, 1)[0].unflatten(0, (-1, self.unit)).mean(1)
                    for parts in (recorder.scores, recorder.keys, *recorder.more.values())
                )
                hidden = out.last_hidden_state.unflatten(0, (-1, self.unit)).flatten(1)
                counts = [len(features) for features in out.pooler_output]
                maps = (part.split(counts) for part in (scores, keys, hidden, *further))
                parts = zip(grids.tolist(), *maps, strict=True)
                deepstack = getattr(out, "deepstack_features", None)
                for i, ((_, height, width), score, key, state, *own) in enumerate(parts):
                    planes = torch.stack([plane[i] for plane in deepstack]) if deepstack else None
                    more = dict(zip(recorder.more, own, strict=True))
                    others = {"keys": key, "hidden": state, "planes": planes, "modality": modality, "more": more}
                    grid = (height // side, width // side)
                    image = VisualTokens.on_grid(out.pooler_output[i], score, grid, project=self.project, **others)
                    images.append(self.in_prompt_order(image))
        return images

    def in_prompt_order(self, image: VisualTokens) -> VisualTokens:
        """Return an image whose scores, keys and hidden states were in the order of the tower."""
        return image

    def project(self, hidden: Tensor) -> Tensor:
        patches = hidden.reshape(-1, hidden.shape[-1] // self.unit)
        return self.inner.visual.merger(patches).reshape(*hidden.shape[:-1], -1)

    def projectors(self) -> list[nn.Module]:
        visual = self.inner.visual
        return [visual.merger, *getattr(visual, "deepstack_merger_list", ())]

    def encode_blank(self, grid: PatchGrid | None) -> None:
        assert grid is not None
        vision = self.config.vision_config
        grid.check(vision.spatial_merge_size)
        what = f"None for a {self.config.model_type} model, which pads nothing"
        validation.check(grid.padded is None, "grid.padded", what, grid.padded)
        size = grid.frames * grid.height * grid.width
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        sizes = torch.tensor([[grid.frames, grid.height, grid.width]])
        self.inner.visual(torch.zeros(size, width, device="meta"), grid_thw=sizes)

    def image_arguments(self, encoded: Sequence[VisualTokens]) -> dict[str, Any]:
        side, arguments = self.inner.visual.spatial_merge_size, {}
        for modality, _, grid in SOURCES:
            images = [image for image in encoded if image.modality == modality]
            if images:
                sizes = [(len(image.grids), *(side * n for n in image.grids[0])) for image in images]
                arguments[grid] = torch.tensor(sizes, device=images[0].features.device)
        return arguments

    def positions(self, inputs: dict[str, Any]) -> Tensor | None:
        """Positions [3, B, S] (time, height, width), as the model counts them for the prompt before pruning."""
        self.given(inputs)
        ids, types = inputs["input_ids"], inputs.get("mm_token_type_ids")
        if types is None:
            types = (ids == self.config.image_token_id).long() + 2 * (ids == self.config.video_token_id)
        elif types.shape != ids.shape:
            raise wrong_shape("mm_token_type_ids", types, ids.shape)
        given = present(inputs, ("attention_mask", *self.vision_kwargs))
        return self.inner.get_rope_index(ids, mm_token_type_ids=types, **given)[0]

    def set_position_ids(self, arguments: dict[str, Any], compaction: Compaction, positions: Tensor | None) -> None:
        if positions is not None:  # a row in front counts tokens: the model reads gaps in it as the start of a prompt
            counted = (compaction.mask.long().cumsum(-1) - 1).clamp(min=0)
            arguments["position_ids"] = torch.cat([counted[None].to(positions), positions])

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        grids = required(inputs, "image_grid_thw", "pixel_values")
        patches = inputs["pixel_values"].split(grids.prod(-1).tolist())
        return {"pixel_values": torch.cat([patches[i] for i in indices]), "image_grid_thw": grids[list(indices)]}

    def image_sources(self, inputs: dict[str, Any]) -> list[Source]:
        return self._sources(inputs, "image")

    def video_sources(self, inputs: dict[str, Any]) -> list[Source]:
        return self._sources(inputs, "video")

    def _sources(self, inputs: dict[str, Any], wanted: Modality) -> list[Source]:
        given = (grids.tolist() for modality, _, grids in self.given(inputs) if modality == wanted)
        return [Source(wanted, t * height * width // self.unit, t) for sizes in given for t, height, width in sizes]

    def take_frames(self, inputs: dict[str, Any], video: int, frames: slice) -> dict[str, Any]:
        grids = inputs["video_grid_thw"]
        own = (
            inputs["pixel_values_videos"].split(grids.prod(-1).tolist())[video].unflatten(0, (int(grids[video, 0]), -1))
        )
        grid = torch.tensor([[len(own[frames]), *grids[video, 1:]]], device=grids.device)
        return {"pixel_values_videos": own[frames].flatten(0, 1), "video_grid_thw": grid}


@register_adapter
class Qwen25VLAdapter(Qwen2VLAdapter):
    """Qwen2.5-VL: most blocks of the tower attend within windows, and it has the tokens of a window side by side."""

    model_types = ("qwen2_5_vl",)

    def scoring_layer(self) -> Any:
        full = [layer for layer in self.attention_layers() if layer is not None]
        if not full:
            raise ValueError("vision_config.fullatt_block_indexes names no block of the tower: none attends in full")
        return full[-1]

    def attention_layers(self) -> Any:
        full = self.config.vision_config.fullatt_block_indexes
        return [block.attn if i in full else None for i, block in enumerate(self.inner.visual.blocks)]

    def in_prompt_order(self, image: VisualTokens) -> VisualTokens:
        """The tower's order is frame by frame, window by window, and raster order in each window."""
        vision, tile, y, x = self.config.vision_config, image.layout.tile, image.layout.y, image.layout.x
        side = vision.window_size // vision.spatial_merge_size // vision.patch_size
        windows = int(x.max()) // side + 1
        window = (tile * (int(y.max()) // side + 1) + y // side) * windows + x // side
        order = ((window * side + y % side) * side + x % side).argsort().argsort()
        states: dict[str, Any] = {name: getattr(image, name)[order] for name in ("scores", "keys", "hidden")}
        return replace(image, **states, more={name: part[order] for name, part in image.more.items()})


@register_adapter
class Qwen3VLAdapter(Qwen2VLAdapter):
    """Qwen3-VL. The survivors' rows of deepstack features, which later layers add, are fed as they are."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")
    tokens_per_image = "one per 32 x 32 pixels"
    written_text = r"<\d+\.\dseconds>"
    has_planes = True

    def outputs(self, kept: Sequence[PrunedImage], modality: Modality) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        planes = [tokens.planes for tokens in kept if tokens.planes is not None]
        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=[tokens.features for tokens in kept],
            deepstack_features=[list(plane) for plane in zip(*planes, strict=True)],
        )


@register_adapter
class Qwen35Adapter(Qwen2VLAdapter):
    """Qwen3.5: the tower of Qwen3-VL without deepstack features, a language model with linear attention."""

    model_types = ("qwen3_5", "qwen3_5_moe")
    tokens_per_image = "one per 32 x 32 pixels"
    written_text = r"<\d+\.\dseconds>"
