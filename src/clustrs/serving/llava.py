"""LLaVA-1.5 and LLaVA-OneVision in vLLM, pruned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.model_executor.models.llava_onevision import (
    LlavaOnevisionDummyInputsBuilder,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionMultiModalProcessor,
    LlavaOnevisionProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from clustrs.models.adapters.base import HAS_CLS
from clustrs.models.adapters.llava import FIXED, EncodedCrops, channel_map, unpack_channels
from clustrs.pruners.inputs import Layout, PrunerInputs, grid_layout
from clustrs.serving.pruning import PrunedInfo, PrunedProcessor, TowerScores, last_attention, pruned_method


class PrunedTower:
    """Mixin for vLLM's model: crops through its tower and projector, with a score for each token."""

    supports_tower_connector_lora = False

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        config = self.config
        self.method = pruned_method(config)
        self.cls = HAS_CLS[config.vision_config.model_type]
        self.side = config.vision_config.image_size // config.vision_config.patch_size
        self.scores = TowerScores(last_attention(self.vision_tower), "cls" if self.cls else "received")
        # As many crops at once as without pruning: the scheduler counts what is kept, and would take many more.
        self.crops_at_once = max(1, vllm_config.scheduler_config.max_num_encoder_input_tokens // self.side**2)

    config: Any
    vision_tower: Any
    multi_modal_projector: Any

    def encode_crops(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features [C, P, D], scores [C, P] and keys [C, P or P + 1, K] of crops [C, 3, height, width]."""
        parts = []
        for some in pixels.split(self.crops_at_once):
            self.scores.clear()
            hidden = self._image_pixels_to_features(self.vision_tower, some)  # type: ignore[attr-defined]
            parts.append((self.multi_modal_projector(hidden), *self.scores.take()))
        features, scores, keys = (torch.cat(part) for part in zip(*parts, strict=True))
        return features, scores, keys

    def keep(self, tokens: Tensor, scores: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        """The tokens that stay, of one image or of a batch. Values are not checked: an error would end the server."""
        given = PrunerInputs(tokens, scores, layout, keys=keys, cls=self.cls)
        return self.method.select(given, check=False).tokens


class PrunedLlavaInfo(PrunedInfo, LlavaProcessingInfo):
    """LLaVA-1.5's processing info with as many placeholders as tokens are kept."""


class PrunedLlavaProcessor(PrunedProcessor, LlavaMultiModalProcessor):
    """LLaVA-1.5's processor, with metrics."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedLlavaProcessor, info=PrunedLlavaInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class PrunedLlava(PrunedTower, LlavaForConditionalGeneration):
    """vLLM's LLaVA-1.5 that keeps k tokens of each image."""

    def _process_image_input(self, image_input: Any) -> Any:
        if image_input["type"] == "image_embeds":
            return super()._process_image_input(image_input)
        features, scores, keys = self.encode_crops(image_input["pixel_values"])
        return self.keep(features, scores, keys, grid_layout(features, self.side))


class UnlinedInfo(LlavaOnevisionProcessingInfo):
    """LLaVA-OneVision's processing info that counts no newlines."""

    def _get_num_unpadded_features(self, **shape: int) -> tuple[int, int]:
        return super()._get_num_unpadded_features(**shape)[0], 0


class PrunedOnevisionInfo(PrunedInfo, LlavaOnevisionProcessingInfo):
    """LLaVA-OneVision's processing info with as many placeholders as tokens are kept."""

    def count_candidates(self, **size: Any) -> int:
        return int(UnlinedInfo(self.ctx).get_num_image_tokens(**size))


class PrunedOnevisionProcessor(PrunedProcessor, LlavaOnevisionMultiModalProcessor):
    """LLaVA-OneVision's processor, with metrics."""


@MULTIMODAL_REGISTRY.register_processor(
    PrunedOnevisionProcessor, info=PrunedOnevisionInfo, dummy_inputs=LlavaOnevisionDummyInputsBuilder
)
class PrunedOnevision(PrunedTower, LlavaOnevisionForConditionalGeneration):
    """vLLM's LLaVA-OneVision that keeps k tokens of each image, over all its crops; newlines go unless all stay."""

    def _process_image_input(self, image_input: Any) -> Any:
        if image_input["type"] == "image_embeds":
            return super()._process_image_input(image_input)
        images: Sequence[Tensor] = image_input["pixel_values"]
        counts = [len(crops) for crops in images]
        encoded = [part.split(counts) for part in self.encode_crops(torch.cat(list(images)))]
        return [self.prune_image(*part) for part in zip(*encoded, image_input["image_sizes"], strict=True)]

    def prune_image(self, features: Tensor, scores: Tensor, keys: Tensor, size: Tensor) -> Tensor:
        """The tokens that stay of one image, from its crops [C, P, D], their scores [C, P] and keys."""
        pinpoints, crop = self.config.image_grid_pinpoints, self.config.vision_config.image_size
        columns = int(get_anyres_image_grid_shape(size.tolist(), pinpoints, crop)[1])
        nothing, first = features.new_empty(*scores.shape, 0), int(self.cls)
        encoded = EncodedCrops(scores, nothing, keys[:, first:], nothing, keys[:, :first], self.side)
        channels = channel_map(encoded, len(features), columns, 0)
        packed = self.pack(channels, size, channels.new_full((channels.shape[-1],), -1))
        candidates, layout, some = unpack_channels(packed, self.side, columns)
        whole = self.pack(features, size, self.image_newline)
        if self.method.count(len(candidates)) == len(candidates):
            return whole
        real_keys = torch.cat([encoded.cls_keys[0], packed[candidates, FIXED:]])
        return self.keep(whole[candidates], some, real_keys, layout)

    def pack(self, crops: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        """vLLM's own packing of an image's crops: unpadded, scaled down, with newlines."""
        return self._merge_image_patch_embeddings(size, crops, image_newline=newline, strategy="spatial_unpad")
