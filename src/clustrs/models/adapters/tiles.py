"""What families have in common that cut an image into square tiles and put the whole image, made small, after them.

`patches x patches` of a tower become one visual token (pixel shuffle). A token's score is the mean of its patches', its
hidden state and its key are theirs side by side, as the projector reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clustrs.models import scoring
from clustrs.models.adapters.base import Adapter, Modality, VisualTokens, token_rows
from clustrs.models.clock import Clock
from clustrs.models.compaction import KeptTokens, mismatch
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
    """Whether the prompt has text between the tiles of an image."""

    def tile_pixels(self, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The pixels [C, 3, H, W] of all tiles, in the order of the prompts, and what else runs along with them."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_pixels")

    def tile_side(self, pixels: Tensor) -> int:
        """How many tokens lie side by side in a tile."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_side")

    def tile_counts(self, input_ids: Tensor, tokens: int) -> list[int]:
        """How many tiles, of so many tokens each, every image has, as the prompts say."""
        raise NotImplementedError(f"{type(self).__name__} must define tile_counts")

    def encode_tiles(self, pixels: Tensor, along: dict[str, Any], inputs: dict[str, Any], clock: Clock) -> EncodedTiles:
        """Run the tower and the projector over some tiles."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_tiles")

    def projector(self) -> Any:
        """Maps hidden states of tokens to features."""
        raise NotImplementedError(f"{type(self).__name__} must define projector")

    def listen(self, layer: Any, clock: Clock) -> Any:
        return scoring.listen(layer, self.reduction, clock)

    def encode(self, inputs: dict[str, Any], clock: Clock, crops: Crops = "all") -> list[VisualTokens]:
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
        encoded = self.encode_tiles(pixels, along, inputs, clock)
        with clock.time("scoring"):
            starts = [sum(encoded_counts[:i]) for i in range(len(counts))]
            parts = zip(starts, encoded_counts, counts, strict=True)
            return [self.image(encoded, start, tiles, total, side) for start, tiles, total in parts]

    def outputs(self, kept: Sequence[KeptTokens], modality: Modality) -> Any:
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
            features,
            row,
            encoded.scores[subset].flatten(),
            Layout((run + 1) % tiles, cell // side, cell % side),
            [(side, side)] * tiles,
            total * side**2,
            encoded.hidden[subset].flatten(0, 1),
            encoded.keys[subset].flatten(0, 1),
            cls(encoded.cls_hidden),
            cls(encoded.cls_keys),
            self.projector(),
            first_slot=(total - tiles) * side**2,
            runs=run if self.text_between else None,
        )


def placeholder_runs(input_ids: Tensor, token: int) -> list[list[tuple[int, int]]]:
    """Where placeholders stand together in each prompt: start and end of every run."""
    is_slot = torch.nn.functional.pad((input_ids == token).long(), (1, 1))
    edges = is_slot.diff(dim=1).nonzero().tolist()
    runs: list[list[tuple[int, int]]] = [[] for _ in input_ids]
    for (row, start), (_, stop) in zip(edges[::2], edges[1::2], strict=True):
        runs[row].append((start, stop))
    return runs
