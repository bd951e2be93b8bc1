"""Vision towers: which layer makes a hidden state, and whether a CLS token comes first."""

from typing import Any

from torch import Tensor, nn

from clustrs.models.scoring import Listener, Reduction

HAS_CLS = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False}
"""Supported towers by `config.model_type`, and whether their first token is a CLS token."""


def has_cls(tower: Any) -> bool:
    """Whether the first token of a tower is a CLS token; an error for a tower that is not known."""
    kind = getattr(tower.config, "model_type", type(tower).__name__)
    if kind not in HAS_CLS:
        known = ", ".join(HAS_CLS)
        raise ValueError(f"vision tower {kind!r} is not supported: known are {known}; for others use select(...)")
    return HAS_CLS[kind]


def reduction(tower: Any) -> Reduction:
    """What a token's score is in this tower."""
    return "cls" if has_cls(tower) else "received"


def attention_layer(tower: Any, feature_layer: int) -> nn.Module:
    """The attention layer of the block whose output is `hidden_states[feature_layer]`."""
    encoder: Any = getattr(tower, "vision_model", tower).encoder
    blocks = encoder.layers if hasattr(encoder, "layers") else encoder.layer
    index = feature_layer - 1 if feature_layer >= 0 else len(blocks) + feature_layer
    if not 0 <= index < len(blocks):
        raise ValueError(f"vision_feature_layer={feature_layer}: no layer of the {len(blocks)} makes that output")
    block = blocks[index]
    layer: nn.Module = block.self_attn if hasattr(block, "self_attn") else block.attention
    return layer


def heard(listener: Listener) -> tuple[Tensor, Tensor]:
    """The scores and keys of the only call that was heard."""
    if len(listener.scores) != 1:
        name = type(listener.layer).__name__
        raise ValueError(f"the attention of {name} was heard {len(listener.scores)} times, once is expected")
    return listener.scores[0], listener.keys[0]
