"""InternVL, SmolVLM and Idefics3: square tiles of an image, followed by the whole image scaled down.

A token stands for several patches of the tower (pixel shuffle). Its score is the mean of its patches', its hidden
state and its key are theirs side by side, as the projector reads them. Frames of a video come as images of one tile.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clustrs import validation
from clustrs.models.adapters import base
from clustrs.models.adapters.base import Chosen, PatchGrid, Source, VisualTokens, attention_layer, register_adapter
from clustrs.models.prompt import mismatch
from clustrs.models.scoring import Reduction, StageTimer
from clustrs.pruners.inputs import FURTHER, Layout
from clustrs.validation import Crops

VISION_TYPE = "internvl_vision"


@register_adapter
class InternVLAdapter(base.Adapter):
    """InternVL 2.5, 3 and 3.5, in the `-hf` form of their checkpoints. The last of several tiles is the whole image."""

    model_types: ClassVar[tuple[str, ...]] = ("internvl",)
    auto_positions: ClassVar[Chosen] = "compact"  # trained on 1 to 12 tiles, prompts of many lengths
    tokens_per_image = "256 per tile (448 px)"
    tested = "several images, batches, tiles; a frame of a video is an image"
    takes_video = "frames as images"
    vision_kwargs: ClassVar[tuple[str, ...]] = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy")
    written_text = r"Frame\d+:"
    one_tensor = True
    reduction: ClassVar[Reduction] = "cls"
    text_between: ClassVar[bool] = False  # True if the prompt has text between the tiles of an image

    def scoring_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        tower = self.inner.vision_tower
        kind = tower.config.model_type
        if kind != VISION_TYPE:
            raise ValueError(f"vision tower {kind!r} is not supported: {VISION_TYPE!r} is; for others use select(...)")
        return attention_layer(tower, base.setting(self.config, inputs or {}, "vision_feature_layer"))

    def attention_layers(self) -> Any:
        return base.tower_layers(self.inner.vision_tower)

    def tile_pixels(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the pixels [C, 3, H, W] of all tiles, in the order of the prompts, and further per-tile arguments."""
        return {"pixel_values": inputs["pixel_values"]}

    def tile_side(self, pixels: Tensor) -> int:
        """Return how many tokens lie side by side in a tile."""
        return int(pixels.shape[-1] // self.config.vision_config.patch_size[0] * self.config.downsample_ratio)

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        """Return the number of tiles of each image, from its placeholders; a tile has `tokens` of them."""
        counts = []
        for start, stop in chain.from_iterable(self.placeholder_runs(input_ids)):
            if (stop - start) % tokens:
                raise mismatch(stop - start, tokens)
            counts.append((stop - start) // tokens)
        return counts

    def placeholder_runs(self, input_ids: Tensor) -> list[list[tuple[int, int]]]:
        """Return start and end of every run of placeholders in each prompt."""
        is_slot = nn.functional.pad((input_ids == self.placeholder("image")).long(), (1, 1))
        edges = is_slot.diff(dim=1).nonzero().tolist()
        runs: list[list[tuple[int, int]]] = [[] for _ in input_ids]
        for (row, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
            runs[row].append((start, stop))
        return runs

    def run_tower(self, tiles: dict[str, Tensor], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return features [C, T, D] of tiles, and the hidden states [C, (1 +) P, H] before the projector."""
        names = ("vision_feature_layer", "vision_feature_select_strategy")
        layer, strategy = settings = [base.setting(self.config, inputs, name) for name in names]
        validation.check(strategy == "default", names[1], "'default' for this tower", strategy)
        out = self.inner.get_image_features(**tiles, **dict(zip(names, settings, strict=True)), return_dict=True)
        return out.pooler_output, out.last_hidden_state if layer == -1 else out.hidden_states[layer]

    def shuffle(self, patches: Tensor) -> Tensor:
        """Return a map [C, P, F] of patches as one [C, T, 4 F] of tokens, by the model's own code."""
        side = int(patches.shape[1] ** 0.5)
        return self.inner.pixel_shuffle(patches.unflatten(1, (side, side)), self.config.downsample_ratio).flatten(1, 2)

    def encode_tiles(self, tiles: dict[str, Tensor], inputs: dict[str, Any], timer: StageTimer) -> dict[str, Tensor]:
        """Return features, scores, states and further inputs [C, T, ...] of tiles, and cls_hidden and cls_keys."""
        layer = self.scoring_layer(inputs)
        with timer.time("vision"), self.recording(layer, self.reduction, timer) as recorder:
            features, hidden = self.run_tower(tiles, inputs)
        with timer.time("scoring"):
            scores, keys = base.recorded(recorder)
            encoded = {"features": features, "scores": self.shuffle(scores[..., None]).mean(-1)}
            first = int(self.reduction == "cls")
            for name, part in (("hidden", hidden), ("keys", keys)):
                encoded[name] = self.shuffle(part[:, first:])
                encoded[f"cls_{name}"] = part[:, :first].repeat(1, 1, encoded[name].shape[-1] // part.shape[-1])
            return encoded | {name: self.shuffle(part) for name, part in base.recorded_more(recorder).items()}

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        tiles = self.tile_pixels(inputs)
        total, _, height, width = tiles["pixel_values"].shape
        if height != width:
            raise ValueError(f"pixel_values has tiles of {height} x {width} pixels: square ones are needed")
        side = self.tile_side(tiles["pixel_values"])
        counts = inputs.get("tile_counts")
        if counts is None:
            ids = inputs["input_ids"]
            slots = int((ids == self.placeholder("image")).sum())
            if slots != total * side**2:
                raise mismatch(slots, total * side**2)
            counts = self.tile_counts(ids, side**2)
        used = counts
        if crops == "base":
            last = (torch.tensor(counts).cumsum(0) - 1).to(tiles["pixel_values"].device)
            tiles, used = {name: part[last] for name, part in tiles.items()}, [1] * len(counts)
        encoded = self.encode_tiles(tiles, inputs, timer)
        with timer.time("scoring"):
            images = []
            for count, n, *parts in zip(counts, used, *(part.split(used) for part in encoded.values()), strict=True):
                part = dict(zip(encoded, parts, strict=True))
                cls = {name: part.pop(name).roll(1, 0) for name in ("cls_hidden", "cls_keys")}  # tile 0 comes first
                flat: dict[str, Any] = {name: values.flatten(0, 1) for name, values in part.items()}
                flat["more"] = base.split_more({name: flat.pop(name) for name in FURTHER if name in flat})
                row = torch.arange(n * side**2, device=flat["features"].device)
                run, cell = row // side**2, row % side**2
                others = {
                    "layout": Layout((run + 1) % n, cell // side, cell % side),
                    "slots": count * side**2,
                    "places": row + (count - n) * side**2,
                    "runs": run if self.text_between else None,
                    "project": self.projectors()[0],
                }
                images.append(VisualTokens.on_grid(grid=(side, side), **flat, **cls, **others))
            return images

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        tiles = self.tile_pixels(inputs)
        counts = self.tile_counts(inputs["input_ids"], self.tile_side(tiles["pixel_values"]) ** 2)
        some = [sum(counts[:i]) + tile for i in indices for tile in range(counts[i])]
        return {**{name: part[some] for name, part in tiles.items()}, "tile_counts": [counts[i] for i in indices]}

    def image_sources(self, inputs: dict[str, Any]) -> list[Source]:
        tokens = self.tile_side(inputs["pixel_values"]) ** 2
        return [Source("image", count * tokens) for count in self.tile_counts(inputs["input_ids"], tokens)]


@register_adapter
class Idefics3Adapter(InternVLAdapter):
    """Idefics3 and SmolVLM, also SmolVLM2: as InternVL, with text around each tile and no CLS token."""

    model_types = ("idefics3", "smolvlm")
    auto_positions = "original"  # every tile had the same number of tokens after its marker in training
    tokens_per_image = "(side / patch)^2 / scale^2 per crop"
    tested = "several images, batches, crops; a frame of a video is an image"
    vision_kwargs = ("pixel_attention_mask",)
    written_text = r"(Youareprovidedthefollowingseriesof\S+framesfroma\S+video\.)?Framefrom\d\d:\d\d:"
    nested_images = True
    reduction = "received"
    text_between = True

    def scoring_layer(self, inputs: dict[str, Any] | None = None) -> Any:
        return attention_layer(self.inner.vision_model, -1)

    def attention_layers(self) -> Any:
        return base.tower_layers(self.inner.vision_model)

    def projectors(self) -> list[nn.Module]:
        return [self.inner.connector.modality_projection]

    def tile_pixels(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return all tiles but those that are zero everywhere, which fill up the shorter prompts of a batch."""
        names = [name for name in ("pixel_values", "pixel_attention_mask") if inputs.get(name) is not None]
        real = (inputs["pixel_values"].flatten(0, 1) != 0).flatten(1).any(1)
        return {name: inputs[name].flatten(0, 1)[real] for name in names}

    def tile_side(self, pixels: Tensor) -> int:
        return int(pixels.shape[-1] // self.config.vision_config.patch_size // self.config.scale_factor)

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        """Return the tiles of each image: the token after a prompt's last one closes one image and opens the next."""
        counts: list[int] = []
        for ids, runs in zip(input_ids.tolist(), self.placeholder_runs(input_ids), strict=True):
            wrong = [stop - start for start, stop in runs if stop - start != tokens]
            if wrong:
                raise mismatch(wrong[0], tokens)
            counts += [1] if runs else []
            around = ids[runs[-1][1] : runs[-1][1] + 1] if runs else []
            for (_, stop), (start, _) in pairwise(runs):
                marks = sum(ids[stop:start].count(token) for token in around)
                if marks == 0:
                    raise ValueError("input_ids must be the prompt that the processor writes, with marks around crops")
                if marks == 1:
                    counts[-1] += 1
                else:
                    counts.append(1)
        return counts

    def run_tower(self, tiles: dict[str, Tensor], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        nested = {name: part[:, None] for name, part in tiles.items()}
        out = self.inner.get_image_features(**nested, return_dict=True)
        features = out.pooler_output  # up to transformers 5.18 a tensor
        return features if isinstance(features, Tensor) else torch.stack(features), out.last_hidden_state

    def shuffle(self, patches: Tensor) -> Tensor:
        return self.inner.connector.pixel_shuffle(patches, self.config.scale_factor)

    def encode_blank(self, grid: PatchGrid | None) -> None:
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        mask = torch.ones(1, side, side, dtype=torch.bool)
        out = self.inner.vision_model(pixel_values=base.blank_pixels(vision), patch_attention_mask=mask)
        self.inner.connector(out.last_hidden_state)

    def take_images(self, inputs: dict[str, Any], indices: Sequence[int]) -> dict[str, Any]:
        taken = super().take_images(inputs, indices)
        return {name: part if name == "tile_counts" else part[None] for name, part in taken.items()}
