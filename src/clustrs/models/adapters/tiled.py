"""InternVL, SmolVLM and Idefics3: square tiles of an image, followed by the whole image scaled down.

A token stands for several patches of the tower (pixel shuffle). Its score is the mean of its patches', its hidden
state and its key are theirs side by side, as the projector reads them. Frames of a video come as images of one tile;
nothing in the model's input tells them apart from images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clustrs.models import scoring
from clustrs.models.adapters.base import (
    Adapter,
    Modality,
    PatchGrid,
    VisualTokens,
    attention_layer,
    blank_pixels,
    recorded,
    register_adapter,
    setting,
    token_rows,
)
from clustrs.models.prompt import PrunedImage, mismatch
from clustrs.models.scoring import StageTimer
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@dataclass(frozen=True)
class EncodedTiles:
    """All tiles of a call: features [C, T, D], scores [C, T], hidden states [C, T, H] and keys [C, T, K]; the CLS
    token's [C, 1, ...], where there is one."""

    features: Tensor
    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor | None = None
    cls_keys: Tensor | None = None


class TiledAdapter(Adapter):
    """One or more square tiles per image; if there are several, the last one shows the whole image."""

    reduction: ClassVar[scoring.Reduction]
    text_between: ClassVar[bool] = False
    """True if the prompt has text between the tiles of an image."""

    def tile_pixels(self, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the pixels [C, 3, H, W] of all tiles, in the order of the prompts, and further per-tile arguments."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_pixels")

    def tile_side(self, pixels: Tensor) -> int:
        """Return how many tokens lie side by side in a tile."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_side")

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        """Return the number of tiles of each image, from its placeholders; a tile has `tokens` of them."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_counts")

    def encode_tiles(
        self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], timer: StageTimer
    ) -> EncodedTiles:
        """Run the tower and the projector over some tiles."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_tiles")

    def projector(self) -> Any:
        """Maps hidden states of tokens to features."""
        raise NotImplementedError(f"{type(self).__name__} must define projector")

    def record(self, layer: Any, timer: StageTimer) -> Any:
        return scoring.record_scores(layer, self.reduction, timer)

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        pixels, along = self.tile_pixels(inputs)
        if pixels.shape[-1] != pixels.shape[-2]:
            height, width = pixels.shape[-2:]
            raise ValueError(f"pixel_values has tiles of {height} x {width} pixels: square ones are needed")
        side = self.tile_side(pixels)
        slots = int((inputs["input_ids"] == self.placeholder("image")).sum())
        if slots != len(pixels) * side**2:
            raise mismatch(slots, len(pixels) * side**2)
        counts = self.tile_counts(inputs["input_ids"], side**2)
        ends = torch.tensor(counts).cumsum(0)
        encoded_counts = counts
        if crops == "base":
            last = (ends - 1).to(pixels.device)
            pixels, along = pixels[last], {name: part[last] for name, part in along.items()}
            encoded_counts = [1] * len(counts)
        encoded = self.encode_tiles(pixels, along, inputs, timer)
        with timer.time("scoring"):
            starts = [sum(encoded_counts[:i]) for i in range(len(counts))]
            parts = zip(starts, encoded_counts, counts, strict=True)
            return [self.image(encoded, start, tiles, total, side) for start, tiles, total in parts]

    def outputs(self, kept: Sequence[PrunedImage], modality: Modality) -> Any:
        return token_rows(kept)

    def image(self, encoded: EncodedTiles, start: int, tiles: int, total: int, side: int) -> VisualTokens:
        """One image of `total` tiles, of which the last `tiles` are encoded.

        The whole image is tile 0; its CLS token comes first, too.
        """
        subset = slice(start, start + tiles)
        features = encoded.features[subset].flatten(0, 1)
        row = torch.arange(len(features), device=features.device)
        run, cell = row // side**2, row % side**2

        def cls(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[subset].roll(1, 0)

        return VisualTokens(
            features=features,
            candidates=row,
            scores=encoded.scores[subset].flatten(),
            layout=Layout((run + 1) % tiles, cell // side, cell % side),
            grids=[(side, side)] * tiles,
            slots=total * side**2,
            hidden=encoded.hidden[subset].flatten(0, 1),
            keys=encoded.keys[subset].flatten(0, 1),
            cls_hidden=cls(encoded.cls_hidden),
            cls_keys=cls(encoded.cls_keys),
            project=self.projector(),
            first_slot=(total - tiles) * side**2,
            runs=run if self.text_between else None,
        )


def placeholder_runs(input_ids: Tensor, token: int) -> list[list[tuple[int, int]]]:
    """Return start and end of every run of placeholders in each prompt."""
    is_slot = torch.nn.functional.pad((input_ids == token).long(), (1, 1))
    edges = is_slot.diff(dim=1).nonzero().tolist()
    runs: list[list[tuple[int, int]]] = [[] for _ in input_ids]
    for (row, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
        runs[row].append((start, stop))
    return runs


VISION_TYPE = "internvl_vision"


@register_adapter
class InternVLAdapter(TiledAdapter):
    """InternVL 2.5, 3 and 3.5, in the `-hf` form of their checkpoints."""

    model_types = ("internvl",)
    auto_positions = "compact"  # trained on 1 to 12 tiles, prompts of many lengths; as LLaVA-OneVision
    tokens_per_image = "256 per tile (448 px)"
    tested = "several images, batches, tiles; a frame of a video is an image"
    takes_video = "frames as images"
    reduction = "cls"
    vision_kwargs: ClassVar[tuple[str, ...]] = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy")

    def scoring_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        tower = self.inner.vision_tower
        kind = tower.config.model_type
        if kind != VISION_TYPE:
            raise ValueError(f"vision tower {kind!r} is not supported: {VISION_TYPE!r} is; for others use select(...)")
        return attention_layer(tower, setting(self.config, inputs or {}, "vision_feature_layer"))

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

    def encode_tiles(
        self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], timer: StageTimer
    ) -> EncodedTiles:
        layer = setting(self.config, inputs, "vision_feature_layer")
        strategy = setting(self.config, inputs, "vision_feature_select_strategy")
        if strategy != "default":
            raise ValueError(f"vision_feature_select_strategy must be 'default' for this tower, got {strategy!r}")
        with timer.time("vision"), self.record(self.scoring_layer(inputs), timer) as recorder:
            out = self.inner.get_image_features(
                pixel_values=pixels,
                vision_feature_layer=layer,
                vision_feature_select_strategy=strategy,
                return_dict=True,
            )
        with timer.time("scoring"):
            scores, keys = recorded(recorder)
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

    def encode_blank(self, grid: PatchGrid | None) -> None:
        self.inner.get_image_features(blank_pixels(self.config.vision_config))

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


VISION_TYPES = ("idefics3_vision", "smolvlm_vision")


@register_adapter
class Idefics3Adapter(TiledAdapter):
    """Idefics3 and SmolVLM, also SmolVLM2."""

    model_types = ("idefics3", "smolvlm")
    auto_positions = "original"  # every tile had the same number of tokens after its marker in training
    tokens_per_image = "(side / patch)^2 / scale^2 per crop"
    tested = "several images, batches, crops; a frame of a video is an image"
    takes_video = "frames as images"
    reduction = "received"
    text_between = True
    vision_kwargs: ClassVar[tuple[str, ...]] = ("pixel_attention_mask",)

    def scoring_layer(self) -> Any:
        return attention_layer(self.inner.vision_model, -1)

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

    def encode_tiles(
        self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], timer: StageTimer
    ) -> EncodedTiles:
        along = {name: part[:, None] for name, part in along.items()}
        with timer.time("vision"), self.record(self.scoring_layer(), timer) as recorder:
            out = self.inner.get_image_features(pixel_values=pixels[:, None], return_dict=True, **along)
        with timer.time("scoring"):
            scores, keys = recorded(recorder)
            features = out.pooler_output  # up to transformers 5.18 a tensor
            return EncodedTiles(
                features if isinstance(features, Tensor) else torch.stack(features),
                self.shuffle(scores[..., None]).mean(-1),
                self.shuffle(out.last_hidden_state),
                self.shuffle(keys),
            )

    def projectors(self) -> list[nn.Module]:
        return [self.inner.connector.modality_projection]

    def encode_blank(self, grid: PatchGrid | None) -> None:
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        mask = torch.ones(1, side, side, dtype=torch.bool)
        out = self.inner.vision_model(pixel_values=blank_pixels(vision), patch_attention_mask=mask)
        self.inner.connector(out.last_hidden_state)

    def shuffle(self, patches: Tensor) -> Tensor:
        """A map [C, P, F] of patches as one [C, T, scale^2 F] of tokens, by the model's own code."""
        shuffled: Tensor = self.inner.connector.pixel_shuffle(patches, self.config.scale_factor)
        return shuffled

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        return {**super().take_images(inputs, indices), "input_ids": inputs["input_ids"][list(indices)]}

    def batch_images(self, images: Sequence[Any]) -> list[Any]:
        return [[image] for image in images]


def crops_per_image(ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
    """Return the number of crops of each image: the token after the last crop closes one image and opens the next."""
    if not runs:
        return []
    end = runs[-1][1]
    around = ids[end : end + 1]
    counts = [1]
    for (_, stop), (start, _) in pairwise(runs):
        marks = sum(ids[stop:start].count(token) for token in around)
        if marks == 0:
            raise ValueError(
                "input_ids must be the prompt that the processor writes, with <fake_token_around_image> before each "
                "crop and after the last one of an image: the crops of one image can't be told from those of another"
            )
        if marks == 1:
            counts[-1] += 1
        else:
            counts.append(1)
    return counts
