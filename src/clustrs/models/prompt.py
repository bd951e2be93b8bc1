"""Prompts of a pruned model: compaction to the tokens that survive, and `generate` on compacted prompts."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList


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

    def gather(self, tensor: Tensor, pad_value: Any) -> Tensor:
        """Take the surviving columns [..., B, W] of a per-token tensor [..., B, S]; padding gets `pad_value`."""
        return self._take(tensor, self.source).masked_fill(~self.valid, pad_value)

    def positions(self, positions: Tensor) -> Tensor:
        """Return the positions [..., B, W] that the survivors had among [..., B, S]."""
        return self._take(positions, self.own).masked_fill(~self.valid, 0)

    def extended(self, width: int) -> "Compaction":
        """Return the compaction of a longer prompt of `width` columns, without images in the new ones."""
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
            log_sizes=None if self.log_sizes is None else nn.functional.pad(self.log_sizes, (0, more)),
        )

    def _take(self, tensor: Tensor, columns: Tensor) -> Tensor:
        return tensor.gather(-1, columns.expand(*tensor.shape[:-1], -1))


FOLLOWERS = {"labels": -100, "token_type_ids": 0, "mm_token_type_ids": 0}
"""Per-token arguments that are compacted with the prompt, and their values on padding."""


def checked_ids(arguments: dict[str, Any]) -> Tensor:
    """Return `input_ids` of a call; raise ValueError where the prompt cannot be compacted."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if not isinstance(ids, Tensor):
        raise ValueError("input_ids is missing: the placeholders of the images are found in it")
    if arguments.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds must be None in a call with images, pass input_ids alone")
    if mask is not None and (mask.dim() != 2 or mask.shape != ids.shape):
        raise ValueError(f"attention_mask must have the shape of input_ids {list(ids.shape)}, got {list(mask.shape)}")
    return ids


def compact_arguments(arguments: dict[str, Any], compaction: "Compaction", pad: int) -> None:
    """Compact the ids and all per-token arguments of a call, in place; `pad` is the token id for padding."""
    shape = arguments["input_ids"].shape
    for name in FOLLOWERS:
        tensor = arguments.get(name)
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of input_ids {list(shape)}, got {list(tensor.shape)}")
    arguments["input_ids"] = compaction.gather(arguments["input_ids"], pad)
    arguments["attention_mask"] = compaction.mask
    for name, pad_value in FOLLOWERS.items():
        if arguments.get(name) is not None:
            arguments[name] = compaction.gather(arguments[name], pad_value)


def given_as(given: Tensor, family: Tensor) -> Tensor:
    """Return the caller's positions in the shape of the family's, without a row in front that counts the text."""
    return (given[-len(family) :] if given.dim() == family.dim() == 3 else given).expand_as(family)


def mismatch(tokens: int, features: int) -> ValueError:
    """Return the error that transformers raises for a prompt that does not fit its images."""
    return ValueError(f"Image features and image tokens do not match, tokens: {tokens}, features: {features}")


