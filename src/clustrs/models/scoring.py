"""Attention: scores of a vision tower, recorded at transformers' attention interface; proportional attention; timers.

The one attention layer whose output the projector reads has a recording attention function, and so have others that a
method needs: it hands queries and keys to the recorder of this thread, then calls the model's own implementation. So
the tower may run on SDPA or FlashAttention, and no attention matrix is held whole.

Proportional attention is the other hook: a survivor that stands for n tokens counts as n keys in the language model.
Softmax attention over n equal keys with equal values is attention over one of them with log n added to its logit. So
the mask that each attention layer gets has log n in the columns of visual tokens, in the prefill and in decoding. It is
added in front of the layer, in this thread and for the length of a call; linear attention gets nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import nan
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

_timing: ContextVar[bool] = ContextVar("timing", default=False)


@contextmanager
def using(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable until the block ends."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def timing() -> AbstractContextManager[None]:
    """Time the stages on an accelerator, too, by waiting for it around each, which is slower. A CPU is always timed."""
    return using(_timing, True)


def runs_ahead(device: torch.device) -> bool:
    """Return whether calls return before the device has done their work."""
    return device.type not in ("cpu", "meta")


def now(device: torch.device) -> float:
    """The time when the device has done all its work."""
    if runs_ahead(device):
        torch.accelerator.synchronize()
    return perf_counter()


class StageTimer:
    """Wall seconds of vision tower, scoring and selection, without stages inside them; NaN for what is not timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"vision": 0.0, "scoring": 0.0, "selection": 0.0}
        self._inner = [0.0]

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        if torch.compiler.is_compiling():
            yield
            return
        if runs_ahead(self.device) and not _timing.get():
            self.seconds[stage] = nan
            yield
            return
        start = now(self.device)
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = now(self.device) - start
            self.seconds[stage] += whole - self._inner.pop()
            self._inner[-1] += whole


PREFIX = "clustrs|"  # before the name of the implementation that the recording function calls
QUERY_BLOCK = 64  # queries that are scored together when the attention of all of them counts
Reduction = Literal["cls", "received", "joint", "keys"]
"""Score of a token: the attention of the CLS token, or the mean of what it receives from all tokens; "joint" is that of
the CLS token with all heads taken as one. "keys" are no scores but the keys of all heads side by side."""


@dataclass
class ScoreRecorder:
    """Scores [B, N] and head-averaged keys [B, N, K] of every call of one attention layer; a packed sequence is a call.

    `valid` [B, N] is False for padding, which neither attends nor is attended to; None where there is none. `further`
    names more to record, each with its layer and reduction; `more` has it.
    """

    layer: nn.Module
    reduction: Reduction
    timer: StageTimer
    valid: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    further: Mapping[str, tuple[nn.Module, Reduction]] = field(default_factory=dict)
    more: dict[str, list[Tensor]] = field(default_factory=dict)

    def layers(self) -> list[nn.Module]:
        return list(dict.fromkeys([self.layer, *(layer for layer, _ in self.further.values())]))

    def record(self, layer: nn.Module, query: Tensor, key: Tensor, scaling: float, mask: Tensor | None) -> None:
        with self.timer.time("scoring"):
            if layer is self.layer:
                self.scores.append(attention_scores(query, key, scaling, self.reduction, mask, self.valid))
                self.keys.append(key.detach().float().mean(1))
            for name, (own, kind) in self.further.items():
                if own is layer and kind == "keys":
                    self.more.setdefault(name, []).append(key.detach().float().transpose(1, 2).flatten(2))
                elif own is layer:
                    scores = attention_scores(query, key, scaling, kind, mask, self.valid)
                    self.more.setdefault(name, []).append(scores)


class _Tracing:
    """Stands in for the context variables while `torch.compile` traces, which it cannot look into."""

    recorder: ScoreRecorder | None = None
    bias: "KeyBias | None" = None


