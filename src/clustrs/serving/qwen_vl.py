"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 in vLLM, pruned: images and videos, kept tokens at M-RoPE positions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models import qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe

from clustrs.models.adapters.base import VisualTokens
from clustrs.models.prompt import PrunedImage
from clustrs.models.scoring import attention_scores
from clustrs.serving import pruning

Grid = list[int]  # frames, height and width of an image in patches
MARKS = 24  # tokens that Qwen3-VL writes between two frames of a video at most: a timestamp, and two around each frame


class PrunedQwenInfo(pruning.PrunedInfo):
    """Mixin for a Qwen model's processing info: as many placeholders as tokens are kept."""

    get_image_processor: Any
    get_image_size_with_most_features: Any
    get_max_video_tokens: Any
    _get_vision_info: Any

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {**super().get_supported_mm_limits(), "video": None}

    def count_unpruned(self, **size: Any) -> int:
        defaults = {"image_processor": self.get_image_processor(), "mm_kwargs": {}}
        return super().count_unpruned(**(defaults | size))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
        """Return all tokens of the largest image and video: vLLM profiles the tower with as many as unpruned."""
        width, height = self.get_image_size_with_most_features()
        image = self.count_unpruned(image_width=width, image_height=height)
        return {"image": image, "video": self.get_max_video_tokens(seq_len, mm_counts)}

    def extent(self, mm_kwargs: Any, **size: int) -> int:
        resized, _ = self._get_vision_info(**size, mm_kwargs=mm_kwargs, image_processor=self.get_image_processor())
        vision = self.get_hf_config().vision_config
        return int(max(resized)) // (vision.patch_size * vision.spatial_merge_size)


class PrunedQwen25Info(PrunedQwenInfo):
    """Mixin for Qwen2.5-VL's info: the frames of a video lie on a time axis."""

    def video_extent(self, frames: int, side: int, mm_kwargs: Any) -> int:
        fps = mm_kwargs.get("fps") or 2.0
        rate = min(fps) if isinstance(fps, list | tuple) else fps
        return max(side, int(self.get_hf_config().vision_config.tokens_per_second * frames / rate) + 2)


class PrunedQwen3Info(PrunedQwenInfo):
    """Mixin for the info of Qwen3-VL and Qwen3.5: two frames are an image, with text before it."""

    def video_extent(self, frames: int, side: int, mm_kwargs: Any) -> int:
        return (frames + 1) // 2 * (side + MARKS)


