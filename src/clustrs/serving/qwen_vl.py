"""Qwen2.5-VL and Qwen3-VL in vLLM, pruned: images of any size, survivors at their original M-RoPE positions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from clustrs.models.scoring import attention_scores
from clustrs.models.select import plane_rows
from clustrs.pruners.inputs import Layout, PrunerInputs
from clustrs.serving import pruning
from clustrs.serving.pruning import PrunedInfo, PrunedProcessor, mean_over_ranks, pruned_method

ANGLES = 4
"""Length of the rotary table, in multiples of the model's own: as vLLM has it for videos."""
Grid = list[int]
"""Frames, height and width of an image in patches."""


class PrunedQwenInfo(PrunedInfo):
    """Mixin for a Qwen model's processing info: images only, with as many placeholders as tokens are kept."""

    ctx: Any
    get_hf_config: Any
    get_image_processor: Any
    get_image_size_with_most_features: Any
    _get_vision_info: Any

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """No videos: they would not be pruned. They are named, because vLLM asks for the options of their processor."""
        return {**super().get_supported_mm_limits(), "video": 0}

    def count_unpruned(self, **size: Any) -> int:
        """Return the number of placeholders without pruning, with the processor's settings by default."""
        defaults = {"image_processor": self.get_image_processor(), "mm_kwargs": {}}
        return super().count_unpruned(**(defaults | size))

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> dict[str, int]:
        """Return the size of the largest image for the tower: all its tokens.

        So vLLM profiles the tower with as many images as unpruned, and the model encodes no more at once.
        """
        width, height = self.get_image_size_with_most_features()
        return {"image": self.count_unpruned(image_width=width, image_height=height)}

    def check_extent(self, images: Any, mm_kwargs: Any) -> None:
        """Refuse a prompt whose positions would outrun the table of angles: pruned, it may hold very many images."""
        hf_config, processor, extent = self.get_hf_config(), self.get_image_processor(), 0
        for index in range(len(images)):
            if images.get(index) is not None:  # none: the client sent the key of an image that it sent before
                size = images.get_image_size(index)
                given = {"image_width": size.width, "image_height": size.height, "mm_kwargs": mm_kwargs}
                extent += max(self._get_vision_info(**given, image_processor=processor)[0])
        vision, length = hf_config.vision_config, self.ctx.model_config.max_model_len
        extent //= vision.patch_size * vision.spatial_merge_size
        most = ANGLES * hf_config.get_text_config().max_position_embeddings - length
        if extent > most:
            message = f"the images of a prompt span {extent} positions: at most {most} with {length} tokens"
            raise VLLMValidationError(message, parameter="image")  # of the client's request, not of the server


class PrunedQwenProcessor(PrunedProcessor):
    """Mixin for a Qwen model's processor: cuts the run of placeholders of each image."""

    info: Any

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        if "image" in inputs.mm_data_items:
            self.info.check_extent(inputs.mm_data_items["image"], inputs.hf_processor_mm_kwargs)
        return super().apply(inputs, timing_ctx)

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list[Any]:
        updates = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)  # type: ignore[misc]
        return [self._cut(update) for update in updates if update.modality == "image"]

    def _cut(self, update: Any) -> Any:
        def replacement(index: int) -> list[int]:
            whole: list[int] = update.replacement(index)
            return whole[: self.info.method.count(len(whole))]

        return replace(update, replacement=replacement)