active_recorder: ContextVar[Any] = ContextVar("clustrs_recorder", default=None)
"""What records hooked layers in this thread: a `ScoreRecorder`, or another object with `layers` and `record`."""
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

    "cls": the first token's attention to the others (not renormalized); "joint": with one head of all widths, scaled by
    the root of its width. "received": what each token receives, mean over
    all queries, in blocks of queries. Where `valid` [B, N] is False there is padding: its scores are 0, and as a query
    it does not count. The mask is [B or 1, 1, N or 1, N].
    """

    def attend(start: int, stop: int) -> Tensor:
        logits = (query[:, :, start:stop].float() @ keys.mT).mul_(scaling)
        if valid is not None:
            logits = logits.masked_fill(~valid[:, None, None], -torch.inf)
        if mask is not None:
            rows = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
            logits = logits.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else logits + rows
        return logits.softmax(-1)

    with torch.autocast(query.device.type, enabled=False):
        keys = key.float()
        if keys.shape[1] != query.shape[1]:
            keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
        if reduction == "joint":
            query, keys = (part.transpose(1, 2).flatten(2).unsqueeze(1) for part in (query, keys))
            scaling = query.shape[-1] ** -0.5
        if reduction in ("cls", "joint"):
            return attend(0, 1)[:, :, 0, 1:].mean(1)
        n, keys = query.shape[2], keys.contiguous()  # else each block's product would copy them
        step = max(1, min(QUERY_BLOCK, n // 8))
        scores = torch.zeros_like(keys[:, 0, :, 0])
        for start in range(0, n, step):
            attention = attend(start, start + step)
            if valid is None:
                scores += attention.sum((1, 2))
            else:
                scores += attention.sum(1).masked_fill(~valid[:, start : start + step, None], 0).sum(1)
        counts = n if valid is None else valid.sum(1, keepdim=True)
        return scores / (counts * query.shape[1])


@contextmanager
def record_scores(
    layer: nn.Module,
    reduction: Reduction,
    timer: StageTimer,
    valid: Tensor | None = None,
    further: Mapping[str, tuple[nn.Module, Reduction]] = MappingProxyType({}),
) -> Iterator[ScoreRecorder]:
    """Record the scores of one attention layer, and `further` ones, in this thread until the block ends; `valid`
    [B, N]: no padding."""
    recorder = ScoreRecorder(layer, reduction, timer, valid, further=further)
    if torch.compiler.is_compiling():
        _Tracing.recorder = recorder
        yield recorder
        _Tracing.recorder = None
        return
    with using(active_recorder, recorder), ExitStack() as hooks:
        for one in recorder.layers():
            hooks.enter_context(Hook(one))
        yield recorder


class HookedConfig:
    """Config of a layer, with another attention implementation: the one that records."""

    def __init__(self, config: Any) -> None:
        self.__dict__.update(wrapped=config, users=0)

    @property
    def _attn_implementation(self) -> str:
        """The name under which transformers finds the recording function for the layer's own implementation."""
        implementation = self.__dict__["wrapped"]._attn_implementation or "eager"
        if PREFIX + implementation not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(PREFIX + implementation, _recording_function(implementation))
        return PREFIX + implementation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["wrapped"], name, value)


class Hook(AbstractContextManager["Hook"]):
    """Routes a layer's attention through the recording function until `remove`; several threads may do so at once."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        with _lock:
            if not isinstance(layer.config, HookedConfig):
                layer.config = HookedConfig(layer.config)
            layer.config.__dict__["users"] += 1

    def remove(self) -> None:
        with _lock:
            config = self.layer.config
            if isinstance(config, HookedConfig):
                config.__dict__["users"] -= 1
                if config.__dict__["users"] <= 0:
                    self.layer.config = config.__dict__["wrapped"]

    def __exit__(self, *_: object) -> None:
        self.remove()


def _recording_function(implementation: str) -> Callable[..., Any]:
    flash = "flash" in implementation

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        recorder = _Tracing.recorder if torch.compiler.is_compiling() else active_recorder.get()
        if recorder is not None and any(layer is module for layer in recorder.layers()):
            scaling = kwargs.get("scaling")
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            starts = kwargs.get("cu_seq_lens_k")
            if starts is None:
                recorder.record(module, query, key, scaling, None if flash else attention_mask)
            else:  # where each of the packed sequences begins, and the end of the last
                lengths = starts.diff().tolist()
                for one_query, one_key in zip(query.split(lengths, 2), key.split(lengths, 2), strict=True):
                    recorder.record(module, one_query, one_key, scaling, None)
        seen: Any = _PlainView(module) if flash else module  # it looks the kernel up by the name in the module's config
        return _original(implementation, module)(seen, query, key, value, attention_mask, **kwargs)

    return attention


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
    """View of a layer without the recording function."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.__dict__["wrapped"] if name == "config" and isinstance(found, HookedConfig) else found


