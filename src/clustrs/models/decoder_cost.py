"""What a language model costs, layer by layer, counted from its text config: FLOPs, and bytes of the cache.

Layers attend in full, within a sliding window, or linearly (a gated delta rule with a state of constant size). Experts
count as far as they are active.
"""

from collections.abc import Sequence
from typing import Any

import torch

from clustrs.models.flops import attention_flops, check_known

DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
)
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
CHUNK = 64
"""Positions that transformers' gated delta rule takes at a time; the last chunk is filled up."""
STATE_BYTES = 4
"""Of a number in the state of a linear layer, which is float32 whatever the model is."""


def decoder_flops(config: Any, tokens: int, cached: int = 0) -> int:
    """FLOPs of `tokens` new positions after `cached` ones through all decoder layers, and of one position's logits.

    Prefill has nothing cached; decoding is one token after the cached ones. Takes the text config.
    """
    kinds = layer_types(config)
    total = 2 * config.hidden_size * config.vocab_size
    for index, kind in enumerate(kinds):
        if kind == "linear_attention":
            mixer = linear_attention_flops(config, tokens, cached)
        else:
            mixer = softmax_attention_flops(config, index, tokens, cached)
        computed = computed_positions(config, index, tokens)
        total += mixer + 2 * computed * feed_forward_weights(config, index) + 2 * tokens * input_weights(config)
    return total


def kv_cache_bytes(config: Any, entries: int, dtype: torch.dtype) -> int:
    """Bytes of what is cached of `entries` positions in all layers. Takes the text config.

    A sliding layer has at most one entry less than its window: those that the next token sees. A linear layer has a
    state of constant size. Layers that use the keys and values of another one have none.
    """
    total = 0
    for index, kind in enumerate(layer_types(config)):
        if kind == "linear_attention":
            convolved, heads = linear_widths(config)
            state = heads * config.linear_key_head_dim * config.linear_value_head_dim
            total += convolved * config.linear_conv_kernel_dim * dtype.itemsize + state * STATE_BYTES
        elif not shares_keys(config, index):
            _, keys = attention_widths(config, index)
            total += 2 * keys * visible(config, kind, entries) * dtype.itemsize
    return total


def layer_types(config: Any) -> Sequence[str]:
    """What each layer does, once it is clear that this decoder is one that can be counted."""
    check_known(config, DECODERS, "text_config")
    usual = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds: Sequence[str] = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise ValueError(f"text_config.layer_types: {kind!r} cannot be counted; accepted: {', '.join(LAYER_TYPES)}")
    return kinds


def visible(config: Any, kind: str, cached: int) -> int:
    """How many of the cached positions the next token sees."""
    return min(cached, config.sliding_window - 1) if kind == "sliding_attention" else cached


def softmax_attention_flops(config: Any, index: int, tokens: int, cached: int) -> int:
    """FLOPs of a layer's projections and of its attention. Within a window, what is masked counts as well."""
    queries, keys = attention_widths(config, index)
    kind = layer_types(config)[index]
    projected = 2 * queries
    if config.model_type.startswith("qwen3_5"):  # a gate for each number of the output
        projected += queries
    if not shares_keys(config, index):
        values_are_keys = getattr(config, "attention_k_eq_v", False) and kind == "full_attention"
        projected += keys if values_are_keys else 2 * keys
    reach = tokens + visible(config, kind, cached)
    computed = computed_positions(config, index, tokens)
    return 2 * computed * config.hidden_size * projected + attention_flops(computed, reach, queries)


def attention_widths(config: Any, index: int) -> tuple[int, int]:
    """Numbers of all query heads together, and of all key heads. Gemma 4's layers differ."""
    layer = config.per_layer_config[index] if config.model_type == "gemma4_text" else config
    head = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head, layer.num_key_value_heads * head


def shares_keys(config: Any, index: int) -> bool:
    """Whether a layer uses the keys and values of an earlier one."""
    shared = getattr(config, "num_kv_shared_layers", 0) if config.model_type == "gemma4_text" else 0
    return bool(index >= config.num_hidden_layers - shared)


def computed_positions(config: Any, index: int, tokens: int) -> int:
    """How many of the new positions go through a layer.

    From transformers 5.23 on, only the one whose logits are wanted goes through the layers that use the keys and values
    of earlier ones: nothing else of them is read.
    """
    skips = shares_keys(config, index) and hasattr(type(config), "kv_sharing_modes")
    return 1 if skips else tokens


def linear_widths(config: Any) -> tuple[int, int]:
    """Channels of a linear layer's convolution (queries, keys and values), and how many heads have a state."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim, config.linear_num_value_heads


def linear_attention_flops(config: Any, tokens: int, cached: int) -> int:
    """FLOPs of a gated delta rule, as transformers' own code computes it.

    One token after others reads its state twice and writes it once; its convolution computes a position twice. A prompt
    is taken in chunks, each with three products over all pairs of positions, two triangular systems to solve, and the
    same reads and writes for all positions at once; its convolution runs on over the padding.
    """
    convolved, heads = linear_widths(config)
    key, value, kernel = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    weights = config.hidden_size * (convolved + 2 * heads * value + 2 * heads)
    if tokens == 1 and cached:
        return 2 * weights + 2 * 2 * convolved * kernel + heads * 6 * key * value
    if cached:
        raise ValueError(
            f"tokens={tokens} after {cached} cached ones: linear attention is counted for prefill and for 1"
        )
    chunks = -(-tokens // CHUNK)
    pairs = 2 * CHUNK**2 * (2 * key + value)
    systems = CHUNK**2 * (key + value)
    states = 6 * CHUNK * key * value
    positions = max(tokens, kernel) + kernel - 1
    return 2 * tokens * weights + 2 * convolved * kernel * positions + chunks * heads * (pairs + systems + states)


def feed_forward_weights(config: Any, index: int) -> int:
    """Weights that a token meets in a layer after its attention: feed-forward, active experts, its per-layer input."""
    kind, width = config.model_type, config.hidden_size
    if kind == "gemma4_text":
        dense = 3 * width * config.intermediate_size * (1 + (config.use_double_wide_mlp and shares_keys(config, index)))
        sparse = expert_weights(config, config.top_k_experts) if config.enable_moe_block else 0
        return dense + sparse + 2 * input_weights(config)
    if kind == "qwen3_5_moe_text":
        shared = 3 * width * config.shared_expert_intermediate_size + width
        return shared + expert_weights(config, config.num_experts_per_tok)
    if kind in ("qwen3_moe", "qwen3_vl_moe_text"):
        dense_layers = config.mlp_only_layers or []
        if index not in dense_layers and config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0:
            return expert_weights(config, config.num_experts_per_tok)
    return 3 * width * int(config.intermediate_size)


def input_weights(config: Any) -> int:
    """Weights that make a layer's own input of a token, which Gemma 4's layers may have: before the first layer."""
    own = config.hidden_size_per_layer_input if config.model_type == "gemma4_text" else 0
    return int(config.hidden_size * (own or 0))


def expert_weights(config: Any, active: int) -> int:
    """Weights of the router and of the experts that a token is sent to."""
    return config.hidden_size * int(config.num_experts + 3 * active * config.moe_intermediate_size)