class PrunedQwen(nn.Module):
    """Mixin for a Qwen model of vLLM: keeps k tokens of each image, at the positions they had."""

    supports_tower_connector_lora = False
    config: Any
    visual: Any
    offsets: Tensor

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_options(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.method = pruned_method(self.config)
        self.most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self.scoring_attention().register_forward_pre_hook(self._record, with_kwargs=True)
        widen_rotary_table(self, ANGLES * self.config.get_text_config().max_position_embeddings)
        self.register_buffer("offsets", torch.zeros(3, self.most_tokens, dtype=torch.long), persistent=False)

    def scoring_attention(self) -> Any:
        """The attention whose scores count: that of the last block."""
        return self.visual.blocks[-1].attn.attn

    def tower_order(self, grid: Grid) -> Tensor | None:
        """Return the token at each index of the tower's output, or None if it is in raster order."""
        return None

    def _record(self, module: nn.Module, inputs: Any, arguments: dict[str, Any]) -> None:
        self.recorded.append((arguments["query"], arguments["key"]))

    def _process_image_input(self, image_input: Any) -> tuple[Tensor, ...]:
        grids: list[Grid] = image_input["image_grid_thw"].tolist()
        patches = image_input["pixel_values"].split([t * h * w for t, h, w in grids])
        results: list[Tensor] = []
        for some in self._batches(grids):
            results += self._prune(torch.cat(patches[some]), grids[some])
        return tuple(results)

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

    def _prune(self, pixels: Tensor, grids: list[Grid]) -> list[Tensor]:
        """The survivors of some images, each [k, features and the channels of its y and x]."""
        self.recorded.clear()
        features: Tensor = self.visual(pixels, grid_thw=grids)
        ((query, key),) = self.recorded
        self.recorded.clear()
        sizes = [t * h * w for t, h, w in grids]
        counts = [size // self.visual.spatial_merge_unit for size in sizes]
        parts = zip(grids, features.split(counts), query.split(sizes, 1), key.split(sizes, 1), strict=True)
        return [self._survivors(*part) for part in parts]

    def _survivors(self, grid: Grid, rows: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return the survivors of an image [k, ...].

        `rows` [N, ...] are its features and those for later layers; query and key are [1, patches, heads, d].
        """
        features, later = rows.tensor_split([self.config.vision_config.out_hidden_size], -1)
        width = grid[2] // self.visual.spatial_merge_size
        cell = torch.arange(len(rows), device=rows.device)
        layout = Layout(torch.zeros_like(cell), cell // width, cell % width)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        scores = attention_scores(query, key, self.scoring_attention().scale, "received")
        keys = self._pool(key.float().mean(1), grid)
        inputs = PrunerInputs(features, self._pool(scores, grid), layout, keys=keys, cls=False)
        selection = self.method.select(inputs, check=False)
        kept = selection.indices
        cells = pruning.cell_channels(layout.y[kept], layout.x[kept], rows.dtype)
        return torch.cat([selection.tokens, plane_rows(later[None], selection)[0], cells], -1)

    def _pool(self, patches: Tensor, grid: Grid) -> Tensor:
        """One value per token [N, ...] in raster order, over all heads, from each rank's [1, patches, ...]."""
        tokens = mean_over_ranks(patches[0], self.visual.tp_size).unflatten(0, (-1, self.visual.spatial_merge_unit))
        pooled, order = tokens.mean(1), self.tower_order(grid)
        return pooled if order is None else torch.empty_like(pooled).index_copy_(0, order.to(pooled.device), pooled)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        side = self.config.vision_config.spatial_merge_size
        spans = []
        for feature in mm_features:
            _, height, width = feature.data["image_grid_thw"].data.tolist()
            place = feature.mm_position
            spans.append(pruning.ImageSpan(place.offset, place.length, height // side, width // side))
        return pruning.starting_positions(len(input_tokens), spans)

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Embed a step's tokens, and note what its visual tokens add to their positions for `forward`."""
        self.offsets.zero_()
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            multimodal_embeddings, offsets = pruning.split_channels(multimodal_embeddings)
            self.offsets[:, : len(input_ids)][:, is_multimodal] = offsets
        embed = super().embed_input_ids  # type: ignore[misc]
        embeddings: Tensor = embed(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        return embeddings

    def forward(self, input_ids: Tensor | None, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the language model. The positions change in place: captured graphs read them where they lie."""
        offsets = self.offsets[:, : positions.shape[-1]]
        positions[:, : offsets.shape[1]] += offsets
        offsets.zero_()
        return super().forward(input_ids, positions, *args, **kwargs)


def check_options(vllm_config: Any) -> None:
    """Refuse options of vLLM that would pass by the pruning, or lose the survivors' positions."""
    model, compilation = vllm_config.model_config.multimodal_config, vllm_config.compilation_config
    refused = {
        "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "speculative_config": vllm_config.speculative_config is not None,
        "enable_dbo": vllm_config.parallel_config.enable_dbo,
        "mm_encoder_tp_mode": model.mm_encoder_tp_mode == "data",
        "enable_mm_embeds": model.enable_mm_embeds,
        "video_pruning_rate": model.is_multimodal_pruning_enabled(),
        "compile_mm_encoder": compilation.compile_mm_encoder,
        "cudagraph_mm_encoder": compilation.cudagraph_mm_encoder,
    }
    given = [name for name, is_given in refused.items() if is_given]
    if given:
        raise ValueError(f"{' and '.join(given)} can't be combined with a pruned Qwen model: leave out what is named")


def widen_rotary_table(model: nn.Module, rows: int) -> None:
    """Give the table of M-RoPE's angles at least some rows: positions outrun the length of a pruned prompt."""
    for rope in model.modules():
        if isinstance(rope, MRotaryEmbedding) and len(rope.cos_sin_cache) < rows:
            rope.max_position_embeddings = rows
            table = rope._compute_cos_sin_cache().to(rope.cos_sin_cache)
            rope.register_buffer("cos_sin_cache", table, persistent=False)
            if getattr(rope, "cos_sin_cache_bf16", None) is not None:
                rope.cos_sin_cache_bf16 = table.to(torch.bfloat16)


class PrunedQwen25Info(PrunedQwenInfo, Qwen2_5_VLProcessingInfo):
    """Qwen2.5-VL's processing info."""


class PrunedQwen25Processor(PrunedQwenProcessor, Qwen2_5_VLMultiModalProcessor):
    """Qwen2.5-VL's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen25Processor, info=PrunedQwen25Info, dummy_inputs=Qwen2_5_VLDummyInputsBuilder
)
class PrunedQwen25VL(PrunedQwen, Qwen2_5_VLForConditionalGeneration):
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


class PrunedQwen3Info(PrunedQwenInfo, Qwen3VLProcessingInfo):
    """Qwen3-VL's processing info."""


class PrunedQwen3Processor(PrunedQwenProcessor, Qwen3VLMultiModalProcessor):
    """Qwen3-VL's processor."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedQwen3Processor, info=PrunedQwen3Info, dummy_inputs=Qwen3VLDummyInputsBuilder
)
class PrunedQwen3VL(PrunedQwen, Qwen3VLForConditionalGeneration):
    """vLLM's Qwen3-VL. A survivor's features for later layers (deepstack) stay with it, as they are."""
