"""What all pruned models share: how many placeholders an image has, in prompt, profiling and scheduler alike, and the
metrics that tell it."""

import json
from functools import cache
from typing import Any

from clustrs.pruners.base import Pruner
from clustrs.serving import config


def pruned_method(hf_config: Any) -> Pruner:
    """The method that a model's config names."""
    return _method(json.dumps(getattr(hf_config, config.KEY), sort_keys=True))


@cache
def _method(settings: str) -> Pruner:
    return config.read_method(json.loads(settings))


class PrunedInfo:
    """Goes before a family's processing info: k placeholders per image, in caches of their own."""

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
        """How many placeholders an image of some width and height has."""
        candidates = self.count_candidates(**size)
        kept = self.method.count(candidates)
        return self.count_unpruned(**size) if kept == candidates else kept

    def count_unpruned(self, **size: Any) -> int:
        """How many placeholders it has without pruning."""
        return int(super().get_num_image_tokens(**size))  # type: ignore[misc]

    def count_candidates(self, **size: Any) -> int:
        """How many of these a method chooses from; newlines, where a family has them, are not among them."""
        return self.count_unpruned(**size)


@cache
def counters() -> tuple[Any, Any]:
    """What `/metrics` shows besides vLLM's own: visual tokens of all requests, before and after pruning."""
    from prometheus_client import Counter

    return (
        Counter("clustrs:visual_tokens_before", "Visual tokens of all images in requests, before pruning."),
        Counter("clustrs:visual_tokens_after", "Visual tokens of all images in requests, after pruning."),
    )


class PrunedProcessor:
    """Goes before a family's multimodal processor: counts visual tokens, those of dummy inputs left out."""

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
        """How many tokens an image of a request has before pruning; embeddings come as they are."""
        if not hasattr(images, "get_image_size"):
            return kept
        size = images.get_image_size(index)
        return int(self.info.count_unpruned(image_width=size.width, image_height=size.height))  # type: ignore[attr-defined]
