"""What a model call costs, counted from the model's config alone: FLOPs of every part, bytes of the KV cache.

Only matrix products and convolutions count, a multiply-add as 2 FLOPs; norms, activations and softmax do not.
Attention counts in full, as eager and SDPA kernels with a mask compute it: nothing is saved for the causal half.
"""

from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("llava", "llava_next", "llava_onevision")
TOWERS = ("clip_vision_model", "siglip_vision_model", "dinov2", "dinov2_with_registers")
DECODERS = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Cost:
    """FLOPs of one question about one image, part by part, and the bytes of the KV cache after prefill.

    `vision` and `projector` are for all crops, `decode` is for the first token after prefill.
    """

    vision: int
    projector: int
    prefill: int
    decode: int
    kv_bytes: int

    @property
    def first_token(self) -> int:
        """FLOPs until the first new token is known."""
        return self.vision + self.projector + self.prefill


def count_cost(
    config: Any, text_tokens: int, visual_tokens: int, crops: int = 1, dtype: torch.dtype = torch.float32
) -> Cost:
    """The cost for a prompt of `text_tokens` and `visual_tokens` that survive of a image with `crops` crops.

    `config` is a LlavaConfig, LlavaNextConfig or LlavaOnevisionConfig; `dtype` is the KV cache's.
    """
    _known(config, FAMILIES, "config")
    for name, value, least in [
        ("text_tokens", text_tokens, 0),
        ("visual_tokens", visual_tokens, 0),
        ("crops", crops, 1),
    ]:
        if value < least:
            raise ValueError(f"{name}={value!r}: a number of at least {least} is needed")
    prompt = text_tokens + visual_tokens
    return Cost(
        vision=crops * vision_flops(config.vision_config),
        projector=crops * projector_flops(config),
        prefill=decoder_flops(config.text_config, prompt),
        decode=decoder_flops(config.text_config, 1, cached=prompt),
        kv_bytes=kv_cache_bytes(config.text_config, prompt, dtype),
    )


def tower_tokens(config: Any) -> tuple[int, int]:
    """How many patch tokens and how many others (CLS, registers) a tower makes of one crop; takes its own config."""
    _known(config, TOWERS, "vision_config")
    extra = 0 if config.model_type == "siglip_vision_model" else 1 + getattr(config, "num_register_tokens", 0)
    return (config.image_size // config.patch_size) ** 2, extra


def vision_flops(config: Any) -> int:
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
    layer = 2 * tokens * width * (4 * width + matrices * inner) + _attention(tokens, tokens, width)
    head = 0
    if config.model_type == "siglip_vision_model" and getattr(config, "vision_use_head", True):
        head = 2 * width * (2 * width + 2 * tokens * width + 2 * inner) + _attention(1, tokens, width)
    return embedding + config.num_hidden_layers * layer + head


def projector_flops(config: Any) -> int:
    """FLOPs of the projector for one crop; takes the whole model's config. It sees every token: pruning comes after."""
    patches, extra = tower_tokens(config.vision_config)
    tokens = patches + extra - (config.vision_feature_select_strategy == "default")
    layers = 1 if isinstance(config.vision_feature_layer, int) else len(config.vision_feature_layer)
    out = config.text_config.hidden_size
    return 2 * tokens * out * (layers * config.vision_config.hidden_size + out)


def decoder_flops(config: Any, tokens: int, cached: int = 0) -> int:
    """FLOPs of `tokens` new positions after `cached` ones through all decoder layers, and of one position's logits.

    Prefill has nothing cached; decoding is one token after the cached ones. Takes the text config.
    """
    head = _check_decoder(config, tokens + cached)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    layer = 2 * tokens * weights + _attention(tokens, tokens + cached, queries)
    return config.num_hidden_layers * layer + 2 * config.hidden_size * config.vocab_size


def kv_cache_bytes(config: Any, entries: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `entries` positions in all layers. Takes the text config."""
    head = _check_decoder(config, entries)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * entries * dtype.itemsize


def _attention(queries: int, keys: int, width: int) -> int:
    """FLOPs of q k^T and of weights times v over all heads, `width` numbers together."""
    return 4 * queries * keys * width


def _check_decoder(config: Any, positions: int) -> int:
    """The size of a head, once it is clear that this decoder is one that can be counted."""
    _known(config, DECODERS, "text_config")
    window = getattr(config, "sliding_window", None)
    if window is not None and positions > window:
        raise ValueError(
            f"text_config.sliding_window={window}: {positions} positions exceed it; only full attention is counted"
        )
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _known(config: Any, accepted: tuple[str, ...], name: str) -> None:
    if getattr(config, "model_type", None) not in accepted:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"{name}: model_type {kind!r} cannot be counted; accepted: {', '.join(accepted)}")