def compact(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    images: Sequence[tuple[int, Sequence[PrunedImage]]],
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
    log_sizes = _log_sizes(input_ids, images)
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
    if log_sizes is not None:
        log_sizes = log_sizes.gather(1, source).masked_fill(~valid, 0)
    return Compaction(source, valid, own.gather(1, source), gone.gather(1, source), new_mask, width, log_sizes)


def _log_sizes(input_ids: Tensor, images: Sequence[tuple[int, Sequence[PrunedImage]]]) -> Tensor | None:
    """Return the logarithm [B, S] of what each column stands for, or None if every image's tokens count once."""
    if all(image.sizes is None for _, kept in images for image in kept):
        return None
    logs = torch.zeros_like(input_ids, dtype=torch.float32)
    for token_id, kept in images:
        parts = []
        for image in kept:
            part = logs.new_zeros(image.total)
            parts.append(part if image.sizes is None else part.index_put((image.slots,), image.sizes.log()))
        logs = logs.masked_scatter(input_ids == token_id, torch.cat(parts))
    return logs


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


def _kept_mask(image: PrunedImage) -> Tensor:
    mask = torch.zeros(image.total, dtype=torch.bool, device=image.slots.device)
    return mask.index_fill(0, image.slots, True)


def _own_columns(is_slot: Tensor, kept: Sequence[PrunedImage]) -> Tensor:
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


def _static_width(input_ids: Tensor, images: Sequence[tuple[int, Sequence[PrunedImage]]]) -> int:
    """Return the new width where ids cannot be read: every prompt has equally many images, of equal size."""
    dropped = sum(image.total - len(image.slots) for _, kept in images for image in kept)
    if dropped % len(input_ids):
        raise ValueError("each prompt of a compiled batch must have the same number of images")
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


def effective(model: Any, kwargs: dict[str, Any]) -> Any:
    """Return the generation config of a call."""
    return kwargs.get("generation_config") or model.generation_config


def first_id(value: Any) -> int | None:
    """Return one token id of a setting that may be none, one or several."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return int(value[0]) if value else None
    return None if value is None else int(value)


def pad_id(model: Any, avoid: Iterable[int]) -> int:
    """Return the token id for padding, which is never a placeholder's."""
    config = getattr(model, "generation_config", None)
    text = model.config.get_text_config()
    candidates = [getattr(holder, name, None) for name in ("pad_token_id", "eos_token_id") for holder in (config, text)]
    avoid = set(avoid)
    known = [first_id(candidate) for candidate in candidates]
    return next(i for i in [*known, 0, 1, 2] if i is not None and i >= 0 and i not in avoid)


def default_mask(ids: Tensor, config: Any) -> Tensor:
    """Return the mask that `generate` makes when it is given none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    pad = first_id(pad)
    ends = ends.tolist() if isinstance(ends, Tensor) else ends
    ends = ends if isinstance(ends, list) else [ends]
    if pad is None or pad in ends or not (ids == pad).any():
        return torch.ones_like(ids)
    return (ids != pad).long()


@dataclass(frozen=True)
class CallerPrompt:
    """The prompt [B, S] that the caller gave, and the width of the compacted one that `generate` works on.

    Everything that looks at token ids while tokens are generated (logits processors, stopping criteria and
    `prefix_allowed_tokens_fn`, the caller's and those that transformers builds from its settings) sees this prompt in
    front of the new tokens, as it would without pruning.
    """

    ids: Tensor
    width: int

    @property
    def dropped(self) -> int:
        """Columns that the compacted prompt lacks."""
        return self.ids.shape[1] - self.width

    def restore(self, sequences: Tensor) -> Tensor:
        """Put the caller's prompt in front of new tokens, in place of the compacted one.

        Args:
            sequences: [R, width + n]. The R = B * r rows of beams or returned sequences are grouped by prompt.
        """
        prompt = self.ids.repeat_interleave(len(sequences) // len(self.ids), 0)
        return torch.cat([prompt.to(sequences.device), sequences[:, self.width :]], 1)

    def lengthened(self, config: Any) -> Any:
        """Return a generation config whose lengths count the caller's prompt, not the compacted one."""
        config = copy.copy(config)
        for name in ("max_length", "min_length"):
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name) + self.dropped)
        return config

    def logits_processors(self, build: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the model's `_get_logits_processor` as for the caller's prompt."""
        arguments["generation_config"] = self.lengthened(arguments["generation_config"])
        arguments["input_ids_seq_length"] += self.dropped
        arguments["encoder_input_ids"] = self.ids
        return CallerLogitsProcessors(build(**arguments), self)

    def stopping_criteria(self, build: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call the model's `_get_stopping_criteria` as for the caller's prompt."""
        arguments["generation_config"] = self.lengthened(arguments["generation_config"])
        return CallerStoppingCriteria(build(**arguments), self)


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


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for ways of generating that cannot work on a compacted prompt."""
    if kwargs.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model: assisted decoding is not supported while a method is attached, because the assistant "
            "would see another prompt; leave it out, or remove the method (handle.remove())"
        )


def shorten(kwargs: dict[str, Any], model: Any, by: int) -> None:
    """Take the dropped placeholders off lengths that count the prompt."""
    config = effective(model, kwargs)
    given = kwargs.get("generation_config")
    changed = {}
    for total, fresh in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if kwargs.get(fresh, getattr(config, fresh, None)) is not None:
            continue
        if kwargs.get(total) is not None:
            kwargs[total] = max(1, kwargs[total] - by)
        elif (given is not None or total == "min_length") and getattr(config, total, None):
            changed[total] = max(0, getattr(config, total) - by)
    if changed:
        config = copy.deepcopy(config)
        config.update(**changed)
        kwargs["generation_config"] = config


def run(original: Callable[..., Any], prompt: CallerPrompt, kwargs: dict[str, Any]) -> Any:
    """Call the model's own `generate` on compacted ids, and put the caller's prompt in front of what it returns."""
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = Streamer(kwargs["streamer"], prompt.ids)
    out = original(**kwargs)
    if isinstance(out, Tensor):
        return prompt.restore(out)
    out.sequences = prompt.restore(out.sequences)
    return out
