"""LLaVA-1.5 and LLaVA-OneVision in vLLM, pruned."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape
from vllm.model_executor.models import llava, llava_onevision
from vllm.multimodal.inputs import MultiModalFieldConfig

from clustrs.models.adapters.base import HAS_CLS, VisualTokens
from clustrs.models.adapters.llava import FIXED, EncodedCrops, channel_map, unpack_channels
from clustrs.models.scoring import attention_scores
from clustrs.serving import pruning
from clustrs.serving.pruning import PrunedInfo, mean_over_ranks


class PrunedLlavaProcessor(pruning.PrunedProcessor):
    """Mixin for a LLaVA processor: what `PrunedTower.extent` reads stays with a request whose images are cached."""

    def _get_mm_fields_config(self, *args: Any) -> dict[str, Any]:
        fields = super()._get_mm_fields_config(*args)
        kept = {"image_sizes", "image_embeds"} & set(fields)
        return {**fields, **{name: MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in kept}}


def tower_scores(layer: Any, query: Tensor, key: Tensor, cls: bool) -> tuple[Tensor, Tensor]:
    """Scores [B, N] and keys [B, N or N + 1, K] from one rank's query and key [B, N or N + 1, heads * d] of a layer."""
    query, key = (part.unflatten(-1, (layer.num_heads_per_partition, -1)).transpose(1, 2) for part in (query, key))
    scores = attention_scores(query, key, layer.scale, "cls" if cls else "received")
    return mean_over_ranks(scores, layer.tp_size), mean_over_ranks(key.float().mean(1), layer.tp_size)


class PrunedTower(pruning.PrunedModel):
    """Mixin for vLLM's LLaVA models: crops through tower and projector, with a score for each token."""

    has_mrope = False
    vision_tower: Any
    multi_modal_projector: Any
    _image_pixels_to_features: Any
    _merge_image_patch_embeddings: Callable[..., Tensor]
    image_newline: Any
    encode: Callable[[Any], list[VisualTokens]]  # encodes the images of a step

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        vision = self.config.vision_config
        self.cls = HAS_CLS[vision.model_type]
        self.side = vision.image_size // vision.patch_size
        # As many crops at once as without pruning: the scheduler counts what is kept, and would take many more.
        self.crops_at_once = max(1, vllm_config.scheduler_config.max_num_encoder_input_tokens // self.side**2)

    def scoring_attention(self) -> Any:
        return self.vision_tower.vision_model.encoder.layers[-1].self_attn.attn

    def extent(self, feature: Any) -> int:
        if "image_embeds" in feature.data:  # nothing else is known of them: they take one each
            return int(feature.mm_position.length)
        return self.count_unpruned(feature.data)

    def count_unpruned(self, data: Any) -> int:
        return int(self.side**2)

    def encode_crops(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features [C, P, D], scores [C, P] and keys [C, P or P + 1, K] of crops [C, 3, height, width]."""
        layer, parts = self.vision_tower.vision_model.encoder.layers[-1].self_attn, []
        for some in pixels.split(self.crops_at_once):
            hidden, query, key = self.run_tower(self._image_pixels_to_features, self.vision_tower, some)
            features = self.multi_modal_projector(hidden)
            with self.timer.time("scoring"):
                parts.append((features, *tower_scores(layer, query, key, self.cls)))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]

    def _process_image_input(self, image_input: Any) -> Any:
        if image_input["type"] != "image_embeds":
            pruned = self.prune_images(self.encode(image_input))
            return [self.placed(image.features, image.own) for image in pruned]
        device = next(self.multi_modal_projector.parameters()).device
        return [self.placed(rows.to(device), torch.arange(len(rows), device=device)) for rows in image_input["data"]]


@pruning.register_processor(PrunedInfo, PrunedLlavaProcessor, llava, "Llava")
class PrunedLlava(PrunedTower, llava.LlavaForConditionalGeneration):
    """vLLM's LLaVA-1.5 that keeps k tokens of each image."""

    def encode(self, image_input: Any) -> list[VisualTokens]:
        first, grid = int(self.cls), (self.side, self.side)
        return [
            VisualTokens.on_grid(features, scores, grid, keys=keys[first:], cls_keys=keys[None, :first])
            for features, scores, keys in zip(*self.encode_crops(image_input["pixel_values"]), strict=True)
        ]


class UnlinedInfo(llava_onevision.LlavaOnevisionProcessingInfo):
    """LLaVA-OneVision's processing info that counts no newlines."""

    def _get_num_unpadded_features(self, **shape: int) -> tuple[int, int]:
        return super()._get_num_unpadded_features(**shape)[0], 0


class PrunedOnevisionInfo(PrunedInfo):
    """Mixin for LLaVA-OneVision's processing info: newlines are not chosen from."""

    def count_candidates(self, **size: Any) -> int:
        return int(UnlinedInfo(self.ctx).get_num_image_tokens(**size))


@pruning.register_processor(PrunedOnevisionInfo, PrunedLlavaProcessor, llava_onevision, "LlavaOnevision")
class PrunedOnevision(PrunedTower, llava_onevision.LlavaOnevisionForConditionalGeneration):
    """vLLM's LLaVA-OneVision that keeps k tokens of each image, over all its crops; newlines go unless all stay."""

    def encode(self, image_input: Any) -> list[VisualTokens]:
        images: Sequence[Tensor] = image_input["pixel_values"]
        counts = [len(crops) for crops in images]
        encoded = [part.split(counts) for part in self.encode_crops(torch.cat(list(images)))]
        with self.timer.time("scoring"):
            return [self.image(*part) for part in zip(*encoded, image_input["image_sizes"], strict=True)]

    def image(self, features: Tensor, scores: Tensor, keys: Tensor, size: Tensor) -> VisualTokens:
        """Return the tokens of one image, from its crops [C, P, D], their scores [C, P] and keys."""
        columns = self.grid(size)[1]
        nothing, first = features.new_empty(*scores.shape, 0), int(self.cls)
        encoded = EncodedCrops(scores, nothing, keys[:, first:], nothing, keys[:, :first], self.side, {})
        channels = channel_map(encoded, len(features), columns, 0)
        packed = self.pack(channels, size, channels.new_full((channels.shape[-1],), -1))
        candidates, layout, some = unpack_channels(packed, self.side, columns)
        return VisualTokens(
            features=self.pack(features, size, self.image_newline),
            candidates=candidates,
            scores=some,
            layout=layout,
            grids=[(self.side, self.side)] * len(features),
            slots=len(packed),
            keys=packed[candidates, FIXED:],
            cls_keys=encoded.cls_keys,
        )

    def grid(self, size: Tensor) -> tuple[int, int]:
        """Return how many crops an image of some height and width has below each other, and side by side."""
        crop = self.config.vision_config.image_size
        rows, columns = get_anyres_image_grid_shape(size.tolist(), self.config.image_grid_pinpoints, crop)
        return int(rows), int(columns)

    def count_unpruned(self, data: Any) -> int:
        size = data["image_sizes"].data
        rows, columns = self.grid(size)
        return len(self.pack(torch.zeros(1 + rows * columns, self.side**2, 1), size, torch.zeros(1)))

    def pack(self, crops: Tensor, size: Tensor, newline: Tensor) -> Tensor:
        """vLLM's own packing of an image's crops: unpadded, scaled down, with newlines."""
        return self._merge_image_patch_embeddings(size, crops, image_newline=newline, strategy="spatial_unpad")
