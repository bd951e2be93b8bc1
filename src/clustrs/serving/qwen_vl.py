"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 in vLLM, pruned: images, Qwen2.5-VL's videos, kept tokens at M-RoPE positions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe
from vllm.multimodal.inputs import MultiModalFieldConfig

from clustrs.models.adapters.base import VisualTokens
from clustrs.models.prompt import PrunedImage
from clustrs.models.scoring import attention_scores
from clustrs.serving import pruning

Grid = list[int]  # frames, height and width of an image in patches
VIDEO_KEEP = f"{pruning.KEEP}_video"  # field that brings a video's budget to the model


class PrunedQwenInfo(pruning.PrunedInfo):
    """Mixin for a Qwen model's processing info: as many placeholders as tokens are kept."""

    get_image_processor: Any
    get_image_size_with_most_features: Any
    get_max_video_tokens: Any
    _get_vision_info: Any

    videos = False

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """Videos are named in any case, because vLLM asks for the options of their processor."""
        return {**super().get_supported_mm_limits(), "video": None if self.videos else 0}

    def count_unpruned(self, **size: Any) -> int:
        defaults = {"image_processor": self.get_image_processor(), "mm_kwargs": {}}
        return super().count_unpruned(**(defaults | size))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
        """Return all tokens of the largest image and video: vLLM profiles the tower with as many as unpruned."""
        width, height = self.get_image_size_with_most_features()
        image = self.count_unpruned(image_width=width, image_height=height)
        return {"image": image} | ({"video": self.get_max_video_tokens(seq_len, mm_counts)} if self.videos else {})

    def extent(self, mm_kwargs: Any, **size: int) -> int:
        resized, _ = self._get_vision_info(**size, mm_kwargs=mm_kwargs, image_processor=self.get_image_processor())
        vision = self.get_hf_config().vision_config
        return int(max(resized)) // (vision.patch_size * vision.spatial_merge_size)

    def video_extent(self, videos: Any, mm_kwargs: Any) -> int:
        """Return how many positions videos span at most."""
        vision, total = self.get_hf_config().vision_config, 0
        fps = mm_kwargs.get("fps") or 2.0
        for i in range(len(videos)):
            if (video := videos.get(i)) is None:
                continue
            frames = video[0] if isinstance(video, tuple) else video  # or with its metadata
            size = type(videos)([frames]).get_frame_size(0)
            side = self.extent({}, image_width=size.width, image_height=size.height)
            rate = min(fps) if isinstance(fps, list | tuple) else fps
            total += max(side, int(vision.tokens_per_second * len(frames) / rate) + 2)
        return total


class PrunedQwen25Info(PrunedQwenInfo):
    """Mixin for Qwen2.5-VL's info, with videos. Later families have words between the frames: not built."""

    videos = True


class PrunedQwenProcessor(pruning.PrunedProcessor):
    """Mixin for a Qwen model's processor: cuts the run of placeholders of each image and video."""

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        items = inputs.mm_data_items
        videos = items.get("video", ()) if self.info.videos else ()
        if len(videos) and hasattr(videos, "get_frame_size"):
            given = inputs.hf_processor_mm_kwargs
            self.info.check_extent(items.get("image", ()), given, self.info.video_extent(videos, given))
        return super().apply(inputs, timing_ctx)

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Any) -> Any:
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs)
        if (grids := processed.get("video_grid_thw")) is not None:
            budget = pruning.write_keep(self.info.method.keep)
            processed[VIDEO_KEEP] = torch.tensor([budget] * len(grids), dtype=torch.float64)
        return processed

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> dict[str, Any]:
        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        return {**fields, VIDEO_KEEP: MultiModalFieldConfig.batched("video", keep_on_cpu=True)}

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        served = ("image", "video") if self.info.videos else ("image",)
        return [replace(one, replacement=partial(self._cut, one)) for one in updates if one.modality in served]

    def _cut(self, update: Any, index: int) -> Any:
        whole = update.replacement(index)
        return whole[: self.info.method.count(len(whole))]


