"""What torch counts while a model runs, and what its cache really holds: the oracle of the counted costs."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def triangular_system(matrix: Any, columns: Any, *_: Any, **__: Any) -> int:
    """FLOPs of solving triangular systems [..., n, n] for [..., n, m]: half those of a product. torch has no count."""
    return int(matrix[-1] * prod(columns))


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """What torch counts while something runs, and its result.

    SDPA runs with its "math" backend, because the counter does not know the fused kernel of the CPU. Rotary embeddings
    are left out: older transformers compute angles with a product of matrices, newer ones do not.
    """
    mapping = {torch.ops.aten.linalg_solve_triangular: triangular_system}
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=mapping) as counter,
    ):
        result = call()
    parts = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in parts.items() if "rotary" in name.rpartition(".")[2])
    return counter.get_total_flops() - rotary, result


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds for its prompt: keys and values, states of linear layers."""
    held = []
    for layer in cache.layers:
        held += [getattr(layer, name, None) for name in ("keys", "values")]
        for name in ("conv_states", "recurrent_states"):
            held += list((getattr(layer, name, None) or {}).values())
    return sum(part.numel() * part.element_size() for part in held if part is not None)
