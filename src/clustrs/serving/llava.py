"""LLaVA-1.5 in vLLM, pruned: one crop per image, no newlines."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from clustrs.models.adapters.towers import HAS_CLS
from clustrs.pruners.selection import Layout
from clustrs.serving.pruning import PrunedInfo, pruned_method
from clustrs.serving.scores import TowerScores, last_attention


class PrunedLlavaInfo(PrunedInfo, LlavaProcessingInfo):
    """LLaVA-1.5's processing info with as many placeholders as tokens are kept."""


@MULTIMODAL_REGISTRY.register_processor(
    LlavaMultiModalProcessor, info=PrunedLlavaInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(LlavaForConditionalGeneration):
    """vLLM's LLaVA-1.5 that keeps k tokens of each image."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        check_tower(self.config)
        self.method = pruned_method(self.config)
        self.scores = tower_scores(self)

    def _process_image_input(self, image_input: Any) -> Any:
        if image_input["type"] == "image_embeds":
            return super()._process_image_input(image_input)
        self.scores.clear()
        features: Tensor = super()._process_image_input(image_input)
        vision = self.config.vision_config
        layout = grid_layout(features, vision.image_size // vision.patch_size)
        return self.method.select(features, self.scores.take(), layout=layout, check=False).tokens


def check_tower(config: Any) -> None:
    """Refuse what vLLM's LLaVA reads differently, or what has no scores."""
    tower = config.vision_config.model_type
    if tower not in ("clip_vision_model", "siglip_vision_model"):
        raise ValueError(f"vision tower {tower!r} can't be served pruned: give clip_vision_model, siglip_vision_model")
    if not isinstance(config.vision_feature_layer, int):
        raise ValueError(f"vision_feature_layer={config.vision_feature_layer!r}: give one layer (an int)")
    expected = "default" if HAS_CLS[tower] else "full"
    if config.vision_feature_select_strategy != expected:
        strategy = config.vision_feature_select_strategy
        raise ValueError(f"vision_feature_select_strategy={strategy!r} does not suit {tower}: give {expected!r}")


def tower_scores(model: Any) -> TowerScores:
    """Listen to the tower of a LLaVA."""
    cls = HAS_CLS[model.config.vision_config.model_type]
    return TowerScores(last_attention(model.vision_tower), "cls" if cls else "received")


def grid_layout(features: Tensor, side: int) -> Layout:
    """Where the tokens of images with one square crop [B, side * side, D] lie."""
    cell = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
    return Layout(torch.zeros_like(cell), cell // side, cell % side)
