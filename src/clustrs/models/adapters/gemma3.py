"""Gemma 3: SigLIP patches pooled to 256 tokens a crop, bidirectional attention within a crop, pan-and-scan."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models.adapters import towers
from clustrs.models.adapters.paligemma import PaliGemmaAdapter
from clustrs.models.adapters.registry import register_adapter
from clustrs.models.flops import PatchGrid


@register_adapter
class Gemma3Adapter(PaliGemmaAdapter):
    """Gemma 3. Scores, hidden states and keys are averaged over the patches of a token, as its own pooling does.

    With pan-and-scan an image has crops after the whole image, each a run of placeholders with text in between.
    `num_crops`, how many these are for each image, is what the image processor returns under that name; the model's
    processor drops it. Without it each crop counts as an image.
    """

    model_types = ("gemma3",)
    tokens_per_image = "256 per crop"
    tested = "several images, batches, pan-and-scan"
    consumed: ClassVar[tuple[str, ...]] = ("num_crops",)
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

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        tower = config.vision_config
        projector = 2 * config.mm_tokens_per_image * tower.hidden_size * config.text_config.hidden_size
        return towers.tower_flops(tower), projector
