"""PaliGemma, PaliGemma 2 and Gemma 3: SigLIP towers; Gemma 3 pools patches and has pan-and-scan crops."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models import scoring
from clustrs.models.adapters.base import (
    Adapter,
    Modality,
    PatchGrid,
    VisualTokens,
    attention_layer,
    blank_pixels,
    has_cls,
    recorded,
    register_adapter,
    token_rows,
)
from clustrs.models.prompt import PrunedImage
from clustrs.models.scoring import StageTimer
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@register_adapter
class PaliGemmaAdapter(Adapter):
    """PaliGemma, on Gemma or Gemma 2. Token types, which mark the prefix, follow the compacted prompt."""

    model_types = ("paligemma",)
    auto_positions = "original"  # a checkpoint has one resolution, so every image had the same number of tokens
    tokens_per_image = "256, 1024 or 4096 (224, 448 or 896 px)"
    tested = "PaliGemma and PaliGemma 2; several images, batches"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    first_position: ClassVar[int] = 1

    def scoring_layer(self) -> Any:
        tower = self.inner.vision_tower
        if has_cls(tower):
            kind = tower.config.model_type
            raise ValueError(f"vision tower {kind!r} has a CLS token: a {self.config.model_type} model needs SigLIP")
        return attention_layer(tower, -1)

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        if inputs.get("pixel_values_videos") is not None:
            kind = self.config.model_type
            raise ValueError(f"pixel_values_videos: a {kind} model takes no videos, give their frames as images")
        pixels, counts = inputs["pixel_values"], self.crop_counts(inputs)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        fed = [1] * len(counts) if crops == "base" else counts
        if crops == "base":
            pixels = pixels[starts]
        with timer.time("vision"), scoring.record_scores(self.scoring_layer(), "received", timer) as recorder:
            out = self.inner.get_image_features(pixels, return_dict=True)
        with timer.time("scoring"):
            scores, keys = recorded(recorder)
            maps = (out.pooler_output, *map(self.pooled, (scores[..., None], out.last_hidden_state, keys)))
            images = zip(*(part.split(fed) for part in maps), counts, strict=True)
            return [self.image(*parts) for parts in images]

    def encode_blank(self, grid: PatchGrid | None) -> None:
        self.inner.get_image_features(blank_pixels(self.config.vision_config))

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        """Return the number of crops of each image."""
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
            features=features.flatten(0, 1),
            candidates=index,
            scores=scores.flatten(),
            layout=Layout(index // cells, index % cells // side, index % side),
            grids=[(side, side)] * fed,
            slots=crops * cells,
            hidden=hidden.flatten(0, 1),
            keys=keys.flatten(0, 1),
            project=self.project,
        )

    def outputs(self, kept: Sequence[PrunedImage], modality: Modality) -> Any:
        return token_rows(kept)


@register_adapter
class Gemma3Adapter(PaliGemmaAdapter):
    """Gemma 3. Scores, hidden states and keys are averaged over the patches of a token, as its own pooling does.

    With pan-and-scan an image has crops after the whole image, each a run of placeholders with text in between.
    `num_crops`, how many these are for each image, is what the image processor returns under that name; the model's
    processor drops it. Without it each crop counts as an image.
    """

    model_types = ("gemma3",)
    auto_positions = "original"  # every crop had 256 tokens in training
    tokens_per_image = "256 per crop"
    tested = "several images, batches, pan-and-scan"
    vision_kwargs: ClassVar[tuple[str, ...]] = ("num_crops",)
    first_position: ClassVar[int] = 0

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        given, crops = inputs.get("num_crops"), len(inputs["pixel_values"])
        if given is None:
            return [1] * crops
        counts = [1 + int(n) for n in given]
        if sum(counts) != crops or min(counts, default=1) < 1:
            raise ValueError(
                f"num_crops={[n - 1 for n in counts]}: with the images themselves that is {sum(counts)} crops, "
                f"but pixel_values has {crops}"
            )
        return counts

    def pooled(self, patches: Tensor) -> Tensor:
        projector = self.inner.multi_modal_projector
        side = projector.patches_per_image
        pooled: Tensor = projector.avg_pool(patches.mT.unflatten(-1, (side, side)).contiguous())
        return pooled.flatten(2).mT

    def project(self, hidden: Tensor) -> Tensor:
        projector = self.inner.multi_modal_projector
        normed = projector.mm_soft_emb_norm(hidden)
        return torch.matmul(normed, projector.mm_input_projection_weight).type_as(hidden)

    def batch_images(self, images: Sequence[Any]) -> list[Any]:
        return [[image] for image in images]
