"""Prompts of a pruned model: compaction to the tokens that survive, and `generate` on compacted prompts."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

FOLLOWERS = {"labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}  # compacted as the prompt, with this padding


@dataclass(frozen=True)
class PrunedImage:
    """Features [k, D] that one image feeds after pruning, the `slots` [k] they take (ascending, counted within the
    image's `total` placeholders), and the `own` slots [k] they came from, whose positions they have. `sizes` [k]
    is how many tokens each stands for, where that counts."""

    features: Tensor
    slots: Tensor
    own: Tensor
    total: int
    planes: Tensor | None = None
    sizes: Tensor | None = None


@dataclass(frozen=True)
class Compaction:
    """Columns of a compacted prompt: `source` [B, W] is the column that each had before, `valid` is False on padding.

    `own` [B, W] is the column whose position a token has; it differs from `source` for tokens that stand for others.
    `dropped` [B, W] is how many visual tokens are gone before a column. `width` is how many columns there were before,
    `mask` [B, W] the new attention mask. `log_sizes` [B, W] is the logarithm of how many tokens a column stands for;
    None where each counts once.
    """

    source: Tensor
    valid: Tensor
    own: Tensor
    dropped: Tensor
    mask: Tensor
    width: int
    log_sizes: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Compaction":
        changed: Any = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    def gather(self, tensor: Tensor, pad_value: Any) -> Tensor:
        """Take the surviving columns [..., B, W] of a per-token tensor [..., B, S]; padding gets `pad_value`."""
        return tensor.gather(-1, self.source.expand(*tensor.shape[:-1], -1)).masked_fill(~self.valid, pad_value)

    def positions(self, positions: Tensor) -> Tensor:
        """Return the positions [..., B, W] that the survivors had among [..., B, S]."""
        return positions.gather(-1, self.own.expand(*positions.shape[:-1], -1)).masked_fill(~self.valid, 0)

    def extended(self, width: int) -> "Compaction":
        """Return the compaction of a longer prompt of `width` columns, without images in the new ones."""
        batch, more = len(self.source), width - self.width
        new = torch.arange(self.width, width, device=self.source.device).expand(batch, more)
        return replace(
            self,
            source=torch.cat([self.source, new], 1),
            valid=torch.cat([self.valid, torch.ones_like(new, dtype=torch.bool)], 1),
            own=torch.cat([self.own, new], 1),
            dropped=torch.cat([self.dropped, self.dropped.amax(1, keepdim=True).expand(batch, more)], 1),
            mask=torch.cat([self.mask, torch.ones_like(new, dtype=self.mask.dtype)], 1),
            width=width,
            log_sizes=None if self.log_sizes is None else nn.functional.pad(self.log_sizes, (0, more)),
        )


def checked_ids(arguments: dict[str, Any]) -> Tensor:
    """Return `input_ids` of a call; raise ValueError where the prompt cannot be compacted."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if not isinstance(ids, Tensor):
        raise ValueError("input_ids is missing: the placeholders of the images are found in it")
    if arguments.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds must be None in a call with images, pass input_ids alone")
    if mask is not None and (mask.dim() != 2 or mask.shape != ids.shape):
        raise wrong_shape("attention_mask", mask, ids.shape)
    return ids


def compact_arguments(arguments: dict[str, Any], compaction: Compaction, pad: int) -> None:
    """Compact the ids and all per-token arguments of a call, in place; `pad` is the token id for padding."""
    shape = arguments["input_ids"].shape
    for name, pad_value in FOLLOWERS.items():
        if (tensor := arguments.get(name)) is not None:
            if tensor.shape != shape:
                raise wrong_shape(name, tensor, shape)
            arguments[name] = compaction.gather(tensor, pad_value)
    arguments["input_ids"] = compaction.gather(arguments["input_ids"], pad)
    arguments["attention_mask"] = compaction.mask


def wrong_shape(name: str, tensor: Tensor, ids: Sequence[int]) -> ValueError:
    return ValueError(f"{name} must have the shape of input_ids {list(ids)}, got {list(tensor.shape)}")


def mismatch(tokens: int, features: int) -> ValueError:
    """Return the error that transformers raises for a prompt that does not fit its images."""
    return ValueError(f"Image features and image tokens do not match, tokens: {tokens}, features: {features}")


def rows_of_images(prompt: Tensor, token_id: int, images: Sequence[Any]) -> list[int]:
    """Return the prompt of each of the encoded images, by its first placeholder; -1 for videos, which have other ones,
    and for images beyond the prompts (`compact` names them)."""
    rows, found, start = (prompt == token_id).nonzero()[:, 0].tolist(), [], 0
    for image in images:
        found.append(rows[start] if image.modality == "image" and start < len(rows) else -1)
        start += image.slots if image.modality == "image" else 0
    return found


def compact(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    images: Sequence[tuple[int, Sequence[PrunedImage]]],
    *,
    pad_left: bool,
) -> Compaction:
    """Find the columns that stay. `images` pairs a placeholder's id with the images that fill it, in order."""
    (batch, width), compiling = input_ids.shape, torch.compiler.is_compiling()
    keep = torch.ones_like(input_ids, dtype=torch.bool)
    own = torch.arange(width, device=input_ids.device).repeat(batch, 1)
    every = [image for _, kept in images for image in kept]
    logs = None if all(image.sizes is None for image in every) else torch.zeros_like(input_ids, dtype=torch.float32)
    for token_id, kept in images:
        is_slot = input_ids == token_id
        if not compiling:
            _check_fit(is_slot, kept)
        stays, log_sizes = [], []
        for image in kept:
            none = torch.zeros(image.total, dtype=torch.bool, device=image.slots.device)
            stays.append(none.index_fill(0, image.slots, True))
            zeros = none.float()
            log_sizes.append(zeros if image.sizes is None else zeros.index_put((image.slots,), image.sizes.log()))
        keep = keep.masked_scatter(is_slot, torch.cat(stays))
        logs = None if logs is None else logs.masked_scatter(is_slot, torch.cat(log_sizes))
        if any(image.own is not image.slots for image in kept):
            columns, start = is_slot.nonzero()[:, 1], 0
            origin = torch.arange(len(columns), device=columns.device)
            for image in kept:
                origin[start + image.slots] = start + image.own
                start += image.total
            own = own.masked_scatter(is_slot, columns[origin])
    gone = (~keep).cumsum(1)
    if attention_mask is not None and not compiling:  # padding at either end goes; what is masked in the middle stays
        real = attention_mask != 0
        keep &= (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0) | ~real.any(1, keepdim=True)
    lengths = keep.sum(1)
    if compiling:  # ids cannot be read: every prompt has equally many images, of equal size
        dropped = sum(image.total - len(image.slots) for image in every)
        if dropped % batch:
            raise ValueError("each prompt of a compiled batch must have the same number of images")
        new_width = width - dropped // batch
    else:
        new_width = int(lengths.max())
    order = keep.long().argsort(dim=1, stable=True, descending=not pad_left)
    source = order[:, width - new_width :] if pad_left else order[:, :new_width]
    place = torch.arange(new_width, device=input_ids.device)
    valid = place >= new_width - lengths[:, None] if pad_left else place < lengths[:, None]
    source = source.masked_fill(~valid, 0)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = mask.gather(1, source).masked_fill(~valid, 0)
    logs = None if logs is None else logs.gather(1, source).masked_fill(~valid, 0)
    return Compaction(source, valid, own.gather(1, source), gone.gather(1, source), mask, width, logs)


def _check_fit(is_slot: Tensor, kept: Sequence[PrunedImage]) -> None:
    """Raise ValueError unless every image has its placeholders, all in one prompt."""
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


def token_ids(value: Any) -> list[int]:
    """Return the token ids of a setting that may be none, one or several."""
    value = value.tolist() if isinstance(value, Tensor) else value
    return [] if value is None else [int(one) for one in (value if isinstance(value, list | tuple) else [value])]


def pad_id(model: Any, avoid: Iterable[int]) -> int:
    """Return the token id for padding, which is never a placeholder's."""
    holders = getattr(model, "generation_config", None), model.config.get_text_config()
    settings = [getattr(holder, name, None) for name in ("pad_token_id", "eos_token_id") for holder in holders]
    known = [i for setting in settings for i in token_ids(setting)[:1]]
    avoid = set(avoid)
    return next(i for i in [*known, 0, 1, 2] if i >= 0 and i not in avoid)


def default_mask(ids: Tensor, config: Any) -> Tensor:
    """Return the mask that `generate` makes when it is given none."""
    pad = token_ids(config.pad_token_id)[:1]
    if not pad or pad[0] in token_ids(config.eos_token_id) or not (ids == pad[0]).any():
        return torch.ones_like(ids)
    return (ids != pad[0]).long()


@dataclass(frozen=True)
class CallerPrompt:
    """The prompt [B, S] that the caller gave, and the width of the compacted one that `generate` works on.

    Logits processors and stopping criteria, the caller's and transformers' own, see it in front of the new tokens.
    """

    ids: Tensor
    width: int

    @property
    def dropped(self) -> int:
        return self.ids.shape[1] - self.width

    def restore(self, sequences: Tensor) -> Tensor:
        """Put the caller's prompt in front of the new tokens of [R, width + n], whose R rows are grouped by prompt."""
        prompt = self.ids.repeat_interleave(len(sequences) // len(self.ids), 0)
        return torch.cat([prompt.to(sequences.device), sequences[:, self.width :]], 1)


class SeesCallerPrompt:
    """Mixin for the lists of logits processors and stopping criteria: they see the caller's prompt."""

    prompt: CallerPrompt

    def __init__(self, items: Iterable[Any], prompt: CallerPrompt) -> None:
        super().__init__(items)  # type: ignore[call-arg]
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return super().__call__(self.prompt.restore(input_ids), scores, **kwargs)  # type: ignore[misc]


class CallerLogitsProcessors(SeesCallerPrompt, LogitsProcessorList):  # type: ignore[misc]
    """Logits processors that see the caller's prompt."""


class CallerStoppingCriteria(SeesCallerPrompt, StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that see the caller's prompt."""

    @property
    def max_length(self) -> int | None:
        """The length at which decoding ends, counted with the compacted prompt as the decoding loop does."""
        length = super().max_length
        return None if length is None else length - self.prompt.dropped


class Streamer:
    """Streamer that passes the caller's prompt on in place of the compacted one, which comes first."""

    def __init__(self, inner: Any, prompt: Tensor) -> None:
        self.inner = inner
        self.prompt: Tensor | None = prompt

    def put(self, value: Tensor) -> None:
        self.inner.put(value if self.prompt is None else self.prompt.cpu())
        self.prompt = None

    def end(self) -> None:
        self.inner.end()


def shorten(kwargs: dict[str, Any], model: Any, by: int) -> None:
    """Take the dropped placeholders off lengths that count the prompt."""
    given, changed = kwargs.get("generation_config"), {}
    config = given or model.generation_config
    for total, fresh in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if kwargs.get(fresh, getattr(config, fresh, None)) is not None:
            continue
        if kwargs.get(total) is not None:
            kwargs[total] = max(1, kwargs[total] - by)
        elif (given is not None or total == "min_length") and getattr(config, total, None):
            changed[total] = max(0, getattr(config, total) - by)
    if changed:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].update(**changed)
