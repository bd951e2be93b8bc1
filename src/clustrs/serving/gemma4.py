"""Gemma 4 in vLLM, pruned: the models that attend to images causally (E2B, E4B)."""

from typing import Any

from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model
from vllm.model_executor.models import gemma4_mm

from clustrs.models.adapters.gemma4 import Gemma4Adapter
from clustrs.serving import pruning


class PrunedGemma4Info(pruning.PrunedInfo):
    """Mixin for Gemma 4's processing info: images only, neither videos nor sound."""

    def count_unpruned(self, **size: Any) -> int:
        if size.get("max_soft_tokens") is None:
            size["max_soft_tokens"], _ = gemma4_mm._get_max_soft_tokens(self.ctx.get_merged_mm_kwargs({}))
        return int(super()._compute_num_soft_tokens(**size))  # type: ignore[misc]

    def _compute_num_soft_tokens(self, image_width: int, image_height: int, max_soft_tokens: int | None = None) -> int:
        size = {"image_width": image_width, "image_height": image_height}
        return self.get_num_image_tokens(**size, max_soft_tokens=max_soft_tokens)

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Any:
        """Return all tokens of the largest image: vLLM profiles the tower with as many images as unpruned."""
        return {"image": super().get_mm_max_tokens_per_item(seq_len, mm_counts)["image"]}


@pruning.register_processor(PrunedGemma4Info, pruning.PrunedProcessor, gemma4_mm, "Gemma4")
class PrunedGemma4(pruning.PrunedModel, gemma4_mm.Gemma4ForConditionalGeneration):
    """vLLM's Gemma 4, whose tower is that of transformers, as is our adapter to it."""

    has_mrope = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.adapter = Gemma4Adapter(self)
        self.adapter.records = self.method.requirements()

    def scoring_attention(self) -> None:
        """Return no module: the adapter records scores."""

    def get_image_features(self, pixels: Tensor, positions: Tensor, **options: Any) -> Any:
        return Gemma4Model.get_image_features(self, pixels, positions, **options)

    def _process_image_input(self, image_input: Any) -> list[Tensor]:
        """Encode image by image, because the tower's embedding of positions takes most of the memory."""
        pairs = zip(image_input["pixel_values"], image_input["pixel_position_ids"], strict=True)
        images = [
            self.adapter.encode({"pixel_values": pixels[None], "image_position_ids": positions[None]}, self.timer)[0]
            for pixels, positions in pairs
        ]
        return [image.features for image in self.prune_images(images)]
