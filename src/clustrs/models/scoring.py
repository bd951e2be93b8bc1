"""How much a vision tower attends to each patch, from the q and k projections of one layer.

The attention matrix itself is never asked for, so the tower may run on SDPA or FlashAttention, and never held whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HAS_CLS = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False}
"""Supported towers by `config.model_type`, and whether their first token is a CLS token."""
QUERIES = 64
"""How many queries are looked at together when the attention of all of them is wanted."""


@dataclass(frozen=True)
class Layer:
    """One attention layer: its norm, its projections, its number of heads, its scale."""

    norm: Callable[[Tensor], Tensor]
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    heads: int
    scale: float

    def split(self, projected: Tensor) -> Tensor:
        """[B, N, width] to [B, heads, N, width / heads], in float32."""
        return projected.float().unflatten(-1, (self.heads, -1)).transpose(1, 2)


def has_cls(tower: nn.Module) -> bool:
    """Whether the first token of a tower is a CLS token; an error for a tower that is not known."""
    kind = getattr(tower.config, "model_type", type(tower).__name__)
    if kind not in HAS_CLS:
        known = ", ".join(HAS_CLS)
        raise ValueError(f"vision tower {kind!r} is not supported: known are {known}; for others use select(...)")
    return HAS_CLS[kind]


def layers(tower: nn.Module) -> Sequence[Any]:
    """The encoder's layers, first to last."""
    encoder: Any = getattr(tower, "vision_model", tower).encoder
    return encoder.layers if hasattr(encoder, "layers") else encoder.layer


def layer_before(tower: nn.Module, feature_layer: int) -> tuple[Layer, int]:
    """The layer whose output is `hidden_states[feature_layer]`, and the index of its input in `hidden_states`."""
    stack = layers(tower)
    number = feature_layer - 1 if feature_layer >= 0 else len(stack) + feature_layer
    if not 0 <= number < len(stack):
        raise ValueError(f"vision_feature_layer={feature_layer}: no layer of the {len(stack)} makes that output")
    block = stack[number]
    if hasattr(block, "self_attn"):
        own = block.self_attn
        return Layer(block.layer_norm1, own.q_proj, own.k_proj, own.num_heads, own.scale), number
    attention = block.attention
    if hasattr(attention, "q_proj"):
        query, key = attention.q_proj, attention.k_proj
    else:  # DINOv2 up to transformers 5.17
        attention = attention.attention
        query, key = attention.query, attention.key
    return Layer(block.norm1, query, key, attention.num_attention_heads, attention.scaling), number


@torch.no_grad()
def look(layer: Layer, hidden: Tensor, cls: bool) -> tuple[Tensor, Tensor]:
    """Scores [B, patches] and keys [B, N, K], the mean over heads, of a layer's input [B, N, width].

    With a CLS token: the CLS row of the attention, patches only. Without: what each token receives, mean over queries.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        normed = layer.norm(hidden)
        keys = layer.split(layer.key(normed))
        queries = layer.split(layer.query(normed[:, :1] if cls else normed))
        if cls:
            scores = attend(queries, keys, layer.scale)[:, :, 0, 1:].mean(1)
        else:
            n = queries.shape[2]
            step = max(1, min(QUERIES, n // 8))
            scores = torch.zeros_like(keys[:, 0, :, 0])
            for block in queries.split(step, 2):
                scores += attend(block, keys, layer.scale).sum((1, 2))
            scores /= n * layer.heads
    return scores, keys.mean(1)


def attend(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Softmax attention of some queries [B, heads, Q, d] over all keys."""
    return (queries @ keys.mT * scale).softmax(-1)
