"""Code that all pruned models in vLLM share: placeholders, metrics, and the positions that kept tokens had."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from clustrs.pruners.base import Pruner
from clustrs.serving import plugin

ANGLES = 4  # length of the rotary table, in multiples of the model's own: as vLLM has it for videos
BASE = 256  # every whole number up to this one is exact in bfloat16 and float16, so offsets travel as two digits each
CHANNELS = 6  # channels behind the features of a kept token: its offsets from its image's first position, in three rows


class PrunedInfo:
    """Mixin for a family's processing info: k placeholders per image, in caches of their own."""

    ctx: Any
    get_hf_config: Any

    @cached_property
    def settings(self) -> tuple[Pruner, str]:
        return plugin.read_settings(self.get_hf_config())

    @property
    def model_id(self) -> str:
        """Part of the keys of vLLM's caches, some of which servers may share: other settings, other features."""
        method, positions = self.settings
        return f"{super().model_id}|{json.dumps(method.to_dict(), sort_keys=True)}|{positions}"  # type: ignore[misc]

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        limits = super().get_supported_mm_limits()  # type: ignore[misc]
        return {"image": limits["image"]}  # a video would not be pruned

    def get_num_image_tokens(self, **size: Any) -> int:
        candidates = self.count_candidates(**size)
        kept = self.settings[0].count(candidates)
        return self.count_unpruned(**size) if kept == candidates else kept

    def count_unpruned(self, **size: Any) -> int:
        return int(super().get_num_image_tokens(**size))  # type: ignore[misc]

    def count_candidates(self, **size: Any) -> int:
        """Return the number of tokens that a method chooses from; newlines are not among them."""
        return self.count_unpruned(**size)

    def extent(self, mm_kwargs: Any, **size: int) -> int:
        return self.count_unpruned(**size)

    def check_extent(self, images: Any, mm_kwargs: Any) -> None:
        """Refuse a prompt whose positions would outrun the table of angles: pruned, it may hold very many images."""
        sizes = [images.get_image_size(i) for i in range(len(images)) if images.get(i) is not None]
        extent = sum(self.extent(mm_kwargs, image_width=size.width, image_height=size.height) for size in sizes)
        length = self.ctx.model_config.max_model_len
        most = ANGLES * self.get_hf_config().get_text_config().max_position_embeddings - length
        if extent > most:
            from vllm.exceptions import VLLMValidationError  # of the client's request, not of the server

            message = f"the images of a prompt span {extent} positions: at most {most} with {length} tokens"
            raise VLLMValidationError(message, parameter="image")


@cache
def counter(when: str) -> Any:
    """Create a counter that `/metrics` shows besides vLLM's own: visual tokens before or after pruning."""
    from prometheus_client import Counter

    return Counter(f"clustrs:visual_tokens_{when}", f"Visual tokens of all images in requests, {when} pruning.")


class PrunedProcessor:
    """Mixin for a family's multimodal processor: counts visual tokens, those of dummy inputs left out."""

    info: Any
    counting = True

    def get_dummy_mm_inputs(self, *args: Any, **options: Any) -> Any:
        self.counting = False
        try:
            return super().get_dummy_mm_inputs(*args, **options)  # type: ignore[misc]
        finally:
            self.counting = True

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        images = inputs.mm_data_items.get("image", ())
        sized = hasattr(images, "get_image_size")  # embeddings have no size, and stay as they are
        if sized and self.info.settings[1] == "original":
            self.info.check_extent(images, inputs.hf_processor_mm_kwargs)
        result = super().apply(inputs, timing_ctx)  # type: ignore[misc]
        for i, placeholder in enumerate(result["mm_placeholders"].get("image", ()) if self.counting else ()):
            if images.get(i) is not None:  # None: the client sent the key of an image that it sent before
                before = placeholder.length
                if sized:
                    size = images.get_image_size(i)
                    before = self.info.count_unpruned(image_width=size.width, image_height=size.height)
                counter("before").inc(before)
                counter("after").inc(placeholder.length)
        return result


