"""Later calls on the KV cache of a pruned prompt: fit masks, positions and rows to what the cache holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, modeling_utils

from clustrs.models.inside import Columns
from clustrs.models.prompt import Compaction

TURN = "_clustrs_turn"  # the attribute of a cache that holds its `Turn`: copies and pickles of the cache have it, too


@dataclass(frozen=True)
class Turn:
    """Contents of a KV cache: the prompt that was given [B, S], and how it was compacted.

    `positions` [..., B, W] are those of the compacted prompt, for families that compute their own.
    `compact_positions` says whether the positions run on without gaps. `columns` are those that later layers of the
    language model read, where a method prunes inside it.
    """

    input_ids: Tensor
    compaction: Compaction
    positions: Tensor | None = None
    compact_positions: bool = True
    columns: tuple[Columns, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Turn":
        """Apply a function to every tensor: prompts and masks are [B, ...], positions [..., B, W]."""
        compaction, columns = self.compaction.map(change), tuple(one.map(change) for one in self.columns)
        positions = None if self.positions is None else change(self.positions.movedim(-2, 0)).movedim(0, -2)
        given: dict[str, Any] = {"compaction": compaction, "columns": columns, "positions": positions}
        return replace(self, input_ids=change(self.input_ids), **given)

    def crop(self, length: int) -> "Turn":
        """Follow a cache that was cropped to its first `length` columns."""
        compaction = self.compaction
        removed = compaction.mask.shape[1] - length
        if removed <= 0:
            return self
        width = compaction.width - removed
        last = torch.arange(width, compaction.width, device=compaction.source.device)
        if not bool(((compaction.source[:, length:] == last) & compaction.valid[:, length:]).all()):
            raise ValueError(f"crop must leave the images of the prompt in the cache, got {removed} columns to remove")
        shorter = self.map(lambda tensor: tensor[..., :length])
        compaction, columns = replace(shorter.compaction, width=width), tuple(one.crop(length) for one in self.columns)
        return replace(shorter, input_ids=self.input_ids[:, :width], compaction=compaction, columns=columns)

    def continue_forward(self, arguments: dict[str, Any], first_position: int = 0) -> None:
        """Make the caller's mask and positions, which count the whole prompt, fit the cache of the compacted one."""
        ids, before = arguments.get("input_ids"), self.compaction
        new = ids.shape[1] if ids is not None else arguments["inputs_embeds"].shape[1]
        held = arguments["past_key_values"].get_seq_length()
        whole = before.extended(before.width + held + new - before.mask.shape[1])
        mask = arguments.get("attention_mask")
        if mask is None:
            mask = whole.mask
        elif mask.dim() == 2 and mask.shape[1] == whole.width:
            mask = whole.gather(mask, 0)
        elif mask.dim() == 2 and mask.shape[1] != held + new:
            widths = f"{whole.width} columns, or after pruning {held + new}"
            raise ValueError(f"attention_mask must have {widths}, got shape {list(mask.shape)}")
        arguments["attention_mask"] = mask
        positions = arguments.get("position_ids")
        if self.positions is not None:
            if positions is None:
                arguments["position_ids"] = self.following(mask if mask.dim() == 2 else whole.mask)[..., -new:]
        elif positions is not None and self.compact_positions:
            arguments["position_ids"] = positions - whole.dropped[:, -1:]
        elif positions is None and not self.compact_positions:
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
        compaction, positions = replace(compaction, mask=compaction.gather(mask, 0)), self.positions
        if positions is not None:
            positions = torch.cat([positions, self.following(compaction.mask)], -1)
        return replace(self, input_ids=input_ids, compaction=compaction, positions=positions)


