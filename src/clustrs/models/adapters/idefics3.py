"""SmolVLM and Idefics3: crops in rows and columns with text before each, then the whole image.

Every crop has its own run of placeholders. `<fake_token_around_image>` stands once before each crop and once after the
last one of an image, which is how the crops of two images are told apart. The frames of a video come as images of one
crop; nothing in the model's input tells them apart from images.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models.adapters import towers
from clustrs.models.adapters.registry import register_adapter
from clustrs.models.adapters.tiles import EncodedTiles, TiledAdapter, placeholder_runs
from clustrs.models.clock import Clock
from clustrs.models.compaction import mismatch
from clustrs.models.flops import PatchGrid, attention_flops, check_known

VISION_TYPES = ("idefics3_vision", "smolvlm_vision")


@register_adapter
class Idefics3Adapter(TiledAdapter):
    """Idefics3 and SmolVLM, also SmolVLM2."""

    model_types = ("idefics3", "smolvlm")
    tokens_per_image = "(side / patch)^2 / scale^2 per crop"
    tested = "several images, batches, crops; a frame of a video is an image"
    takes_video = "frames as images"
    counts_vision = True
    reduction = "received"
    text_between = True
    consumed: ClassVar[tuple[str, ...]] = ("pixel_attention_mask",)

    def listened_layer(self) -> Any:
        return towers.attention_layer(self.inner.vision_model, -1)

    def projector(self) -> Any:
        return self.inner.connector.modality_projection

    def tile_pixels(self, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """All crops but those that are zero everywhere, which fill up the shorter prompts of a batch."""
        pixels, mask = inputs["pixel_values"].flatten(0, 1), inputs.get("pixel_attention_mask")
        real = (pixels != 0).flatten(1).any(1)
        return pixels[real], {} if mask is None else {"pixel_attention_mask": mask.flatten(0, 1)[real]}

    def tile_side(self, pixels: Tensor) -> int:
        return int(pixels.shape[-1] // self.config.vision_config.patch_size // self.config.scale_factor)

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        counts = []
        for ids, runs in zip(input_ids.tolist(), placeholder_runs(input_ids, self.placeholder("image")), strict=True):
            wrong = [stop - start for start, stop in runs if stop - start != tokens]
            if wrong:
                raise mismatch(wrong[0], tokens)
            counts += crops_per_image(ids, runs)
        return counts

    def encode_tiles(self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], clock: Clock) -> EncodedTiles:
        along = {name: part[:, None] for name, part in along.items()}
        with clock.time("vision"), self.listen(self.listened_layer(), clock) as listener:
            out = self.inner.get_image_features(pixel_values=pixels[:, None], return_dict=True, **along)
        with clock.time("scoring"):
            scores, keys = towers.heard(listener)
            features = out.pooler_output  # up to transformers 5.18 a tensor
            return EncodedTiles(
                features if isinstance(features, Tensor) else torch.stack(features),
                self.shuffle(scores[..., None]).mean(-1),
                self.shuffle(out.last_hidden_state),
                self.shuffle(keys),
            )

    def shuffle(self, patches: Tensor) -> Tensor:
        """A map [C, P, F] of patches as one [C, T, scale^2 F] of tokens, by the model's own code."""
        shuffled: Tensor = self.inner.connector.pixel_shuffle(patches, self.config.scale_factor)
        return shuffled

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        return {**super().take_images(inputs, indices), "input_ids": inputs["input_ids"][list(indices)]}

    def batch_images(self, images: Sequence[Any]) -> list[Any]:
        return [[image] for image in images]

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        vision = config.vision_config
        check_known(vision, VISION_TYPES, "vision_config")
        patches, width = (vision.image_size // vision.patch_size) ** 2, vision.hidden_size
        embedding = 2 * patches * width * vision.num_channels * vision.patch_size**2
        weights = width * (4 * width + 2 * vision.intermediate_size)
        layer = 2 * patches * weights + attention_flops(patches, patches, width)
        return embedding + vision.num_hidden_layers * layer, 2 * patches * width * config.text_config.hidden_size


def crops_per_image(ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
    """How many crops each image of a prompt has: the token after the last crop closes one image and opens the next."""
    if not runs:
        return []
    end = runs[-1][1]
    around = ids[end : end + 1]
    counts = [1]
    for (_, stop), (start, _) in pairwise(runs):
        marks = sum(ids[stop:start].count(token) for token in around)
        if marks == 0:
            raise ValueError(
                "input_ids: the crops of one image can't be told from those of another; give the prompt that the "
                "processor writes, with <fake_token_around_image> before each crop and after the last one of an image"
            )
        if marks == 1:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts
