"""PaliGemma and PaliGemma 2: one SigLIP crop per image, prefix attention, positions that start at 1."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models import scoring
from clustrs.models.adapters import towers
from clustrs.models.adapters.base import Adapter, Modality, VisualTokens, token_rows
from clustrs.models.adapters.registry import register_adapter
from clustrs.models.clock import Clock
from clustrs.models.compaction import KeptTokens
from clustrs.models.flops import PatchGrid
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@register_adapter
class PaliGemmaAdapter(Adapter):
    """PaliGemma, on Gemma or Gemma 2. Token types, which mark the prefix, follow the compacted prompt."""

    model_types = ("paligemma",)
    tokens_per_image = "256, 1024 or 4096 (224, 448 or 896 px)"
    tested = "PaliGemma and PaliGemma 2; several images, batches"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    counts_vision = True
    first_position: ClassVar[int] = 1

    def listened_layer(self) -> Any:
        tower = self.inner.vision_tower
        if towers.has_cls(tower):
            kind = tower.config.model_type
            raise ValueError(f"vision tower {kind!r} has a CLS token: a {self.config.model_type} model needs SigLIP")
        return towers.attention_layer(tower, -1)

    def encode(self, inputs: dict[str, Any], clock: Clock, crops: Crops = "all") -> list[VisualTokens]:
        if inputs.get("pixel_values_videos") is not None:
            kind = self.config.model_type
            raise ValueError(f"pixel_values_videos: a {kind} model takes no videos, give their frames as images")
        pixels, counts = inputs["pixel_values"], self.crop_counts(inputs)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        fed = [1] * len(counts) if crops == "base" else counts
        if crops == "base":
            pixels = pixels[starts]
        with clock.time("vision"), scoring.listen(self.listened_layer(), "received", clock) as listener:
            out = self.inner.get_image_features(pixels, return_dict=True)
        with clock.time("scoring"):
            scores, keys = towers.heard(listener)
            maps = (out.pooler_output, *map(self.pooled, (scores[..., None], out.last_hidden_state, keys)))
            images = zip(*(part.split(fed) for part in maps), counts, strict=True)
            return [self.image(*parts) for parts in images]

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        """How many crops each image has."""
        return [1] * len(inputs["pixel_values"])

    def pooled(self, patches: Tensor) -> Tensor:
        """A map of patches [C, P, F] as a map of tokens [C, N, F]."""
        return patches

    def project(self, hidden: Tensor) -> Tensor:
        """The features of pooled hidden states."""
        features: Tensor = self.inner.multi_modal_projector(hidden)
        return features

    def image(self, features: Tensor, scores: Tensor, hidden: Tensor, keys: Tensor, crops: int) -> VisualTokens:
        """One image of `crops` crops, from the maps [C, N, F] of those that were encoded."""
        fed, cells = features.shape[:2]
        side = int(cells**0.5)
        index = torch.arange(fed * cells, device=features.device)
        return VisualTokens(
            features.flatten(0, 1),
            index,
            scores.flatten(),
            Layout(index // cells, index % cells // side, index % side),
            [(side, side)] * fed,
            crops * cells,
            hidden.flatten(0, 1),
            keys.flatten(0, 1),
            project=self.project,
        )

    def outputs(self, kept: Sequence[KeptTokens], modality: Modality) -> Any:
        return token_rows(kept)

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        tower = config.vision_config
        patches, _ = towers.tower_tokens(tower)
        return towers.tower_flops(tower), 2 * patches * tower.hidden_size * config.projection_dim