class PrunedCache:
    """Mixin for the cache of a pruned prompt: its turn follows when rows are moved or columns are removed."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restore_cache, (type(self).__bases__[1],), dict(self.__dict__)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map(lambda tensor: tensor[beam_idx.to(tensor.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        turn = getattr(self, TURN, None)
        setattr(self, TURN, None if turn is None else turn.map(change))

    def crop(self, tokens_to_remove: int) -> None:
        turn = getattr(self, TURN, None)
        if turn is not None and tokens_to_remove > 0:
            raise ValueError(f"crop must get a negative number, how many tokens to remove, got {tokens_to_remove}")
        cropped = None if turn is None else turn.crop(self.get_seq_length() + tokens_to_remove)  # type: ignore[attr-defined]
        super().crop(tokens_to_remove)  # type: ignore[misc]
        setattr(self, TURN, cropped)

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        setattr(self, TURN, None)


@cached
def pruned_class(base: Any) -> Any:
    """Return a subclass of a cache's class, under the same name."""
    return type(base.__name__, (PrunedCache, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _restore_cache(base: type) -> Any:
    kind = pruned_class(base)
    return kind.__new__(kind)


def remember(cache: Any, turn: Turn) -> None:
    """Write down in a cache what it holds. Beams and returned sequences are rows of their own, grouped by prompt."""
    if not isinstance(cache, Cache) or torch.compiler.is_compiling():
        return
    rows, prompts = cache_rows(cache), len(turn.input_ids)
    if rows is not None and rows != prompts and rows % prompts == 0:
        turn = turn.map(lambda tensor: tensor.repeat_interleave(rows // prompts, 0))
    if not isinstance(cache, PrunedCache):
        own_class: Any = type(cache)
        cache.__class__ = pruned_class(own_class)
    setattr(cache, TURN, turn)


def recall(cache: Any) -> Turn | None:
    """Return the turn of a pruned prompt's cache; None for any other cache."""
    turn: Turn | None = getattr(cache, TURN, None)
    if turn is None or torch.compiler.is_compiling() or cache.get_seq_length() == 0:
        return None
    rows, known = cache_rows(cache), len(turn.input_ids)
    if rows is not None and rows != known:
        raise ValueError(f"past_key_values has {rows} rows, expected {known} (reorder it by the cache's own methods)")
    return turn


@contextmanager
def detached(cache: Any) -> Iterator[None]:
    """Leave a cache alone while `generate` reorders and crops it; what it holds is written down afterwards."""
    turn = getattr(cache, TURN, None)
    if turn is not None:
        setattr(cache, TURN, None)
    try:
        yield
    except BaseException:
        if turn is not None:
            setattr(cache, TURN, turn)
        raise


def cache_rows(cache: Any) -> int | None:
    """Return the number of rows of a cache; None where its layers do not show it."""
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return next((len(key) for key in keys if isinstance(key, Tensor) and key.dim() == 4), None)


def moved_indices(requested: Any, compaction: Compaction) -> Any:
    """`logits_to_keep`: positions in the prompt that was given, as positions in the compacted one."""
    if not isinstance(requested, Tensor):
        return requested
    gone = ValueError("logits_to_keep: it names a visual token that was dropped, or padding")
    if requested.dtype == torch.bool:
        if int((moved := compaction.gather(requested, False)).sum()) != int(requested.sum()):
            raise gone
        return moved
    width, batch = compaction.width, len(compaction.source)
    rows = requested.expand(batch, -1) if requested.dim() == 1 else requested
    rows = torch.where(rows < 0, rows + width, rows)
    if bool(((rows < 0) | (rows >= width)).any()):
        raise ValueError(f"logits_to_keep must be positions from 0 to {width - 1}")
    new = torch.full((batch, width), -1, device=rows.device)
    row, column = compaction.valid.nonzero().unbind(1)
    new[row, compaction.source[row, column]] = column
    moved = new.gather(1, rows)
    if bool((moved < 0).any()):
        raise gone
    if requested.dim() == 1 and bool((moved == moved[0]).all()):
        return moved[0]
    if not hasattr(modeling_utils, "slice_logits_to_keep"):
        raise ValueError("logits_to_keep: the prompts differ in length after pruning, which needs a newer transformers")
    return moved
