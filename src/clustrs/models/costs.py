"""Count what a model call costs: FLOPs of every part, bytes of the KV cache.

The model is built from its config on the meta device, and torch's `FlopCounterMode` counts the matrix products and
convolutions of its own code; a multiply-add is 2 FLOPs. Norms, activations and softmax do not count. Attention counts
in full, also its causal half and what lies outside a sliding window in prefill. Experts count as far as they are
active, linear attention as transformers' own PyTorch code computes it, whose update by one token is elementwise.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from clustrs import validation
from clustrs.models.adapters.base import PatchGrid, adapter_class, get_adapter
from clustrs.models.inside import Columns, InsideCall, hook_layers, pruned_inside
from clustrs.pruners.base import Pruner
from clustrs.pruners.baselines import NoPruning
from clustrs.pruners.inside import InsidePruner

CACHED = ("keys", "values", "conv_states", "recurrent_states")  # tensors of a cache's layers, under transformers' names


@dataclass(frozen=True)
class Cost:
    """FLOPs of one question about one image, part by part, and the bytes of the KV cache after prefill.

    Attributes:
        vision: FLOPs of the vision tower, for all crops.
        projector: FLOPs of the projector, for all crops.
        prefill: FLOPs of the language model for the prompt, with the logits of its last position.
        decode: FLOPs of the first token after prefill.
        kv_bytes: Bytes of the cache after prefill.
        visual_tokens: Visual tokens that the last layer reads.
        average_tokens: Their mean over the layers: more, if a method prunes inside the language model.
    """

    vision: int
    projector: int
    prefill: int
    decode: int
    kv_bytes: int
    visual_tokens: int
    average_tokens: float

    @property
    def first_token(self) -> int:
        """FLOPs until the first new token is known."""
        return self.vision + self.projector + self.prefill


def count_cost(
    config: Any,
    text_tokens: int,
    visual_tokens: int,
    crops: int = 1,
    dtype: torch.dtype = torch.float32,
    grid: PatchGrid | None = None,
    method: Pruner | None = None,
) -> Cost:
    """Count the cost of a prompt with some visual tokens, before or after pruning.

    The selection itself does not count.

    Args:
        config: The model's config. No weights are loaded.
        text_tokens: Tokens of the prompt that are text.
        visual_tokens: Visual tokens that the language model reads; with a method, those that it would read unpruned.
        crops: Crops that go through the vision tower.
        dtype: Type of the weights and of the KV cache.
        grid: Size of the image in patches, for families that take images of any size.
        method: A method that prunes; needed for one inside the language model, whose layers read different numbers.

    Returns:
        FLOPs of each part and bytes of the cache.

    Raises:
        ValueError: For a family that is not supported, or numbers that no prompt has.

    Examples:
        >>> from transformers import LlavaConfig
        >>> cost = count_cost(LlavaConfig(), text_tokens=35, visual_tokens=576)
        >>> f"{cost.prefill / 1e12:.2f} TFLOP, {cost.kv_bytes / 2**20:.0f} MiB"
        '8.11 TFLOP, 611 MiB'
        >>> cost = count_cost(LlavaConfig(), text_tokens=35, visual_tokens=576, method=FastV(keep=64, layer=2))
        >>> f"{cost.prefill / 1e12:.2f} TFLOP, {cost.kv_bytes / 2**20:.0f} MiB, {cost.average_tokens} tokens"
        '1.71 TFLOP, 131 MiB, 96.0 tokens'
    """
    validation.integer("text_tokens", text_tokens, 0)
    validation.integer("visual_tokens", visual_tokens, 0)
    validation.integer("crops", crops, 1)
    kind = adapter_class(getattr(config, "model_type", None) or type(config).__name__)
    if kind.takes_grid and grid is None:
        raise ValueError(f"grid must be a PatchGrid for a {config.model_type} model, whose images have any size")
    what = f"None for a {config.model_type} model, whose crops have one size"
    validation.check(grid is None or kind.takes_grid, "grid", what, grid)
    model = meta_model(config, dtype)
    tower, projector = count_vision(model, grid)
    first, inside = (method or NoPruning()).parts()
    entered = first.count(visual_tokens)
    last = entered if inside is None else inside.count(entered)
    average = last if inside is None else inside.average_tokens(entered, len(model.get_decoder().layers))
    counts = count_text(model, text_tokens + entered, entered, inside)
    return Cost(crops * tower, crops * projector, *counts, last, float(average))


def meta_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Build a model without weights. Experts are multiplied in batches, which needs no values to know their shapes.
    The config is copied: transformers writes the attention implementation into it, and a live model may share it."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(
            deepcopy(config), dtype=dtype, attn_implementation="eager", experts_implementation="batched_mm"
        ).eval()


def count_vision(model: Any, grid: PatchGrid | None = None) -> tuple[int, int]:
    """Count the FLOPs of the tower and of the projector for one crop, or for one image (or video) of a grid."""
    adapter, projected = get_adapter(model), []
    with counting() as counter, ExitStack() as hooks:
        for part in adapter.projectors():
            hooks.enter_context(part.register_forward_pre_hook(lambda *_: projected.append(-total(counter))))
            hooks.enter_context(part.register_forward_hook(lambda *_: projected.append(total(counter))))
        adapter.encode_blank(grid)
    return total(counter) - sum(projected), sum(projected)


def count_text(
    model: Any, tokens: int, visual_tokens: int = 0, inside: InsidePruner | None = None
) -> tuple[int, int, int]:
    """Count the FLOPs of prefill and of the token after it, and the bytes of the cache between the two.

    A method inside the language model drops the last of the visual tokens, which come first.
    """
    cache, counts, held, call = None, [], 0, None
    if inside is not None:
        decoder = model.get_decoder()
        hook_layers(decoder, inside)  # the model is thrown away, hooks and all
        columns = []
        for layer, left in inside.schedule(visual_tokens, len(decoder.layers)).items():
            index = torch.cat([torch.arange(left), torch.arange(visual_tokens, tokens)])[None]
            columns.append(Columns(layer, index, torch.ones_like(index, dtype=torch.bool), tokens))
        call = InsideCall(inside, decoder, columns)
    for new in (tokens, 1):
        with counting() as counter, pruned_inside(call):
            ids = torch.zeros(1, new, dtype=torch.long, device="meta")
            out = model(input_ids=ids, use_cache=True, past_key_values=cache, logits_to_keep=1)
        counts.append(total(counter))
        if cache is None:
            cache = out.past_key_values
            held = cache_bytes(cache.layers)
    return counts[0], counts[1], held


def cache_bytes(layers: Iterable[Any]) -> int:
    """Return the bytes of what some layers of a cache hold: keys and values, or states of linear attention."""
    held = tree_leaves([getattr(layer, name, None) for layer in layers for name in CACHED])
    return sum(part.nbytes for part in held if isinstance(part, Tensor))


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of a block, with triangular systems (of linear attention), which torch has no formula for."""
    mapping = {torch.ops.aten.linalg_solve_triangular: _triangular_flops}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter, _HelpersToMeta():
        yield counter


def total(counter: FlopCounterMode) -> int:
    """Return the counted FLOPs without rotary embeddings, which older transformers compute as products of matrices."""
    parts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in parts.items() if "rotary" in name.rpartition(".")[2])
    return int(counter.get_total_flops() - rotary)


def _triangular_flops(matrix: Any, columns: Any, *_: Any, **__: Any) -> int:
    """FLOPs of solving triangular systems [..., n, n] for [..., n, m]: half those of a product."""
    return int(matrix[-1] * prod(columns))


class _HelpersToMeta(TorchDispatchMode):
    """Positions and masks have values, on the CPU, for shapes may depend on them; they move to the meta device where
    they meet a tensor that is there. A flag that is read from it ("is anything masked?") is true; no count cares."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
                return True
            if func is torch.ops.aten.index.Tensor:  # row numbers in place of a mask, whose values are known on the CPU
                indices: list[Any] = []
                for index in args[1]:
                    is_mask = index is not None and index.dtype == torch.bool and not index.is_meta
                    indices += index.nonzero().unbind(1) if is_mask else [index]
                args = (args[0], indices)
            args, kwargs = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
        return func(*args, **kwargs)