PROJECTIONS = ("q_proj", "qkv_proj")  # attributes that tell softmax attention from other layers that have an index
CACHED_MASKS = 4  # masks kept during a forward pass: layers of one kind share one


@dataclass
class KeyBias:
    """Bias of the attention logits for the keys of a prompt, `log_sizes` [B, W]; later tokens have none.

    `columns` returns those [B, K] that a layer has keys of, where it has not all.
    """

    log_sizes: Tensor
    columns: Callable[[int], Tensor | None]
    _masks: list[tuple[Any, tuple[Any, ...], Tensor]] = field(default_factory=list)
    _ranges: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def add_to(self, mask: Any, hidden: Tensor, cache: Any, module: Any) -> Tensor:
        """Return an additive mask [B, 1, Q, K] with the bias.

        `mask` is the layer's own: None (causal), boolean or additive [B, 1, Q, K], or a `BlockMask`. `hidden` [B, Q, D]
        is the layer's input. A layer that shares keys (Gemma 4) sees those of the last layer of its type that has some.
        """
        batch, queries = hidden.shape[:2]
        kind = getattr(module, "layer_type", getattr(module, "is_sliding", None))
        if not getattr(module, "is_kv_shared_layer", False):
            self._ranges[kind] = (queries, 0) if cache is None else cache.get_mask_sizes(queries, module.layer_idx)
        length, offset = self._ranges[kind]
        if isinstance(mask, Tensor):
            length = mask.shape[-1]
        key = (batch, queries, length, offset, hidden.dtype)
        for known, known_key, result in self._masks:
            if known is mask and known_key == key:
                return result
        sizes, columns = self.log_sizes, self.columns(module.layer_idx)
        if columns is not None:
            missing = int(columns.max()) + 1 - sizes.shape[1]
            sizes = nn.functional.pad(sizes, (0, max(0, missing))).gather(1, columns)
        rows = sizes.repeat_interleave(batch // len(sizes), 0)[:, offset : offset + length]  # beams
        bias = nn.functional.pad(rows, (0, length - rows.shape[1])).to(hidden.device, hidden.dtype)[:, None, None]
        allowed = mask
        if mask is None and queries > 1:
            allowed = torch.ones(queries, length, dtype=torch.bool, device=hidden.device).tril(length - queries)
        elif mask is not None and not isinstance(mask, Tensor):
            from torch.nn.attention.flex_attention import create_mask

            allowed = create_mask(mask.mask_mod, batch, 1, queries, length, device=str(hidden.device))
        if allowed is None:
            result = bias
        elif allowed.dtype == torch.bool:
            result = torch.where(allowed, bias, torch.finfo(hidden.dtype).min)
        else:
            result = allowed + bias
        self._masks = [(mask, key, result), *self._masks[: CACHED_MASKS - 1]]
        return result


_bias: ContextVar[KeyBias | None] = ContextVar("clustrs_key_bias", default=None)


@contextmanager
def biased(log_sizes: Tensor | None, columns: Callable[[int], Tensor | None] | None = None) -> Iterator[None]:
    """Add a bias to the attention of hooked layers in this thread, if there is one."""
    bias = None if log_sizes is None else KeyBias(log_sizes, columns or (lambda _: None))
    if torch.compiler.is_compiling():
        _Tracing.bias = bias
        yield
        _Tracing.bias = None
        return
    with using(_bias, bias):
        yield


def hook_attention(language_model: nn.Module) -> list[Any]:
    """Hook the layers with softmax attention of a language model; returns the hooks, to be removed."""
    found = [m for m in language_model.modules() if hasattr(m, "layer_idx") and any(hasattr(m, p) for p in PROJECTIONS)]
    if not found:
        kind = type(language_model).__name__
        raise ValueError(f"attention must be 'plain' for a {kind}, whose attention layers are not known")
    return [layer.register_forward_pre_hook(_add_bias, with_kwargs=True) for layer in found]


def _add_bias(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias = _Tracing.bias if torch.compiler.is_compiling() else _bias.get()
    if bias is None:
        return None
    hidden = args[0] if args else kwargs["hidden_states"]
    cache = kwargs.get("past_key_values")
    return args, {**kwargs, "attention_mask": bias.add_to(kwargs.get("attention_mask"), hidden, cache, module)}
