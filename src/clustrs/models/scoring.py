"""How much a vision tower attends to each token, heard at transformers' attention interface.

The one attention layer whose output the projector reads gets an attention function of ours for the length of a call.
It hands queries and keys (with their norms and rotary embedding) to whoever listens in this thread, and then calls the
model's own implementation. So the tower may run on SDPA or FlashAttention, no attention matrix is asked for or held
whole, and no family needs its own copy of the projections.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from clustrs.models.clock import Clock

PREFIX = "clustrs|"
"""Before the name of the implementation that the listening function calls in the end."""
QUERY_BLOCK = 64
"""How many queries are scored together when the attention of all of them counts."""

Reduction = Literal["cls", "received"]
"""What a token's score is: the attention of the CLS token, or what it receives from all tokens on average."""


@dataclass
class Listener:
    """Collects scores [B, N] and head-averaged keys [B, N, K] of every call of one attention layer.

    `valid` [B, N] is False for padding, which neither attends nor is attended to; None where there is none. Sequences
    that are packed into one call, as FlashAttention takes them, count as calls of their own.
    """

    layer: nn.Module
    reduction: Reduction
    clock: Clock
    valid: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

    def hear(self, query: Tensor, key: Tensor, scaling: float, mask: Tensor | None) -> None:
        with self.clock.time("scoring"):
            self.scores.append(attention_scores(query, key, scaling, self.reduction, mask, self.valid))
            self.keys.append(key.detach().float().mean(1))

    def hear_packed(self, query: Tensor, key: Tensor, scaling: float, starts: Tensor) -> None:
        """Hear sequences that lie one after the other; `starts` has where each begins, and the end of the last."""
        lengths = starts.diff().tolist()
        for one_query, one_key in zip(query.split(lengths, 2), key.split(lengths, 2), strict=True):
            self.hear(one_query, one_key, scaling, None)


class _Tracing:
    """Stands in for the context variable while `torch.compile` traces, which it cannot look into."""

    listener: Listener | None = None


_listener: ContextVar[Listener | None] = ContextVar("clustrs_listener", default=None)
_lock = threading.Lock()


@torch.no_grad()
def attention_scores(
    query: Tensor,
    key: Tensor,
    scaling: float,
    reduction: Reduction,
    mask: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Scores [B, N] of softmax attention with queries and keys [B, heads, N, d], in float32, mean over heads.

    "cls": the first token's attention to the others (not renormalised). "received": what each token receives, mean over
    all queries, in blocks of queries. Where `valid` [B, N] is False there is padding: its scores are 0, and as a query
    it does not count.
    """
    with torch.autocast(query.device.type, enabled=False):
        keys = key.float()
        if keys.shape[1] != query.shape[1]:
            keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
        if reduction == "cls":
            return _attend(query[:, :, :1], keys, scaling, _rows(mask, 0, 1), valid)[:, :, 0, 1:].mean(1)
        n = query.shape[2]
        step = max(1, min(QUERY_BLOCK, n // 8))
        scores = torch.zeros_like(keys[:, 0, :, 0])
        for start in range(0, n, step):
            block = query[:, :, start : start + step]
            attention = _attend(block, keys, scaling, _rows(mask, start, start + step), valid)
            scores += attention.sum((1, 2)) if valid is None else _sum_valid(attention, valid[:, start : start + step])
        counts = n if valid is None else valid.sum(1, keepdim=True)
        return scores / (counts * query.shape[1])


def _attend(query: Tensor, keys: Tensor, scaling: float, mask: Tensor | None, valid: Tensor | None = None) -> Tensor:
    logits = query.float() @ keys.mT * scaling
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None], -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1)


def _sum_valid(attention: Tensor, valid: Tensor) -> Tensor:
    """Attention [B, heads, queries, N] summed over heads and over the queries [B, queries] that are no padding."""
    return attention.sum(1).masked_fill(~valid[..., None], 0).sum(1)


def _rows(mask: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The rows of a [B or 1, 1, queries or 1, keys] mask that belong to some queries."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]


@contextmanager
def listen(layer: nn.Module, reduction: Reduction, clock: Clock, valid: Tensor | None = None) -> Iterator[Listener]:
    """Listen to one attention layer, in this thread, until the block ends. `valid` [B, N] is False for padding."""
    listener = Listener(layer, reduction, clock, valid)
    if torch.compiler.is_compiling():
        _Tracing.listener = listener
        yield listener
        _Tracing.listener = None
        return
    token = _listener.set(listener)
    try:
        with listening(layer):
            yield listener
    finally:
        _listener.reset(token)


class ListeningConfig:
    """A layer's config, but for the name of the attention implementation, which leads to the listening function."""

    def __init__(self, config: Any) -> None:
        self.__dict__["wrapped"] = config
        self.__dict__["users"] = 0

    @property
    def _attn_implementation(self) -> str:
        return _registered(self.__dict__["wrapped"]._attn_implementation or "eager")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["wrapped"], name, value)


@contextmanager
def listening(layer: Any) -> Iterator[None]:
    """Route a layer's attention through the listening function; several threads may do so at once."""
    acquire(layer)
    try:
        yield
    finally:
        release(layer)


def acquire(layer: Any) -> None:
    """Begin to route a layer's attention through the listening function; `release` ends it."""
    with _lock:
        if not isinstance(layer.config, ListeningConfig):
            layer.config = ListeningConfig(layer.config)
        layer.config.__dict__["users"] += 1


def release(layer: Any) -> None:
    with _lock:
        config = layer.config
        if isinstance(config, ListeningConfig):
            config.__dict__["users"] -= 1
            if config.__dict__["users"] <= 0:
                layer.config = config.__dict__["wrapped"]


def _registered(implementation: str) -> str:
    """The name under which transformers finds the listening function for an implementation."""
    name = PREFIX + implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _listening_function(implementation))
    return name


def _listening_function(implementation: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        listener = _Tracing.listener if torch.compiler.is_compiling() else _listener.get()
        if listener is not None and listener.layer is module:
            scaling = kwargs.get("scaling")
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            if kwargs.get("cu_seq_lens_k") is not None:
                listener.hear_packed(query, key, scaling, kwargs["cu_seq_lens_k"])
            else:
                listener.hear(query, key, scaling, None if _is_flash(implementation) else attention_mask)
        original, seen = _original(implementation, module), module
        if _is_flash(implementation):  # it looks the kernel up by the name in the module's config
            seen = _PlainView(module)  # type: ignore[assignment]
        return original(seen, query, key, value, attention_mask, **kwargs)

    return attention


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation


def _original(implementation: str, module: nn.Module) -> Callable[..., Any]:
    """The model's own attention function; the eager one stands in the file that defines the layer."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f"the eager attention of {type(module).__name__} was not found: load the model with attn_implementation='sdpa'"
    )


class _PlainView:
    """A layer as it is without the listening function."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.__dict__["wrapped"] if name == "config" and isinstance(found, ListeningConfig) else found
