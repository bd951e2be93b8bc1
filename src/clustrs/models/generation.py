"""`generate` on compacted prompts: the caller gets back the prompt that was given, and lengths mean what they say."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList


def effective(model: Any, kwargs: dict[str, Any]) -> Any:
    """The generation config that counts."""
    return kwargs.get("generation_config") or model.generation_config


def first_id(value: Any) -> int | None:
    """One token id of a setting that may be none, one or several."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return int(value[0]) if value else None
    return None if value is None else int(value)


def pad_id(model: Any, avoid: Iterable[int]) -> int:
    """What stands on padding: never a placeholder."""
    config = getattr(model, "generation_config", None)
    text = model.config.get_text_config()
    candidates = [getattr(holder, name, None) for name in ("pad_token_id", "eos_token_id") for holder in (config, text)]
    avoid = set(avoid)
    known = [first_id(candidate) for candidate in candidates]
    return next(i for i in [*known, 0, 1, 2] if i is not None and i >= 0 and i not in avoid)


def default_mask(ids: Tensor, config: Any) -> Tensor:
    """The mask that `generate` makes when it is given none."""
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


class CallerLogitsProcessors(LogitsProcessorList):  # type: ignore[misc]
    """Logits processors that see the caller's prompt."""

    def __init__(self, processors: Iterable[Any], prompt: CallerPrompt) -> None:
        super().__init__(processors)
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return super().__call__(self.prompt.restore(input_ids), scores, **kwargs)


class CallerStoppingCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """Stopping criteria that see the caller's prompt."""

    def __init__(self, criteria: Iterable[Any], prompt: CallerPrompt) -> None:
        super().__init__(criteria)
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        return super().__call__(self.prompt.restore(input_ids), scores, **kwargs)

    @property
    def max_length(self) -> int | None:
        """The length at which decoding ends, counted with the compacted prompt as the decoding loop does."""
        length = super().max_length
        return None if length is None else length - self.prompt.dropped


class Streamer:
    """Hands the caller's own prompt to a streamer in place of the compacted one, which comes first."""

    def __init__(self, inner: Any, prompt: Tensor) -> None:
        self.inner = inner
        self.prompt: Tensor | None = prompt

    def put(self, value: Tensor) -> None:
        self.inner.put(value if self.prompt is None else self.prompt.cpu())
        self.prompt = None

    def end(self) -> None:
        self.inner.end()


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """An error for ways of generating that cannot work on a compacted prompt."""
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
