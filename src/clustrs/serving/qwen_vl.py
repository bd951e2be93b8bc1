"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 in vLLM, pruned: images of any size, kept tokens at their M-RoPE positions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe

from clustrs.models.adapters.base import VisualTokens
from clustrs.models.prompt import PrunedImage
from clustrs.models.scoring import attention_scores
from clustrs.serving import pruning

Grid = list[int]  # frames, height and width of an image in patches


class PrunedQwenInfo(pruning.PrunedInfo):
    """Mixin for a Qwen model's processing info: images only, with as many placeholders as tokens are kept."""

    get_image_processor: Any
    get_image_size_with_most_features: Any
    _get_vision_info: Any

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """No videos: they would not be pruned. They are named, because vLLM asks for the options of their processor."""
        return {**super().get_supported_mm_limits(), "video": 0}

    def count_unpruned(self, **size: Any) -> int:
        defaults = {"image_processor": self.get_image_processor(), "mm_kwargs": {}}
        return super().count_unpruned(**(defaults | size))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
        """Return all tokens of the largest image: vLLM profiles the tower with as many images as unpruned."""
        width, height = self.get_image_size_with_most_features()
        return {"image": self.count_unpruned(image_width=width, image_height=height)}

    def extent(self, mm_kwargs: Any, **size: int) -> int:
        resized, _ = self._get_vision_info(**size, mm_kwargs=mm_kwargs, image_processor=self.get_image_processor())
        vision = self.get_hf_config().vision_config
        return int(max(resized)) // (vision.patch_size * vision.spatial_merge_size)


class PrunedQwenProcessor(pruning.PrunedProcessor):
    """Mixin for a Qwen model's processor: cuts the run of placeholders of each image."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        return [replace(one, replacement=partial(self._cut, one)) for one in updates if one.modality == "image"]

    def _cut(self, update: Any, index: int) -> Any:
        whole = update.replacement(index)
        return whole[: self.info.method.count(len(whole))]


class PrunedQwen(pruning.PrunedModel):
    """Mixin for a Qwen model of vLLM: keeps k tokens of each image, at the positions they had."""

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
        _, *sides = feature.data["image_grid_thw"].data.tolist()
        return int(max(sides)) // int(self.config.vision_config.spatial_merge_size)

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        grids: list[Grid] = image_input["image_grid_thw"].tolist()
        sizes = [t * h * w for t, h, w in grids]
        patches, images = image_input["pixel_values"].split(sizes), list[VisualTokens]()
        for some in self._batches(grids):
            features, query, key = self.run_tower(self.visual, torch.cat(patches[some]), grid_thw=grids[some])
            counts = [size // self.visual.spatial_merge_unit for size in sizes[some]]
            parts = (features.split(counts), query.split(sizes[some], 1), key.split(sizes[some], 1))
            with self.timer.time("scoring"):
                images += [self._image(*part) for part in zip(grids[some], *parts, strict=True)]
        return tuple(self._rows(*pair) for pair in zip(images, self.prune_images(images), strict=True))

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

    def _rows(self, image: VisualTokens, kept: PrunedImage) -> Tensor:
        """Return the kept tokens with their features for later layers and their places behind them."""
        assert kept.planes is not None
        places = torch.stack([image.layout.tile, image.layout.y, image.layout.x])[:, kept.own]
        return torch.cat([kept.features, kept.planes[0], pruning.offset_channels(places, kept.features.dtype)], -1)

    def _pool(self, patches: Tensor, grid: Grid) -> Tensor:
        """One value per token [N, ...] in raster order, over all heads, from each rank's [1, patches, ...]."""
        mean = pruning.mean_over_ranks(patches[0], self.visual.tp_size)
        pooled, order = mean.unflatten(0, (-1, self.visual.spatial_merge_unit)).mean(1), self.tower_order(grid)
        return pooled if order is None else torch.empty_like(pooled).index_copy_(0, order.to(pooled.device), pooled)


@pruning.register_processor(PrunedQwenInfo, PrunedQwenProcessor, qwen2_5_vl, "Qwen2_5_VL")
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
