"""FLOPs that several parts of a model have in common, and the check of what can be counted."""

from collections.abc import Sequence
from typing import Any


def attention_flops(queries: int, keys: int, width: int) -> int:
    """FLOPs of q k^T and of weights times v over all heads, `width` numbers together."""
    return 4 * queries * keys * width


def check_known(config: Any, accepted: Sequence[str], name: str) -> None:
    if getattr(config, "model_type", None) not in accepted:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"{name}: model_type {kind!r} cannot be counted; accepted: {', '.join(accepted)}")
