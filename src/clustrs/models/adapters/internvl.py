"""InternVL: tiles with a CLS token each, 2 x 2 patches per visual token, all tiles of an image in one run.

The frames of a video come as images of one tile; nothing in the model's input tells them apart from images.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from clustrs.models.adapters import towers
from clustrs.models.adapters.base import setting
from clustrs.models.adapters.registry import register_adapter
from clustrs.models.adapters.tiles import EncodedTiles, TiledAdapter, placeholder_runs
from clustrs.models.clock import Clock
from clustrs.models.compaction import mismatch
from clustrs.models.flops import PatchGrid, attention_flops, check_known

VISION_TYPE = "internvl_vision"


@register_adapter
class InternVLAdapter(TiledAdapter):
    """InternVL 2.5, 3 and 3.5, in the `-hf` form of their checkpoints."""

    model_types = ("internvl",)
    tokens_per_image = "256 per tile (448 px)"
    tested = "several images, batches, tiles; a frame of a video is an image"
    takes_video = "frames as images"
    counts_vision = True
    reduction = "cls"
    consumed: ClassVar[tuple[str, ...]] = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy")

    def listened_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        tower = self.inner.vision_tower
        kind = tower.config.model_type
        if kind != VISION_TYPE:
            raise ValueError(f"vision tower {kind!r} is not supported: {VISION_TYPE!r} is; for others use select(...)")
        return towers.attention_layer(tower, setting(self.config, inputs or {}, "vision_feature_layer"))

    def projector(self) -> Any:
        return self.inner.multi_modal_projector

    def tile_pixels(self, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return inputs["pixel_values"], {}

    def tile_side(self, pixels: Tensor) -> int:
        return int(pixels.shape[-1] // self.config.vision_config.patch_size[0] * self.config.downsample_ratio)

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        counts = []
        for runs in placeholder_runs(input_ids, self.placeholder("image")):
            for start, stop in runs:
                if (stop - start) % tokens:
                    raise mismatch(stop - start, tokens)
                counts.append((stop - start) // tokens)
        return counts

    def encode_tiles(self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], clock: Clock) -> EncodedTiles:
        layer = setting(self.config, inputs, "vision_feature_layer")
        strategy = setting(self.config, inputs, "vision_feature_select_strategy")
        if strategy != "default":
            raise ValueError(f"vision_feature_select_strategy={strategy!r} does not suit this tower: give 'default'")
        with clock.time("vision"), self.listen(self.listened_layer(inputs), clock) as listener:
            out = self.inner.get_image_features(
                pixel_values=pixels,
                vision_feature_layer=layer,
                vision_feature_select_strategy=strategy,
                return_dict=True,
            )
        with clock.time("scoring"):
            scores, keys = towers.heard(listener)
            hidden = out.last_hidden_state if layer == -1 else out.hidden_states[layer]
            patches = round(1 / self.config.downsample_ratio) ** 2
            return EncodedTiles(
                out.pooler_output,
                self.shuffle(scores[..., None]).mean(-1),
                self.shuffle(hidden[:, 1:]),
                self.shuffle(keys[:, 1:]),
                hidden[:, :1].repeat(1, 1, patches),
                keys[:, :1].repeat(1, 1, patches),
            )

    def shuffle(self, patches: Tensor) -> Tensor:
        """A map [C, P, F] of patches as one [C, T, 4 F] of tokens, by the model's own code."""
        side = int(patches.shape[1] ** 0.5)
        shuffled: Tensor = self.inner.pixel_shuffle(patches.unflatten(1, (side, side)), self.config.downsample_ratio)
        return shuffled.flatten(1, 2)

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        ids, pixels = inputs["input_ids"], inputs["pixel_values"]
        counts = self.tile_counts(ids, self.tile_side(pixels) ** 2)
        tiles = [sum(counts[:i]) + tile for i in indices for tile in range(counts[i])]
        return {"pixel_values": pixels[tiles], "input_ids": ids[list(indices)]}

    @classmethod
    def vision_flops(cls, config: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
        vision = config.vision_config
        check_known(vision, [VISION_TYPE], "vision_config")
        patch = vision.patch_size[0] * vision.patch_size[1]
        patches, width = vision.image_size[0] * vision.image_size[1] // patch, vision.hidden_size
        tokens, merged = patches + 1, int(patches * config.downsample_ratio**2)
        embedding = 2 * patches * width * vision.num_channels * patch
        weights = width * (4 * width + 2 * vision.intermediate_size)
        layer = 2 * tokens * weights + attention_flops(tokens, tokens, width)
        out = config.text_config.hidden_size
        projector = 2 * merged * out * (round(width / config.downsample_ratio**2) + out)
        return embedding + vision.num_hidden_layers * layer, projector
