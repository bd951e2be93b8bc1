"""What a model call costs, counted from the model's config alone: FLOPs of every part, bytes of the KV cache.

Only matrix products and convolutions count, a multiply-add as 2 FLOPs; norms, activations and softmax do not.
Attention counts in full, as eager and SDPA kernels with a mask compute it: nothing is saved for the causal half.
"""

from dataclasses import dataclass
from typing import Any

import torch

from clustrs.models.adapters import adapter_class, list_model_types
from clustrs.models.flops import attention_flops, check_known

DECODERS = ("llama", "mistral", "qwen2", "gemma", "gemma2", "gemma3_text")


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

    `config` is a model's, of a family whose adapter counts its vision tower; `dtype` is the KV cache's.
    """
    counted = [kind for kind in list_model_types() if adapter_class(kind).counts_vision]
    check_known(config, counted, "config")
    for name, value, least in [
        ("text_tokens", text_tokens, 0),
        ("visual_tokens", visual_tokens, 0),
        ("crops", crops, 1),
    ]:
        if value < least:
            raise ValueError(f"{name}={value!r}: a number of at least {least} is needed")
    prompt = text_tokens + visual_tokens
    tower, projector = adapter_class(config.model_type).vision_flops(config)
    return Cost(
        vision=crops * tower,
        projector=crops * projector,
        prefill=decoder_flops(config.text_config, prompt),
        decode=decoder_flops(config.text_config, 1, cached=prompt),
        kv_bytes=kv_cache_bytes(config.text_config, prompt, dtype),
    )


def decoder_flops(config: Any, tokens: int, cached: int = 0) -> int:
    """FLOPs of `tokens` new positions after `cached` ones through all decoder layers, and of one position's logits.

    Prefill has nothing cached; decoding is one token after the cached ones. Takes the text config.
    """
    head = _check_decoder(config, tokens + cached)
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    layer = 2 * tokens * weights + attention_flops(tokens, tokens + cached, queries)
    return config.num_hidden_layers * layer + 2 * config.hidden_size * config.vocab_size


def kv_cache_bytes(config: Any, entries: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of `entries` positions in all layers. Takes the text config."""
    head = _check_decoder(config, entries)
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * entries * dtype.itemsize


def _check_decoder(config: Any, positions: int) -> int:
    """The size of a head, once it is clear that this decoder is one that can be counted."""
    check_known(config, DECODERS, "text_config")
    window = getattr(config, "sliding_window", None)
    if window is not None and positions > window:
        raise ValueError(
            f"text_config.sliding_window={window}: {positions} positions exceed it; only full attention is counted"
        )
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
