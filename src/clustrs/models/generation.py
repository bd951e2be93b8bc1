"""`generate` on compacted prompts: the caller gets back the prompt that was given, and lengths mean what they say."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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


def run(original: Callable[..., Any], model: Any, prompt: Tensor, kwargs: dict[str, Any]) -> Any:
    """Call the model's own `generate` on compacted ids, and put the caller's prompt in front of what it returns."""
    width = kwargs["input_ids"].shape[1]
    shorten(kwargs, model, prompt.shape[1] - width)
    if kwargs.get("streamer") is not None:
        kwargs["streamer"] = Streamer(kwargs["streamer"], prompt)
    out = original(**kwargs)
    sequences = out if isinstance(out, Tensor) else out.sequences
    repeated = prompt.repeat_interleave(len(sequences) // len(prompt), 0)
    full = torch.cat([repeated.to(sequences.device), sequences[:, width:]], 1)
    if isinstance(out, Tensor):
        return full
    out.sequences = full
    return out