class PrunedQwen(pruning.PrunedModel):
    """Mixin for a Qwen model of vLLM: keeps k tokens of each image or video, at the positions they had."""

    visual: Any

    @classmethod
    def refused_options(cls, vllm_config: Any, original: bool) -> dict[str, bool]:
        model, compilation = vllm_config.model_config.multimodal_config, vllm_config.compilation_config
        return super().refused_options(vllm_config, original) | {
            "mm_encoder_tp_mode": model.mm_encoder_tp_mode == "data",
            "enable_mm_embeds": model.enable_mm_embeds,
            "video_pruning_rate": model.is_multimodal_pruning_enabled(),
            "compile_mm_encoder": compilation.compile_mm_encoder,
            "cudagraph_mm_encoder": compilation.cudagraph_mm_encoder,
        }

    def scoring_attention(self) -> Any:
        return self.visual.blocks[-1].attn.attn

    def tower_order(self, grid: Grid) -> Tensor | None:
        """Return the token at each index of the tower's output, or None if it is in raster order."""
        return None

    def extent(self, feature: Any) -> int:
        frames, *sides = feature.data[f"{feature.modality}_grid_thw"].data.tolist()
        side = int(max(sides)) // int(self.config.vision_config.spatial_merge_size)
        if feature.modality == "image":
            return side
        seconds = feature.data.get("second_per_grid_ts")
        return max(side, int(self._times(frames, None if seconds is None else seconds.data.item())[-1]) + 1)

    def _times(self, frames: int, seconds: float | None) -> Tensor:
        """Return the offset of each frame on the time axis, as vLLM counts it."""
        factor = (1.0 if seconds is None else seconds) * getattr(self.config.vision_config, "tokens_per_second", 1.0)
        return (torch.arange(frames).double() * factor).long()

    def embed_multimodal(self, **kwargs: Any) -> Any:
        self.video_budgets = kwargs.pop(VIDEO_KEEP, None)
        return super().embed_multimodal(**kwargs)

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        images = self._encode(image_input["pixel_values"], image_input["image_grid_thw"].tolist())
        return tuple(self._rows(*pair) for pair in zip(images, self.prune_images(images), strict=True))

    def _process_video_input(self, video_input: Any) -> tuple[Tensor, ...]:
        """Encode frames as images, which no attention joins, so that few are in memory; then prune whole videos."""
        grids: list[Grid] = video_input["video_grid_thw"].tolist()
        frames = self._encode(video_input["pixel_values_videos"], [[1, h, w] for t, h, w in grids for _ in range(t)])
        videos, start = list[VisualTokens](), 0
        for count, _, _ in grids:
            some, start = frames[start : start + count], start + count
            parts = {name: torch.cat([getattr(one, name) for one in some]) for name in ("features", "scores", "keys")}
            planes = torch.cat([one.planes for one in some], 1)  # type: ignore[misc]
            videos.append(VisualTokens.on_grid(grid=some[0].grids[0], **parts, planes=planes, modality="video"))
        self.start_step(self.video_budgets)
        seconds, rows = video_input.get("second_per_grid_ts"), []
        for i, (video, kept) in enumerate(zip(videos, self.prune_images(videos), strict=True)):
            times = self._times(len(video.grids), None if seconds is None else float(seconds[i]))
            rows.append(self._rows(video, kept, times))
        return tuple(rows)

    def _encode(self, pixels: Tensor, grids: list[Grid]) -> list[VisualTokens]:
        sizes = [t * h * w for t, h, w in grids]
        patches, images = pixels.split(sizes), list[VisualTokens]()
        for some in self._batches(grids):
            features, query, key = self.run_tower(self.visual, torch.cat(patches[some]), grid_thw=grids[some])
            counts = [size // self.visual.spatial_merge_unit for size in sizes[some]]
            parts = (features.split(counts), query.split(sizes[some], 1), key.split(sizes[some], 1))
            with self.timer.time("scoring"):
                images += [self._image(*part) for part in zip(grids[some], *parts, strict=True)]
        return images

    def _batches(self, grids: Sequence[Grid]) -> Iterator[slice]:
        """Runs of images that go through the tower together: no more tokens than it would get unpruned."""
        unit, start, tokens = self.visual.spatial_merge_unit, 0, 0
        for i, (t, h, w) in enumerate(grids):
            count = t * h * w // unit
            if i > start and tokens + count > self.most_tokens:
                yield slice(start, i)
                start, tokens = i, 0
            tokens += count
        yield slice(start, len(grids))

    def _image(self, grid: Grid, rows: Tensor, query: Tensor, key: Tensor) -> VisualTokens:
        """Return an image of `rows` [N, features and those for later layers], scored by query and key [1, patches,
        heads, d]."""
        features, later = rows.tensor_split([self.config.vision_config.out_hidden_size], -1)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        scores = attention_scores(query, key, self.scoring_attention().scale, "received")
        keys, side = self._pool(key.float().mean(1), grid), self.visual.spatial_merge_size
        cells = (grid[1] // side, grid[2] // side)
        return VisualTokens.on_grid(features, self._pool(scores, grid), cells, keys=keys, planes=later[None])

    def _rows(self, image: VisualTokens, kept: PrunedImage, times: Tensor | None = None) -> Tensor:
        """Return the kept tokens with their features for later layers and their places behind them."""
        assert kept.planes is not None
        tile = image.layout.tile
        tile = tile if times is None else times.to(tile.device)[tile]
        places = torch.stack([tile, image.layout.y, image.layout.x])[:, kept.own]
        return torch.cat([kept.features, kept.planes[0], pruning.offset_channels(places, kept.features.dtype)], -1)

    def _pool(self, patches: Tensor, grid: Grid) -> Tensor:
        """One value per token [N, ...] in raster order, over all heads, from each rank's [1, patches, ...]."""
        mean = pruning.mean_over_ranks(patches[0], self.visual.tp_size)
        pooled, order = mean.unflatten(0, (-1, self.visual.spatial_merge_unit)).mean(1), self.tower_order(grid)
        return pooled if order is None else torch.empty_like(pooled).index_copy_(0, order.to(pooled.device), pooled)


@pruning.register_processor(PrunedQwen25Info, PrunedQwenProcessor, qwen2_5_vl, "Qwen2_5_VL")
class PrunedQwen25VL(PrunedQwen, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """vLLM's Qwen2.5-VL: most blocks of the tower attend within windows, and it has a window's tokens side by side."""

    def scoring_attention(self) -> Any:
        blocks = self.visual.blocks
        full = [i for i in self.config.vision_config.fullatt_block_indexes if 0 <= i < len(blocks)]
        if not full:
            raise ValueError("vision_config.fullatt_block_indexes names no block of the tower: none attends in full")
        return blocks[max(full)].attn.attn

    def tower_order(self, grid: Grid) -> Tensor | None:
        order: Tensor = self.visual.get_window_index_thw(*grid)[0]
        return order


@pruning.register_processor(PrunedQwenInfo, PrunedQwenProcessor, qwen3_vl, "Qwen3VL")
class PrunedQwen3VL(PrunedQwen, qwen3_vl.Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL. A survivor's features for later layers (deepstack) stay with it, as they are."""


@pruning.register_processor(PrunedQwenInfo, PrunedQwenProcessor, qwen3_vl_moe, "Qwen3VLMoe", "Qwen3VL")
class PrunedQwen3VLMoe(PrunedQwen, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """vLLM's Qwen3-VL with a mixture of experts."""


@pruning.register_processor(PrunedQwenInfo, PrunedQwenProcessor, qwen3_5, "Qwen3_5", "Qwen3VL")
class PrunedQwen35(PrunedQwen, qwen3_5.Qwen3_5ForConditionalGeneration):
    """vLLM's Qwen3.5."""


@pruning.register_processor(PrunedQwenInfo, PrunedQwenProcessor, qwen3_5, "Qwen3_5Moe", "Qwen3VL")
class PrunedQwen35Moe(PrunedQwen, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """vLLM's Qwen3.5 with a mixture of experts."""
