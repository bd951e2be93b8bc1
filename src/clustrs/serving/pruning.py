"""Code that all pruned models in vLLM share: placeholders, metrics, attention scores and M-RoPE positions."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clustrs.models.scoring import Reduction, attention_scores
from clustrs.pruners.base import Pruner
from clustrs.serving import plugin


def pruned_method(hf_config: Any) -> Pruner:
    """Return the method that a model's config names."""
    return _method(json.dumps(getattr(hf_config, plugin.KEY), sort_keys=True))


@cache
def _method(settings: str) -> Pruner:
    return plugin.read_method(json.loads(settings))


class PrunedInfo:
    """Mixin for a family's processing info: k placeholders per image, in caches of their own."""

    @property
    def method(self) -> Pruner:
        return pruned_method(self.get_hf_config())  # type: ignore[attr-defined]

    @property
    def model_id(self) -> str:
        """Part of the keys of vLLM's caches, some of which servers may share: other settings, other features."""
        return f"{super().model_id}|{json.dumps(self.method.to_dict(), sort_keys=True)}"  # type: ignore[misc]

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """Images only: a video would not be pruned."""
        limits = super().get_supported_mm_limits()  # type: ignore[misc]
        return {modality: limit for modality, limit in limits.items() if modality == "image"}

    def get_num_image_tokens(self, **size: Any) -> int:
        """Return the number of placeholders of an image of this width and height."""
        candidates = self.count_candidates(**size)
        kept = self.method.count(candidates)
        return self.count_unpruned(**size) if kept == candidates else kept

    def count_unpruned(self, **size: Any) -> int:
        """Return the number of placeholders without pruning."""
        return int(super().get_num_image_tokens(**size))  # type: ignore[misc]

    def count_candidates(self, **size: Any) -> int:
        """Return the number of tokens that a method chooses from; newlines are not among them."""
        return self.count_unpruned(**size)


@cache
def counters() -> tuple[Any, Any]:
    """Create the counters that `/metrics` shows besides vLLM's own: visual tokens before and after pruning."""
    from prometheus_client import Counter

    return (
        Counter("clustrs:visual_tokens_before", "Visual tokens of all images in requests, before pruning."),
        Counter("clustrs:visual_tokens_after", "Visual tokens of all images in requests, after pruning."),
    )


class PrunedProcessor:
    """Mixin for a family's multimodal processor: counts visual tokens, those of dummy inputs left out."""

    counting = True

    def get_dummy_mm_inputs(self, *args: Any, **options: Any) -> Any:
        self.counting = False
        try:
            return super().get_dummy_mm_inputs(*args, **options)  # type: ignore[misc]
        finally:
            self.counting = True

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        result = super().apply(inputs, timing_ctx)  # type: ignore[misc]
        if self.counting and "image" in result["mm_placeholders"]:
            before, after = counters()
            images = inputs.mm_data_items["image"]
            for index, placeholder in enumerate(result["mm_placeholders"]["image"]):
                if images.get(index) is not None:  # none: the client sent the key of an image that it sent before
                    before.inc(self.count_unpruned(images, index, placeholder.length))
                    after.inc(placeholder.length)
        return result

    def count_unpruned(self, images: Any, index: int, kept: int) -> int:
        """Return the number of tokens of an image before pruning; embeddings are passed as they are."""
        if not hasattr(images, "get_image_size"):
            return kept
        size = images.get_image_size(index)
        return int(self.info.count_unpruned(image_width=size.width, image_height=size.height))  # type: ignore[attr-defined]


class TowerScores:
    """Collects scores [B, N] and keys [B, N or N + 1, K] of a tower's calls, over all heads: a CLS token has a key and
    no score. `layer` is an attention layer of vLLM's CLIP or SigLIP."""

    def __init__(self, layer: Any, reduction: Reduction) -> None:
        self.heads, self.scale, self.ranks = layer.num_heads_per_partition, layer.scale, layer.tp_size
        self.reduction = reduction
        self._recorded: list[tuple[Tensor, Tensor]] = []
        layer.attn.register_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        query, key = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in inputs[:2])
        scores = attention_scores(query, key, self.scale, self.reduction)
        self._recorded.append((mean_over_ranks(scores, self.ranks), mean_over_ranks(key.float().mean(1), self.ranks)))

    def clear(self) -> None:
        """Discard recorded calls."""
        self._recorded.clear()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the scores and keys of the only call since the last `clear`."""
        if len(self._recorded) != 1:
            raise RuntimeError(f"the vision tower ran {len(self._recorded)} times, expected once")
        return self._recorded.pop()


def mean_over_ranks(mean: Tensor, ranks: int) -> Tensor:
    """Average over the heads of all ranks; every rank has equally many."""
    if ranks == 1:
        return mean
    from vllm.distributed import tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(mean) / ranks


def last_attention(tower: Any) -> Any:
    """Return the attention layer of the last block of a CLIP or SigLIP tower of vLLM."""
    return tower.vision_model.encoder.layers[-1].self_attn


BASE = 256
"""Every whole number up to this one is exact in bfloat16 and float16, so y and x travel as two digits each."""
CHANNELS = 4
"""Number of channels that the y and the x of a token take."""


class ImageSpan(NamedTuple):
    """Place of an image in a pruned prompt: its first placeholder, how many it has left, and its size in tokens
    before pruning."""

    start: int
    kept: int
    height: int
    width: int


def starting_positions(length: int, images: Iterable[ImageSpan]) -> tuple[Tensor, int]:
    """Positions [3, length] with every placeholder at the start of its image; and what to add to the length of the
    sequence for the position of the next token."""
    steps = torch.ones(length, dtype=torch.long)
    for image in images:
        end = image.start + image.kept
        steps[image.start : end] = 0
        steps[end - 1] = max(image.height, image.width)
    after = steps.cumsum(0)
    following = int(after[-1]) if length else 0
    return (after - steps).repeat(3, 1), following - length


def cell_channels(y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The y and x [k] of tokens as digits [k, CHANNELS] of a floating-point type."""
    return torch.stack([y // BASE, y % BASE, x // BASE, x % BASE], -1).to(dtype)


def position_offsets(channels: Tensor) -> Tensor:
    """Return the position offsets [3, k] of tokens from the digits [k, CHANNELS] they carry."""
    digits = channels.long()
    y, x = digits[:, 0] * BASE + digits[:, 1], digits[:, 2] * BASE + digits[:, 3]
    return torch.stack([torch.zeros_like(y), y, x])


def split_channels(embeddings: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The features of images without the channels behind them, and the offsets [3, k of all images] these hold."""
    offsets = [position_offsets(rows[:, -CHANNELS:]) for rows in embeddings]
    return [rows[:, :-CHANNELS] for rows in embeddings], torch.cat(offsets, 1)
