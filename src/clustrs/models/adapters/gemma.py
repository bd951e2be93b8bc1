"""PaliGemma, PaliGemma 2 and Gemma 3: SigLIP towers; Gemma 3 pools patches and has pan-and-scan crops."""

from typing import Any

import torch
from torch import Tensor

from clustrs.models.adapters import base
from clustrs.models.adapters.base import Adapter, VisualTokens, register_adapter
from clustrs.models.scoring import StageTimer
from clustrs.validation import Crops


@register_adapter
class PaliGemmaAdapter(Adapter):
    """PaliGemma, on Gemma or Gemma 2. Token types, which mark the prefix, follow the compacted prompt."""

    model_types = ("paligemma",)
    auto_positions = "original"  # a checkpoint has one resolution, so every image had the same number of tokens
    tokens_per_image = "256, 1024 or 4096 (224, 448 or 896 px)"
    tested = "PaliGemma and PaliGemma 2; several images, batches"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    first_position = 1
    one_tensor = True

    def scoring_layer(self) -> Any:
        tower = self.inner.vision_tower
        if base.has_cls(tower):
            kind = tower.config.model_type
            raise ValueError(f"vision tower {kind!r} has a CLS token: a {self.config.model_type} model needs SigLIP")
        return base.attention_layer(tower, -1)

    def attention_layers(self) -> Any:
        return base.tower_layers(self.inner.vision_tower)

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        if inputs.get("pixel_values_videos") is not None:
            kind = self.config.model_type
            raise ValueError(f"pixel_values_videos: a {kind} model takes no videos, give their frames as images")
        pixels, counts = inputs["pixel_values"], self.crop_counts(inputs)
        encoded = counts
        if crops == "base":
            encoded = [1] * len(counts)
            pixels = pixels[[sum(counts[:i]) for i in range(len(counts))]]
        with timer.time("vision"), self.recording(self.scoring_layer(), "received", timer) as recorder:
            out = self.inner.get_image_features(pixels, return_dict=True)
        with timer.time("scoring"):
            scores, keys = base.recorded(recorder)
            more = base.recorded_more(recorder)
            patches = (scores[..., None], out.last_hidden_state, keys, *more.values())
            maps = (out.pooler_output, *map(self.pooled, patches))
            cells = maps[0].shape[1]
            side = int(cells**0.5)
            images = []
            for count, *parts in zip(counts, *(part.split(encoded) for part in maps), strict=True):
                features, scores, hidden, keys, *further = (part.flatten(0, 1) for part in parts)
                own = base.split_more(dict(zip(more, further, strict=True)))
                states = {"hidden": hidden, "keys": keys, "more": own, "project": self.project, "slots": count * cells}
                images.append(VisualTokens.on_grid(features, scores[:, 0], (side, side), **states))
            return images

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        return [1] * len(inputs["pixel_values"])

    def pooled(self, patches: Tensor) -> Tensor:
        """Return the map of tokens [C, N, F] of a map of patches [C, P, F]."""
        return patches

    def project(self, hidden: Tensor) -> Tensor:
        return self.inner.multi_modal_projector(hidden)


@register_adapter
class Gemma3Adapter(PaliGemmaAdapter):
    """Gemma 3. Scores, hidden states and keys are averaged over the patches of a token, as its own pooling does.

    With pan-and-scan an image has crops after the whole image, as many as `num_crops` says, which the image processor
    returns and the model's processor drops. Without it each crop counts as an image.
    """

    model_types = ("gemma3",)
    auto_positions = "original"  # every crop had 256 tokens in training
    tokens_per_image = "256 per crop"
    tested = "several images, batches, pan-and-scan"
    vision_kwargs = ("num_crops",)
    written_text = "Hereistheoriginalimage|andherearesomecropstohelpyouseebetter"
    first_position = 0
    nested_images = True

    def crop_counts(self, inputs: dict[str, Any]) -> list[int]:
        given, crops = inputs.get("num_crops"), len(inputs["pixel_values"])
        if given is None:
            return [1] * crops
        counts = [1 + int(n) for n in given]
        if sum(counts) != crops or min(counts, default=1) < 1:
            wanted = f"num_crops={[n - 1 for n in counts]}: with the images themselves that is {sum(counts)} crops"
            raise ValueError(f"{wanted}, but pixel_values has {crops}")
        return counts

    def pooled(self, patches: Tensor) -> Tensor:
        projector = self.inner.multi_modal_projector
        side = projector.patches_per_image
        pooled: Tensor = projector.avg_pool(patches.mT.unflatten(-1, (side, side)).contiguous())
        return pooled.flatten(2).mT

    def project(self, hidden: Tensor) -> Tensor:
        projector = self.inner.multi_modal_projector
        return torch.matmul(projector.mm_soft_emb_norm(hidden), projector.mm_input_projection_weight).type_as(hidden)
