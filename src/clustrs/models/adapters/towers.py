"""Vision towers: which layer makes a hidden state, and whether a CLS token comes first."""

from typing import Any

from torch import Tensor, nn

from clustrs.models.flops import attention_flops, check_known
from clustrs.models.scoring import Listener, Reduction

HAS_CLS = {"clip_vision_model": True, "dinov2": True, "siglip_vision_model": False}
"""Supported towers by `config.model_type`, and whether their first token is a CLS token."""
COUNTED = (*HAS_CLS, "dinov2_with_registers")
"""Towers whose FLOPs can be counted."""


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


def tower_tokens(config: Any) -> tuple[int, int]:
    """How many patch tokens and how many others (CLS, registers) a tower makes of one crop; takes its own config."""
    check_known(config, COUNTED, "vision_config")
    extra = 0 if config.model_type == "siglip_vision_model" else 1 + getattr(config, "num_register_tokens", 0)
    return (config.image_size // config.patch_size) ** 2, extra


def tower_flops(config: Any) -> int:
    """FLOPs of the vision tower for one crop, all its layers (they all run, whichever the projector reads)."""
    patches, extra = tower_tokens(config)
    tokens, width = patches + extra, config.hidden_size
    if config.model_type.startswith("dinov2"):
        inner, matrices = int(width * config.mlp_ratio), 2
        if config.use_swiglu_ffn:
            inner, matrices = (int(inner * 2 / 3) + 7) // 8 * 8, 3
    else:
        inner, matrices = config.intermediate_size, 2
    embedding = 2 * patches * width * config.num_channels * config.patch_size**2
    layer = 2 * tokens * width * (4 * width + matrices * inner) + attention_flops(tokens, tokens, width)
    head = 0
    if config.model_type == "siglip_vision_model" and getattr(config, "vision_use_head", True):
        head = 2 * width * (2 * width + 2 * tokens * width + 2 * inner) + attention_flops(1, tokens, width)
    return embedding + config.num_hidden_layers * layer + head