def register_processor(info: type, processor: type, module: Any, family: str) -> Any:
    """Register a model with mixins before the info and the processor that a module of vLLM has for a family."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    info = type(f"Pruned{family}Info", (info, getattr(module, f"{family}ProcessingInfo")), {})
    processor = type(f"Pruned{family}Processor", (processor, getattr(module, f"{family}MultiModalProcessor")), {})
    dummy_inputs = getattr(module, f"{family}DummyInputsBuilder")
    return MULTIMODAL_REGISTRY.register_processor(processor, info=info, dummy_inputs=dummy_inputs)


class PrunedModel(nn.Module):
    """Mixin for a model of vLLM that keeps k tokens of each image, if asked at the positions they had.

    vLLM's M-RoPE then counts positions; a kept token carries its offset in channels behind its features.
    """

    supports_mrope = True
    supports_tower_connector_lora = False
    has_mrope = True  # false for a language model whose positions have one row
    config: Any
    language_model: Any
    offsets: Tensor
    scoring_attention: Callable[[], Any]  # returns the module, called with query and key, that scores the tokens
    extent: Callable[[Any], int]  # returns how many positions an image of a prompt spans

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        method, positions = plugin.read_settings(config)
        if positions == "original":
            self.check_options(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.method, self.original = method, positions == "original"
        self.most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.recorded: list[tuple[Tensor, Tensor]] = []
        self.scoring_attention().register_forward_pre_hook(self._record, with_kwargs=True)
        if self.original:
            widen_rotary_table(self.language_model, ANGLES * config.get_text_config().max_position_embeddings)
            self.register_buffer("offsets", torch.zeros(3, self.most_tokens, dtype=torch.long), persistent=False)

    @classmethod
    def refused_options(cls, vllm_config: Any) -> dict[str, bool]:
        """Return whether options of vLLM are given that lose the positions of kept tokens, or bypass the pruning."""
        parallel = vllm_config.parallel_config
        return {
            "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
            "speculative_config": vllm_config.speculative_config is not None,
            "enable_dbo": parallel.enable_dbo,
        }

    @classmethod
    def check_options(cls, vllm_config: Any) -> None:
        given = " and ".join(name for name, is_given in cls.refused_options(vllm_config).items() if is_given)
        if given:
            raise ValueError(f"{given} can't be combined with pruning at original positions: leave out what is named")

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...], arguments: dict[str, Any]) -> None:
        query, key = (inputs or tuple(arguments[name] for name in ("query", "key")))[:2]
        self.recorded.append((query, key))

    def run_tower(self, tower: Callable[..., Tensor], *inputs: Any, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.recorded.clear()
        output = tower(*inputs, **arguments)
        if len(self.recorded) != 1:
            raise RuntimeError(f"the vision tower ran {len(self.recorded)} times, expected once")
        return output, *self.recorded.pop()

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        places = [(one.mm_position.offset, one.mm_position.length, self.extent(one)) for one in mm_features]
        return starting_positions(len(input_tokens), places)

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, *, is_multimodal: Tensor | None = None
    ) -> Tensor:
        """Embed a step's tokens, and note what its visual tokens add to their positions for `forward`."""
        if self.original:
            self.offsets.zero_()
            if multimodal_embeddings is not None and len(multimodal_embeddings):
                multimodal_embeddings, offsets = split_channels(multimodal_embeddings)
                self.offsets[:, : len(input_ids)][:, is_multimodal] = offsets
        embed = super().embed_input_ids  # type: ignore[misc]
        embeddings: Tensor = embed(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)
        return embeddings

    def forward(self, input_ids: Tensor | None, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the language model. The positions change in place: captured graphs read them where they lie."""
        if self.original:
            offsets = self.offsets[:, : positions.shape[-1]]
            positions[:, : offsets.shape[1]] += offsets
            offsets.zero_()
            positions = positions if self.has_mrope else positions[0]
        return super().forward(input_ids, positions, *args, **kwargs)


def widen_rotary_table(model: nn.Module, rows: int) -> None:
    """Give the tables of angles at least some rows: positions outrun the length of a pruned prompt."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    for rope in model.modules():
        if isinstance(rope, RotaryEmbeddingBase) and len(rope.cos_sin_cache) < rows:
            before, rope.max_position_embeddings = rope.cos_sin_cache, rows
            table = rope._compute_cos_sin_cache().to(before)
            if not torch.equal(table[: len(before)], before):
                kind = type(rope).__name__
                raise ValueError(f"positions must be 'compact' for {kind}, whose angles depend on the longest prompt")
            rope.register_buffer("cos_sin_cache", table, persistent=False)
            if getattr(rope, "cos_sin_cache_bf16", None) is not None:
                rope.cos_sin_cache_bf16 = table.to(torch.bfloat16)


def mean_over_ranks(mean: Tensor, ranks: int) -> Tensor:
    """Average over the heads of all ranks; every rank has equally many."""
    if ranks == 1:
        return mean
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(mean) / ranks


def starting_positions(length: int, images: Iterable[tuple[int, int, int]]) -> tuple[Tensor, int]:
    """Positions [3, length] with every placeholder at the start of its image; and what to add to the length of the
    sequence for the position of the next token. An image is its first placeholder, how many it has left, and how many
    positions it spans."""
    steps = torch.ones(length, dtype=torch.long)
    for start, kept, extent in images:
        steps[start : start + kept] = 0
        steps[start + kept - 1] = extent
    after = steps.cumsum(0)
    return (after - steps).repeat(3, 1), int(steps.sum()) - length


def offset_channels(offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Offsets [3, ..., k] as digits [..., k, CHANNELS] of a floating-point type."""
    rows = offsets.movedim(0, -1)
    return torch.stack([rows // BASE, rows % BASE], -1).flatten(-2).to(dtype)


def split_channels(embeddings: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The features of images without the channels behind them, and the offsets [3, k of all images] these hold."""
    digits = torch.cat([rows[:, -CHANNELS:] for rows in embeddings]).long().unflatten(-1, (3, 2))
    return [rows[:, :-CHANNELS] for rows in embeddings], (digits[..., 0] * BASE + digits[..., 1]).T
