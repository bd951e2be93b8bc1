"""Proportional attention: a survivor that stands for n tokens counts as n keys in the language model.

Softmax attention over n equal keys with equal values is attention over one of them with log n added to its logit. So
the mask that each attention layer gets has log n in the columns of visual tokens, in the prefill and in decoding. It is
added by a hook in front of the layer, in this thread and for the length of a call; layers without softmax attention
(linear attention) get nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "qkv_proj")
"""Attributes by which softmax attention is told from other layers that have an index."""
CACHED_MASKS = 4
"""Masks kept during a forward pass: layers of one kind share one."""


@dataclass
class KeyBias:
    """Bias of the attention logits for the keys of a prompt, `log_sizes` [B, W]; later tokens have none."""

    log_sizes: Tensor
    _masks: list[tuple[Any, tuple[Any, ...], Tensor]] = field(default_factory=list)
    _ranges: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def add_to(self, mask: Any, hidden: Tensor, cache: Any, module: Any) -> Tensor:
        """Return an additive mask [B, 1, Q, K] with the bias.

        Args:
            mask: The layer's own: None (causal), boolean or additive [B, 1, Q, K], or a `BlockMask`.
            hidden: Input of the layer [B, Q, D].
            cache: KV cache of the call, or None.
            module: The attention layer.
        """
        batch, queries = hidden.shape[:2]
        length, offset = self._key_range(cache, module, queries)
        if isinstance(mask, Tensor):
            length = mask.shape[-1]
        key = (batch, queries, length, offset, hidden.dtype)
        for known, known_key, result in self._masks:
            if known is mask and known_key == key:
                return result
        bias = self._columns(batch, offset, length).to(hidden.device, hidden.dtype)[:, None, None]
        if mask is not None and not isinstance(mask, Tensor):
            mask_tensor: Tensor | None = _dense(mask, batch, queries, length, hidden.device)
        elif mask is None and queries > 1:
            mask_tensor = torch.ones(queries, length, dtype=torch.bool, device=hidden.device).tril(length - queries)
        else:
            mask_tensor = mask
        if mask_tensor is None:
            result = bias
        elif mask_tensor.dtype == torch.bool:
            result = torch.where(mask_tensor, bias, torch.finfo(hidden.dtype).min)
        else:
            result = mask_tensor + bias
        self._masks = [(mask, key, result), *self._masks[: CACHED_MASKS - 1]]
        return result

    def _key_range(self, cache: Any, module: Any, queries: int) -> tuple[int, int]:
        """Return how many keys a layer will see, and the column of the first one.

        A layer that shares keys (Gemma 4) sees those of the last layer of its type that has some.
        """
        kind = getattr(module, "layer_type", getattr(module, "is_sliding", None))
        if not getattr(module, "is_kv_shared_layer", False):
            layer = module.layer_idx
            self._ranges[kind] = (queries, 0) if cache is None else cache.get_mask_sizes(queries, layer)
        return self._ranges[kind]

    def _columns(self, batch: int, offset: int, length: int) -> Tensor:
        """Return the bias [batch, length] of keys `offset` to `offset + length`; beams repeat the rows of a prompt."""
        rows = self.log_sizes.repeat_interleave(batch // len(self.log_sizes), 0)[:, offset : offset + length]
        return nn.functional.pad(rows, (0, length - rows.shape[1]))


class _Tracing:
    """Bias while `torch.compile` traces, which cannot read a context variable."""

    bias: KeyBias | None = None


_bias: ContextVar[KeyBias | None] = ContextVar("clustrs_key_bias", default=None)


@contextmanager
def active(bias: KeyBias) -> Iterator[None]:
    """Add a bias to the attention of hooked layers in this thread."""
    if torch.compiler.is_compiling():
        _Tracing.bias = bias
        yield
        _Tracing.bias = None
        return
    token = _bias.set(bias)
    try:
        yield
    finally:
        _bias.reset(token)


def attention_layers(language_model: nn.Module) -> list[nn.Module]:
    """Return the layers with softmax attention."""
    found = [m for m in language_model.modules() if hasattr(m, "layer_idx") and any(hasattr(m, p) for p in PROJECTIONS)]
    if not found:
        kind = type(language_model).__name__
        raise ValueError(f"attention must be 'plain' for a {kind}, whose attention layers are not known")
    return found


def hook(language_model: nn.Module) -> list[Any]:
    """Hook the attention layers of a language model; returns the hooks, to be removed."""
    return [one.register_forward_pre_hook(_add_bias, with_kwargs=True) for one in attention_layers(language_model)]


def _add_bias(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias = _Tracing.bias if torch.compiler.is_compiling() else _bias.get()
    if bias is None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values")
    return args, {**kwargs, "attention_mask": bias.add_to(kwargs.get("attention_mask"), hidden, cache, module)}


def _dense(block_mask: Any, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a `BlockMask` as booleans [B, 1, Q, K]."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(block_mask.mask_mod, batch, 1, queries, keys, device=str(device))
