"""The second door: the placeholders of images in a batch of prompts, compacted to what is kept of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Kept:
    """What one image feeds: its rows [k, D], and which of its `placeholders` each of them stands for."""

    rows: Tensor
    places: Tensor
    placeholders: int


@dataclass(frozen=True)
class Prompts:
    """A compacted batch. `source` [B, S'] is the column that each place had before, `valid` where it is no padding.

    `original` [B, S'] are the position ids that the survivors had, `moved` by how much they have to go down to close
    the gaps.
    """

    input_ids: Tensor
    inputs_embeds: Tensor
    attention_mask: Tensor
    source: Tensor
    valid: Tensor
    original: Tensor
    moved: Tensor

    def follow(self, along: Tensor, filler: Any) -> Tensor:
        """A per-token tensor [B, S] of the caller's, compacted along."""
        return along.gather(1, self.source).masked_fill(~self.valid, filler)


def mismatch(tokens: int, features: int) -> ValueError:
    """The error that transformers raises for a prompt that does not fit its images."""
    return ValueError(f"Image features and image tokens do not match, tokens: {tokens}, features: {features}")


def compact(
    input_ids: Tensor,
    embeddings: Tensor,
    attention_mask: Tensor | None,
    images: list[tuple[int, list[Kept]]],
    *,
    positions: Tensor,
    pad_id: int,
    pad_left: bool,
) -> Prompts:
    """Shorten every prompt to its text and the kept rows of its images, and pad the batch again.

    `images` pairs a placeholder's id with the images that fill it, in order. `embeddings` [B, S, D] are those of
    all ids, `positions` [B, S] the position ids before.
    """
    batch = len(input_ids)
    keep = torch.ones_like(input_ids, dtype=torch.bool)
    embeddings = embeddings.clone()
    positions = positions.clone()
    for token_id, kept in images:
        places = (input_ids == token_id).nonzero()
        expected = sum(image.placeholders for image in kept)
        if len(places) != expected:
            raise mismatch(len(places), expected)
        start = 0
        for image in kept:
            mine = places[start : start + image.placeholders]
            start += image.placeholders
            row, columns = mine[0, 0], mine[:, 1]
            if (mine[:, 0] != row).any():
                raise mismatch(int((input_ids[row] == token_id).sum()), image.placeholders)
            k = len(image.rows)
            keep[row, columns[k:]] = False
            embeddings[row, columns[:k]] = image.rows.to(embeddings)
            positions[row, columns[:k]] = positions[row, columns[image.places]]
    lengths = keep.sum(1)
    width = int(lengths.max())
    order = torch.arange(width, device=input_ids.device).expand(batch, width)
    valid = order >= width - lengths[:, None] if pad_left else order < lengths[:, None]
    source = torch.zeros(batch, width, dtype=torch.long, device=input_ids.device)
    source[valid] = keep.nonzero()[:, 1]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return Prompts(
        input_ids.gather(1, source).masked_fill(~valid, pad_id),
        embeddings.gather(1, source[..., None].expand(-1, -1, embeddings.shape[-1])),
        mask.gather(1, source).masked_fill(~valid, 0),
        source,
        valid,
        positions.gather(1, source).masked_fill(~valid, 0),
        (~keep).cumsum(1).gather(1, source).masked_fill(~valid, 0),
    )
