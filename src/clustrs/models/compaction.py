"""The second door: prompts shortened to their text and the placeholders of the visual tokens that survive.

Each survivor keeps its own placeholder. What runs along with the ids (mask, positions of any rank, labels, token types)
is shortened in the same way, and padding that no row needs any more goes, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptTokens:
    """What one image feeds after pruning: its features [k, D], the `slots` [k] they take (ascending, counted within the
    image's `total` placeholders), and the `own` slots [k] they came from, whose positions they have."""

    features: Tensor
    slots: Tensor
    own: Tensor
    total: int
    planes: Tensor | None = None


@dataclass(frozen=True)
class Compaction:
    """Where everything went: `source` [B, W] is the column that each new column had, `valid` where it is no padding.

    `own` [B, W] is the column whose position a token has; it differs from `source` for tokens that stand for others.
    `dropped` [B, W] is how many visual tokens are gone before a column. `width` is how many columns there were before,
    `mask` [B, W] the new attention mask.
    """

    source: Tensor
    valid: Tensor
    own: Tensor
    dropped: Tensor
    mask: Tensor
    width: int

    def follow(self, along: Tensor, filler: Any) -> Tensor:
        """Shorten a tensor [..., B, S] that runs along with the ids."""
        return self._take(along, self.source).masked_fill(~self.valid, filler)

    def positions(self, positions: Tensor) -> Tensor:
        """The positions [..., B, W] that the survivors had among [..., B, S]."""
        return self._take(positions, self.own).masked_fill(~self.valid, 0)

    def extended(self, width: int) -> "Compaction":
        """The same for a prompt that continues, up to `width` columns, without images in what is new."""
        batch, more = len(self.source), width - self.width
        new = torch.arange(self.width, width, device=self.source.device).expand(batch, more)
        real = torch.ones_like(new, dtype=torch.bool)
        return replace(
            self,
            source=torch.cat([self.source, new], 1),
            valid=torch.cat([self.valid, real], 1),
            own=torch.cat([self.own, new], 1),
            dropped=torch.cat([self.dropped, self.dropped.amax(1, keepdim=True).expand(batch, more)], 1),
            mask=torch.cat([self.mask, torch.ones_like(new, dtype=self.mask.dtype)], 1),
            width=width,
        )

    def _take(self, along: Tensor, columns: Tensor) -> Tensor:
        return along.gather(-1, columns.expand(*along.shape[:-1], -1))


def mismatch(tokens: int, features: int) -> ValueError:
    """The error that transformers raises for a prompt that does not fit its images."""
    return ValueError(f"Image features and image tokens do not match, tokens: {tokens}, features: {features}")


def compact(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    images: Sequence[tuple[int, Sequence[KeptTokens]]],
    *,
    pad_left: bool,
) -> Compaction:
    """Find the columns that stay. `images` pairs a placeholder's id with the images that fill it, in order."""
    batch, width = input_ids.shape
    keep = torch.ones_like(input_ids, dtype=torch.bool)
    own = torch.arange(width, device=input_ids.device).repeat(batch, 1)
    for token_id, kept in images:
        is_slot = input_ids == token_id
        if not torch.compiler.is_compiling():
            _check_fit(is_slot, kept)
        keep = keep.masked_scatter(is_slot, torch.cat([_kept_mask(image) for image in kept]))
        if any(image.own is not image.slots for image in kept):
            own = own.masked_scatter(is_slot, _own_columns(is_slot, kept))
    gone = (~keep).cumsum(1)
    compiling = torch.compiler.is_compiling()
    if attention_mask is not None and not compiling:
        keep &= _inside(attention_mask)
    lengths = keep.sum(1)
    new_width = _static_width(input_ids, images) if compiling else int(lengths.max())
    order = keep.long().argsort(dim=1, stable=True, descending=not pad_left)
    source = order[:, width - new_width :] if pad_left else order[:, :new_width]
    place = torch.arange(new_width, device=input_ids.device)
    valid = place >= new_width - lengths[:, None] if pad_left else place < lengths[:, None]
    source = source.masked_fill(~valid, 0)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    new_mask = mask.gather(1, source).masked_fill(~valid, 0)
    return Compaction(source, valid, own.gather(1, source), gone.gather(1, source), new_mask, width)


def _check_fit(is_slot: Tensor, kept: Sequence[KeptTokens]) -> None:
    """Every image has its placeholders, all in one prompt."""
    per_row = is_slot.sum(1).tolist()
    expected = sum(image.total for image in kept)
    if sum(per_row) != expected:
        raise mismatch(sum(per_row), expected)
    left, row = 0, -1
    for image in kept:
        while left == 0 and row + 1 < len(per_row):
            row += 1
            left = per_row[row]
        if left < image.total:
            raise mismatch(per_row[row], image.total)
        left -= image.total


def _kept_mask(image: KeptTokens) -> Tensor:
    mask = torch.zeros(image.total, dtype=torch.bool, device=image.slots.device)
    return mask.index_fill(0, image.slots, True)


def _own_columns(is_slot: Tensor, kept: Sequence[KeptTokens]) -> Tensor:
    """For each slot, in order, the column of the slot whose position its token has."""
    columns = is_slot.nonzero()[:, 1]
    source = torch.arange(len(columns), device=columns.device)
    start = 0
    for image in kept:
        source[start + image.slots] = start + image.own
        start += image.total
    return columns[source]


def _inside(mask: Tensor) -> Tensor:
    """All but the padding at either end; what is masked out in the middle keeps its column."""
    real = mask != 0
    return (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0) | ~real.any(1, keepdim=True)


def _static_width(input_ids: Tensor, images: Sequence[tuple[int, Sequence[KeptTokens]]]) -> int:
    """The new width where the ids cannot be looked at: every prompt has equally many images, of equal size."""
    dropped = sum(image.total - len(image.slots) for _, kept in images for image in kept)
    if dropped % len(input_ids):
        raise ValueError("compiled with a batch of prompts: give each the same number of images")
    return input_ids.shape[1] - dropped // len(input_ids)


def take_slots(indices: Tensor, candidates: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The slots [k] that selected tokens take, ascending and distinct, and the slots [k] they came from.

    A token that stands for no candidate (index -1: a CLS token) comes from the first slot, and takes a free one.
    """
    own = candidates[indices.clamp(min=0)]
    taken = torch.zeros(total, dtype=torch.long, device=own.device).index_fill(0, own, 1)
    if torch.compiler.is_compiling() or bool((indices < 0).any()) or bool((own[1:] <= own[:-1]).any()):
        free_last = (1 - taken).argsort(dim=0, stable=True)
        return free_last[: len(own)].sort().values, own
    return own, own
