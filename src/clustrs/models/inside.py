"""Prune inside the language model: drop visual tokens between two of its layers, in the prefill.

Hooks in front of the decoder's layers do it, in this thread and for the length of a call. Before the layer at which a
method prunes, the hidden states of dropped tokens go; that layer and those after it get the masks and position
embeddings of the tokens that are left, and their caches are shorter. In decoding only the masks have to fit: the model
builds them for the length of its first layer. After the last layer the hidden states are as long as the prompt again:
in a dropped token's place is the one kept before it, so logits, labels and lengths are those of the prompt as given.

What a method reads (the attention of one query, keys) is recorded at transformers' attention interface. For a layer
that is about to run, its own attention module runs up to there and no further.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from clustrs import validation
from clustrs.models import scoring
from clustrs.pruners.inputs import check_indices
from clustrs.pruners.inside import InsidePruner, LayerState


@dataclass(frozen=True)
class Columns:
    """Columns `index` [B, W'] of a prompt of `width` that the layers from `layer` on read, ascending.

    Rows of a batch may lose different numbers of tokens: where `real` is False, a dropped one stays as padding.
    `compact`: these layers count positions without gaps.
    """

    layer: int
    index: Tensor
    real: Tensor
    width: int
    compact: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> "Columns":
        return replace(self, index=change(self.index), real=change(self.real))

    def crop(self, width: int) -> "Columns":
        """Follow a cache that was cropped to the first `width` columns of the prompt."""
        removed = self.width - width
        if removed <= 0:
            return self
        last = torch.arange(width, self.width, device=self.index.device)
        if removed > self.index.shape[1] or not bool((self.index[:, -removed:] == last).all()):
            raise ValueError(f"crop must leave the images of the prompt in the cache, got {removed} columns to remove")
        return replace(self.map(lambda tensor: tensor[:, :-removed]), width=width)


@dataclass
class PromptImage:
    """Tokens of an image in a prompt: its row, all their columns, and those that are left."""

    row: int
    every: Tensor
    columns: Tensor

    @property
    def total(self) -> int:
        return len(self.every)

    def left(self) -> Tensor:
        return torch.searchsorted(self.every, self.columns)


class _Recorded(Exception):
    """Ends the run of an attention module once its queries and keys are recorded."""


class InsideCall:
    """Pruning in one call, a forward pass or a whole `generate`; later calls on its cache take over its `columns`."""

    def __init__(
        self,
        method: InsidePruner,
        decoder: Any,
        columns: Sequence[Columns] = (),
        images: Sequence[PromptImage] = (),
        mask: Tensor | None = None,
    ) -> None:
        self.method, self.decoder, self.columns, self.images = method, decoder, list(columns), list(images)
        self.layer: nn.Module | None = None  # the attention module to record
        self._plan, self._stop = set[int](), False
        if mask is not None:
            self._plan = {layer for image in self.images for layer in method.schedule(image.total, len(decoder.layers))}
            self._last = (mask != 0).cumsum(1).argmax(1)
            self._text = mask != 0
            for image in self.images:
                self._text[image.row, image.columns] = False
        self.sources: list[Any] = []  # of the images, for the caller
        self._past = self._queries = 0
        self._fitted: dict[int, dict[str, Any]] = {}

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fit the arguments of a decoder layer to the tokens that are left."""
        index: int = module.self_attn.layer_idx
        hidden = args[0] if args else kwargs["hidden_states"]
        if index == 0:
            self._begin(hidden, kwargs.get("past_key_values"))
        if index in self._plan:
            self._plan.remove(index)
            self._prune(index, module, hidden, kwargs)
        if index + 1 in self._plan and not self.method.own_layer:
            self.layer = module.self_attn
        columns = self.at(index)
        if columns is None:
            return None
        if columns.layer == index and self._past == 0:
            place, before = self._keys(columns, len(hidden))[0], self.at(index - 1)
            if before is not None:
                place = torch.searchsorted(self._keys(before, len(hidden))[0], place)
            hidden = _take(hidden, place)
        if columns.layer not in self._fitted:
            self._fitted[columns.layer] = self._fit(columns, hidden, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return (hidden, *args[1:]), {**kwargs, **self._fitted[columns.layer]}

    def after(self, hidden: Tensor) -> Tensor | None:
        """Return the hidden states [R, Q, D] of all columns after the last layer; None where none is missing."""
        columns = self.at(len(self.decoder.layers) - 1)
        if columns is None or self._past > 0:
            return None
        index, real = self._keys(columns, len(hidden))
        own = torch.arange(index.shape[1], device=index.device)
        kept = torch.where(real, own, 0).cummax(1).values
        every = torch.arange(self._queries, device=index.device).repeat(len(hidden), 1)
        place = torch.searchsorted(index, every, right=True) - 1
        return _take(hidden, kept.gather(1, place.clamp(min=0)))

    def deepstack(self, hidden: Tensor, mask: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fit the mask [R, W] of visual tokens and the features [V, D] that are added to theirs after a layer."""
        held = [self._keys(columns, len(hidden))[0] for columns in self.columns]
        fits = [index.to(mask.device) for index in held if index.shape[1] == hidden.shape[1]]
        if hidden.shape[1] == mask.shape[1] or not fits:
            return hidden, mask, features
        index = fits[-1]
        left = torch.zeros_like(mask).scatter(1, index, True)
        return hidden, mask.gather(1, index), features[left[mask].to(features.device)]

    def at(self, layer: int) -> Columns | None:
        """Return the columns that a layer reads; None for all."""
        return next((columns for columns in reversed(self.columns) if columns.layer <= layer), None)

    def key_columns(self, layer: int) -> Tensor | None:
        """Return the columns [B, K] of the keys of a layer in this pass; None for all."""
        columns = self.at(layer)
        return None if columns is None else self._keys(columns, len(columns.index))[0]

    def layers(self) -> list[nn.Module]:
        """Return the attention module to record, if there is one now."""
        return [] if self.layer is None else [self.layer]

    def record(self, layer: nn.Module, query: Tensor, key: Tensor, scaling: float, mask: Tensor | None) -> None:
        """Keep the keys, and the attention [B, K] of the last prompt token, mean over heads."""
        self.layer = None
        batch = len(self._last)
        step, rows = len(query) // batch, torch.arange(batch, device=query.device)
        place = (
            self._last if not self.columns else torch.searchsorted(self.columns[-1].index, self._last[:, None])[:, 0]
        )
        query, self._recorded_keys = query[::step][rows, :, place], key[::step]
        with torch.autocast(query.device.type, enabled=False):
            groups = query.float().unflatten(1, (key.shape[1], -1))
            logits = (groups @ self._recorded_keys.float().mT).flatten(1, 2) * scaling
            if mask is not None:
                row = _rows(mask, len(key))[::step][rows, :, place]
                logits = logits.masked_fill(~row, -torch.inf) if row.dtype == torch.bool else logits + row
            self._attention = logits.softmax(-1).mean(1)
        if self._stop:
            raise _Recorded

    def _begin(self, hidden: Tensor, cache: Any) -> None:
        self._past = 0 if cache is None else int(cache.get_seq_length())
        self._queries, self._fitted = hidden.shape[1], {}
        name = self.method.name
        if cache is not None and not all(type(layer) is DynamicLayer for layer in cache.layers):
            kind = type(cache).__name__
            raise ValueError(f"past_key_values must be a DynamicCache while {name} is attached, got {kind}")
        if self._plan and (self._past or self._queries != self._text.shape[1]):
            raise ValueError(f"{name} needs the whole prompt in one forward pass (leave prefill_chunk_size out)")
        if self.decoder.training and getattr(self.decoder, "gradient_checkpointing", False):
            raise ValueError(f"gradient checkpointing is not supported while {name} is attached")

    @torch.no_grad()
    def _prune(self, index: int, module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> None:
        """Choose what is left of each image from a layer on."""
        before = self.columns[-1] if self.columns else None
        batch = len(self._last)
        if self.method.own_layer:
            fitted = {} if before is None else self._fitted[before.layer]
            given = {**kwargs, **fitted, "past_key_values": None, "hidden_states": module.input_layernorm(hidden)}
            self.layer, self._stop = module.self_attn, True
            with suppress(_Recorded):
                module.self_attn(**given)
            self._stop = False
        states = self.decoder.norm(hidden[:: len(hidden) // batch]) if self.method.reads_hidden else None
        if before is None:
            every = torch.arange(self._text.shape[1], device=self._text.device).repeat(batch, 1)
            before = Columns(0, every, torch.ones_like(every, dtype=torch.bool), every.shape[1])
        text, keep = self._text.gather(1, before.index), before.real.clone()
        for image in self.images:
            k = self.method.schedule(image.total, len(self.decoder.layers))[index]
            place = torch.searchsorted(before.index[image.row], image.columns)
            after = text[image.row].nonzero()[:, 0]
            state = LayerState(
                attention=self._attention[image.row, place],
                keys=self._recorded_keys[image.row],
                hidden=None if states is None else states[image.row],
                image=place,
                text=after[after > place[-1]],
            )
            chosen = self.method.choose(state, k).sort().values
            check_indices(self.method.name, chosen[None], len(place), k)
            keep[image.row, place] = False
            keep[image.row, place[chosen]] = True
            image.columns = image.columns[chosen]
        del self._attention, self._recorded_keys
        missing = keep.sum(1).amax() - keep.sum(1, keepdim=True)
        padding = ~keep & ((~keep).cumsum(1) <= missing)
        place = (keep | padding).nonzero()[:, 1].view(batch, -1)
        compact = getattr(self.method, "compact", False)
        self.columns.append(Columns(index, before.index.gather(1, place), keep.gather(1, place), before.width, compact))

    def _keys(self, columns: Columns, rows: int) -> tuple[Tensor, Tensor]:
        """Columns [R, K] of all keys of a layer in this pass, and whether each is real."""
        new = torch.arange(columns.width, self._past + self._queries, device=columns.index.device).repeat(rows, 1)
        index = torch.cat([_rows(columns.index, rows), new], 1)
        return index, torch.cat([_rows(columns.real, rows), torch.ones_like(new, dtype=torch.bool)], 1)

    def _fit(self, columns: Columns, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Masks and positions of the tokens that are left; `hidden` [R, Q', D] is the layer's input."""
        index, real = self._keys(columns, len(hidden))
        own = index[:, -hidden.shape[1] :]  # columns of the queries
        place = own - self._past
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        fitted: dict[str, Any] = {}
        if mask is not None:
            mask = _take(_rows(mask, len(hidden)).transpose(1, 2), place).transpose(1, 2)
            mask = mask.gather(3, index[:, None, None].expand(*mask.shape[:3], -1))
            low = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
            fitted["attention_mask"] = mask.masked_fill(~real[:, None, None], low)
        elif not bool(columns.real.all()):
            fitted["attention_mask"] = (own[:, :, None] >= index[:, None]).logical_and(real[:, None])[:, None]
        if positions is not None:
            fitted["position_ids"] = _take(_rows(positions, len(hidden)), place)
        if columns.compact:
            gone = index - (real.cumsum(1) - real.long())
            moved = fitted["position_ids"] - gone[:, -hidden.shape[1] :]
            fitted["position_ids"], fitted["position_embeddings"] = moved, self.decoder.rotary_emb(hidden, moved)
        else:
            embeddings = kwargs["position_embeddings"]
            fitted["position_embeddings"] = tuple(_take(_rows(part, len(hidden)), place) for part in embeddings)
        return fitted


def start(
    method: InsidePruner, decoder: Any, ids: Tensor, mask: Tensor, images: Sequence[tuple[int, Sequence[int]]]
) -> InsideCall | None:
    """Return the call for prompts [B, W]; None where nothing has to go.

    `images` pairs a placeholder's id with the numbers of tokens of the images that fill it, in order.
    """
    found, layers = [], len(decoder.layers)
    for token, counts in images:
        row, column = (ids == token).nonzero().unbind(1)
        for rows, columns in zip(row.split(list(counts)), column.split(list(counts)), strict=True):
            found.append(PromptImage(int(rows[0]), columns.contiguous(), columns.contiguous()))
    if all(min(method.schedule(image.total, layers).values()) >= image.total for image in found):
        return None
    return InsideCall(method, decoder, (), found, mask)


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """Repeat each row of a tensor for the beams of its prompt, or the only one for all."""
    return tensor if len(tensor) == rows else tensor.repeat_interleave(rows // len(tensor), 0)


def _take(tensor: Tensor, place: Tensor) -> Tensor:
    """Take the places [B or R, n] of the second dimension of [R, m, ...]."""
    place = _rows(place, len(tensor)).to(tensor.device)
    return tensor.gather(1, place.view(*place.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:]))


_call: ContextVar[InsideCall | None] = ContextVar("clustrs_inside", default=None)


@contextmanager
def pruned_inside(call: InsideCall | None) -> Iterator[None]:
    """Prune in hooked layers in this thread, if there is a call to prune in."""
    if call is None:
        yield
        return
    with scoring.using(_call, call), scoring.using(scoring.active_recorder, call):
        yield


def has_full_attention(config: Any) -> bool:
    """Return whether every layer of a language model attends to all tokens and has a cache of its own."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def hook_layers(decoder: Any, method: InsidePruner) -> list[Any]:
    """Hook the layers of a language model for a method, or raise ValueError; returns the hooks, to be removed."""
    name, implementation = method.name, getattr(decoder.config, "_attn_implementation", None)
    usable = ("sdpa", "eager")
    validation.check(implementation in usable, "attn_implementation", f"'sdpa' or 'eager' for {name}", implementation)
    layers = getattr(decoder, "layers", [])
    known = all(hasattr(layer, "self_attn") and hasattr(layer, "input_layernorm") for layer in layers)
    if not (layers and known and has_full_attention(decoder.config)):
        kind = decoder.config.model_type
        raise ValueError(f"{name} needs full attention in every layer of the language model, which {kind} has not")
    pruned = method.schedule(1, len(layers))
    read = [layers[index if method.own_layer else index - 1].self_attn for index in pruned]
    hooks: list[Any] = [layer.register_forward_pre_hook(_before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(_after))
    return [*hooks, *map(scoring.Hook, read)]


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _call.get()
    return None if call is None else call.before(module, args, kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    call = _call.get()
    return None if call is None else call.after(output)


def add_deepstack(original: Any, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Call the method of a decoder that adds further features to visual tokens (Qwen3-VL) with those that are left."""
    call, given = _call.get(), (hidden_states, visual_pos_masks, visual_embeds)
    added: Tensor = original(*(given if call is None else call.deepstack(*given)))
    return added