class PrunedQwenProcessor(pruning.PrunedProcessor):
    """Mixin for a Qwen model's processor: cuts the run of placeholders of each image and video."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        return [replace(one, replacement=partial(self._cut, one)) for one in updates]

    def _cut(self, update: Any, index: int) -> Any:
        whole = update.replacement(index)
        if isinstance(whole, list):
            return whole[: self.info.method.count(len(whole))]
        ids, token = list(whole.full), self.info.get_hf_config().video_token_id
        return pruning.cut_run(ids, token, self.info.method.count(ids.count(token)))


class PrunedQwen(pruning.PrunedModel):
    """Mixin for a Qwen model of vLLM: keeps k tokens of each image or video, at the positions they had."""

    visual: Any
    video_budgets: Tensor
    _video_rows: Callable[[VisualTokens, PrunedImage, Any, int], Tensor]  # rows of one of the videos of a step

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
        return self.side(feature.data[f"{feature.modality}_grid_thw"].data.tolist())

    def side(self, grid: Grid) -> int:
        """Return how many positions an image spans."""
        return max(grid[1:]) // int(self.config.vision_config.spatial_merge_size)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        self.video_budgets = kwargs.pop(pruning.KEEP["video"], None)
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
        self.budgets = self.video_budgets.flatten().tolist()
        pruned = enumerate(zip(videos, self.prune_images(videos), strict=True))
        return tuple(self._video_rows(*pair, video_input, i) for i, pair in pruned)

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
        tile = image.layout.tile if times is None else times.to(image.layout.tile.device)[image.layout.tile]
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

    def extent(self, feature: Any) -> int:
        if feature.modality == "image":
            return super().extent(feature)
        grid, seconds = feature.data["video_grid_thw"].data.tolist(), feature.data.get("second_per_grid_ts")
        times = self._times(grid[0], None if seconds is None else seconds.data.item())
        return max(self.side(grid), int(times[-1]) + 1)

    def _times(self, frames: int, seconds: float | None) -> Tensor:
        """Return the offset of each frame on the time axis, as vLLM counts it."""
        factor = (1.0 if seconds is None else seconds) * getattr(self.config.vision_config, "tokens_per_second", 1.0)
        return (torch.arange(frames).double() * factor).long()

    def _video_rows(self, video: VisualTokens, kept: PrunedImage, video_input: Any, index: int) -> Tensor:
        seconds = video_input.get("second_per_grid_ts")
        return self._rows(
            video, kept, self._times(len(video.grids), None if seconds is None else float(seconds[index]))
        )


class PrunedQwen3(PrunedQwen):
    """Mixin for Qwen3-VL and Qwen3.5, which write text between the frames of a video. How many tokens a frame keeps is
    known only when the video is encoded, so that the rows of such text come with those of the video."""

    _tokenizer: Any

    def place_of(self, feature: Any) -> tuple[int, int, int]:
        if feature.modality == "image":
            return super().place_of(feature)
        position, grid = feature.mm_position, feature.data["video_grid_thw"].data.tolist()
        ids, first, after = self._run(grid, feature.data["timestamps"].data)
        text = int((ids != self.config.video_token_id).sum())
        return position.offset + first, position.length - first - after, text + grid[0] * self.side(grid)

    def _run(self, grid: Grid, timestamps: Any) -> tuple[Tensor, int, int]:
        """Return the token ids from the first placeholder of an unpruned video to the last, and how many tokens of its
        text stand before and after."""
        count, token = grid[1] * grid[2] // self.visual.spatial_merge_unit, self.config.video_token_id
        ids = qwen3_vl.Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=[count] * grid[0],
            timestamps=timestamps,
            tokenizer=self._tokenizer,
            vision_start_token_id=self.config.vision_start_token_id,
            vision_end_token_id=self.config.vision_end_token_id,
            video_token_id=token,
        ).full
        first, last = pruning.find_run(ids, token)
        return torch.tensor(ids[first : last + 1]), first, len(ids) - 1 - last

    def _video_rows(self, video: VisualTokens, kept: PrunedImage, video_input: Any, index: int) -> Tensor:
        assert kept.planes is not None
        grid, device = video_input["video_grid_thw"][index].tolist(), kept.features.device
        ids = self._run(grid, video_input["timestamps"][index])[0].to(device)
        is_slot = ids == self.config.video_token_id
        slots, text = is_slot.long(), (~is_slot).long()
        frames = (slots.cumsum(0) - slots) // (len(video.layout.tile) // grid[0])  # before each token of the run
        places = (text.cumsum(0) - text + frames * self.side(grid)).repeat(3, 1)
        places[1, is_slot] += video.layout.y
        places[2, is_slot] += video.layout.x
        rows = torch.cat([kept.features, kept.planes[0]], -1)
        words = self.language_model.embed_input_ids(ids[~is_slot]).to(rows)
        order, own = pruning.prompt_order(is_slot, kept)
        rows = torch.cat([rows, nn.functional.pad(words, (0, rows.shape[-1] - words.shape[-1]))])[order]
        return torch.cat([rows, pruning.offset_channels(places[:, own], rows.dtype)], -1)


@pruning.register_processor(PrunedQwen3Info, PrunedQwenProcessor, qwen3_vl, "Qwen3VL")
class PrunedQwen3VL(PrunedQwen3, qwen3_vl.Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL. A survivor's features for later layers (deepstack) stay with it, as they are."""


@pruning.register_processor(PrunedQwen3Info, PrunedQwenProcessor, qwen3_vl_moe, "Qwen3VLMoe", "Qwen3VL")
class PrunedQwen3VLMoe(PrunedQwen3, qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """vLLM's Qwen3-VL with a mixture of experts."""


@pruning.register_processor(PrunedQwen3Info, PrunedQwenProcessor, qwen3_5, "Qwen3_5", "Qwen3VL")
class PrunedQwen35(PrunedQwen3, qwen3_5.Qwen3_5ForConditionalGeneration):
    """vLLM's Qwen3.5."""


@pruning.register_processor(PrunedQwen3Info, PrunedQwenProcessor, qwen3_5, "Qwen3_5Moe", "Qwen3VL")
class PrunedQwen35Moe(PrunedQwen3, qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """vLLM's Qwen3.5 with a mixture of experts."""
