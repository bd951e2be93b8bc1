"""Later calls on the KV cache of a pruned prompt: what callers count in the prompt they gave, as it fits the cache."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils

from clustrs.models.compaction import Compaction


@dataclass(frozen=True)
class Turn:
    """What a KV cache holds: the prompt that was given [B, S], and how it was compacted.

    `positions` [..., B, W] are those of the compacted prompt, for families that compute their own.
    """

    input_ids: Tensor
    compaction: Compaction
    positions: Tensor | None = None

    def continue_forward(self, arguments: dict[str, Any], compact_positions: bool, first_position: int = 0) -> None:
        """Make the caller's mask and positions, which count the whole prompt, fit the cache of the compacted one."""
        ids = arguments.get("input_ids")
        new = ids.shape[1] if ids is not None else arguments["inputs_embeds"].shape[1]
        held = arguments["past_key_values"].get_seq_length()
        before = self.compaction
        whole = before.extended(before.width + held + new - before.mask.shape[1])
        mask = arguments.get("attention_mask")
        if mask is None:
            arguments["attention_mask"] = whole.mask
        elif mask.dim() == 2 and mask.shape[1] == whole.width:
            arguments["attention_mask"] = whole.follow(mask, 0)
        elif mask.dim() == 2 and mask.shape[1] != held + new:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}: {whole.width} columns go with the prompt as given, "
                f"{held + new} with what is left of it after pruning"
            )
        positions = arguments.get("position_ids")
        if self.positions is not None:
            if positions is None:
                mask = arguments["attention_mask"]
                arguments["position_ids"] = self.following(mask if mask.dim() == 2 else whole.mask)[..., -new:]
        elif positions is not None and compact_positions:
            arguments["position_ids"] = positions - whole.dropped[:, -1:]
        elif positions is None and not compact_positions:
            columns = torch.arange(whole.width - new, whole.width, device=whole.source.device)
            arguments["position_ids"] = columns.expand(len(whole.source), new) + first_position

    def following(self, mask: Tensor) -> Tensor:
        """Positions [..., B, n] of the text that follows the prompt, under a mask [B, W + n]."""
        assert self.positions is not None
        *axes, batch, width = self.positions.shape
        end = (self.compaction.mask != 0).cumsum(1).argmax(1)
        ends = self.positions.gather(-1, end[:, None].expand(*axes, batch, 1))
        counted = ends.reshape(-1, batch, 1).amax(0) + mask[:, width:].long().cumsum(1)
        return counted.expand(*axes, batch, -1)

    def continue_prompt(self, input_ids: Tensor, mask: Tensor, placeholders: list[int]) -> "Turn":
        """Compact the longer prompt of the next turn as the cache is."""
        width = self.input_ids.shape[1]
        begins = len(input_ids) == len(self.input_ids) and torch.equal(input_ids[:, :width], self.input_ids)
        if input_ids.shape[1] <= width or not begins:
            raise ValueError("past_key_values: the prompt must begin with the one that the cache was made with")
        if any(bool((input_ids[:, width:] == token).any()) for token in placeholders):
            raise ValueError("past_key_values: a new image can't be added to the cache; leave the cache out")
        compaction = self.compaction.extended(input_ids.shape[1])
        compaction = replace(compaction, mask=compaction.follow(mask, 0))
        positions = self.positions
        if positions is not None:
            positions = torch.cat([positions, self.following(compaction.mask)], -1)
        return Turn(input_ids, compaction, positions)


def moved_indices(requested: Any, compaction: Compaction) -> Any:
    """`logits_to_keep`: positions in the prompt that was given, as positions in the compacted one."""
    if not isinstance(requested, Tensor):
        return requested
    if requested.dtype == torch.bool:
        moved = compaction.follow(requested, False)
        if int(moved.sum()) != int(requested.sum()):
            raise ValueError("logits_to_keep: it names a visual token that was dropped, or padding")
        return moved
    width, batch = compaction.width, len(compaction.source)
    rows = requested.expand(batch, -1) if requested.dim() == 1 else requested
    rows = torch.where(rows < 0, rows + width, rows)
    if bool(((rows < 0) | (rows >= width)).any()):
        raise ValueError(f"logits_to_keep: give positions from 0 to {width - 1}")
    new = torch.full((batch, width), -1, device=rows.device)
    row, column = compaction.valid.nonzero().unbind(1)
    new[row, compaction.source[row, column]] = column
    moved = new.gather(1, rows)
    if bool((moved < 0).any()):
        raise ValueError("logits_to_keep: it names a visual token that was dropped, or padding")
    if requested.dim() == 1 and bool((moved == moved[0]).all()):
        return moved[0]
    if not hasattr(modeling_utils, "slice_logits_to_keep"):
        raise ValueError("logits_to_keep: the prompts differ in length after pruning, which needs a newer transformers")
    return moved
