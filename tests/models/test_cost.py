"""Counted costs against torch's own counter and the real cache, on small models of the real classes.

Everything agrees exactly: both count matrix products and convolutions only, attention in full. SDPA runs with its
"math" backend here, because torch's counter does not know the fused kernel of the CPU. Older transformers
multiply positions and frequencies of the rotary embedding as matrices, which torch then counts: see `angles`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from clustrs.models.adapters import adapter_class, list_model_types
from clustrs.models.adapters.llava import projector_flops
from clustrs.models.adapters.towers import tower_flops
from clustrs.models.cost import Cost, count_cost
from clustrs.models.decoder_cost import decoder_flops, kv_cache_bytes

CROP: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 7,
}
NO_HEAD: dict[str, Any] = {"vision_use_head": False}
TOWERS: dict[str, Callable[[], Any]] = {
    "clip": lambda: CLIPVisionConfig(**CROP, intermediate_size=40),
    "siglip": lambda: SiglipVisionConfig(**CROP, intermediate_size=40, **NO_HEAD),
    "siglip with head": lambda: SiglipVisionConfig(**CROP, intermediate_size=40),
    "dinov2": lambda: Dinov2Config(**CROP, mlp_ratio=3),
    "dinov2 swiglu": lambda: Dinov2Config(**CROP, mlp_ratio=3, use_swiglu_ffn=True),
    "dinov2 registers": lambda: Dinov2WithRegistersConfig(**CROP, mlp_ratio=2, num_register_tokens=3),
}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 50}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "llama with wide heads": lambda: LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=1, head_dim=12),
    "mistral": lambda: MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True),
}
FAMILIES: list[tuple[Any, Any, str, str, str, Any]] = [
    (LlavaConfig, LlavaForConditionalGeneration, "clip", "llama", "default", -2),
    (LlavaConfig, LlavaForConditionalGeneration, "dinov2 registers", "mistral", "default", -1),
    (LlavaConfig, LlavaForConditionalGeneration, "dinov2 swiglu", "llama", "full", -1),
    (LlavaConfig, LlavaForConditionalGeneration, "clip", "llama with wide heads", "default", [-2, -1]),
    (LlavaNextConfig, LlavaNextForConditionalGeneration, "clip", "mistral", "default", -2),
    (LlavaNextConfig, LlavaNextForConditionalGeneration, "dinov2", "llama", "default", -2),
    (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, "siglip", "qwen2", "full", -1),
    (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, "siglip with head", "qwen2", "full", -1),
]


def build(family: tuple[Any, Any, str, str, str, Any], implementation: str = "eager") -> Any:
    config_class, model_class, tower, decoder, strategy, layer = family
    config = config_class(
        vision_config=TOWERS[tower](),
        text_config=DECODERS[decoder](),
        image_token_index=49,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    return model_class._from_config(config, attn_implementation=implementation).eval()


def flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """What torch counts while something runs, and its result."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def angles(model: Any, tokens: int) -> int:
    """What torch counts for the rotary embedding's angles alone: nothing, or a product of positions and frequencies."""
    rotary, positions = model.model.language_model.rotary_emb, torch.arange(tokens)[None]
    counted, _ = flops(lambda: rotary(torch.zeros(1), positions))
    assert counted in (0, 2 * tokens * len(rotary.inv_freq))
    return counted


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f[0].__name__}-{f[2]}-{f[3]}")
def test_every_part_agrees_with_torchs_counter(family: Any, implementation: str) -> None:
    model = build(family, implementation)
    config, text, cached = model.config, 5, 11
    pixels = torch.randn(1, 3, 30, 30)
    measured, features = flops(lambda: model.model.vision_tower(pixels, output_hidden_states=True))
    assert measured == tower_flops(config.vision_config)

    layers = family[5] if isinstance(family[5], list) else [family[5]]
    tokens = torch.cat([features.hidden_states[layer] for layer in layers], -1)
    tokens = tokens[:, 1:] if family[4] == "default" else tokens
    measured, visual = flops(lambda: model.model.multi_modal_projector(tokens))
    assert measured == projector_flops(config)

    kept = visual[:, :6]
    embeds = torch.cat([kept, model.get_input_embeddings()(torch.arange(text)[None])], 1)
    measured, out = flops(lambda: model(inputs_embeds=embeds, use_cache=True, logits_to_keep=1))
    assert measured - angles(model, cached) == decoder_flops(config.text_config, cached)
    entries = [part for layer in out.past_key_values.layers for part in (layer.keys, layer.values)]
    real = sum(part.numel() * part.element_size() for part in entries)
    assert real == kv_cache_bytes(config.text_config, cached, torch.float32)

    call = {"input_ids": torch.tensor([[7]]), "past_key_values": out.past_key_values}
    measured, _ = flops(lambda: model(**call))
    assert measured - angles(model, 1) == decoder_flops(config.text_config, 1, cached=cached)

    assert count_cost(config, text, 6) == Cost(
        vision=tower_flops(config.vision_config),
        projector=projector_flops(config),
        prefill=decoder_flops(config.text_config, cached),
        decode=decoder_flops(config.text_config, 1, cached=cached),
        kv_bytes=real,
    )


@pytest.mark.parametrize("family", FAMILIES[:1] + FAMILIES[2:4], ids=lambda f: f"{f[2]}-{f[3]}")
def test_whole_forward_with_a_image(family: Any) -> None:
    """Vision, projector and prefill together are all there is until the first token."""
    model = build(family)
    visual = 17 if family[4] == "full" else 16
    ids = torch.tensor([[1, 2] + [49] * visual + [3]])
    measured, _ = flops(lambda: model(input_ids=ids, pixel_values=torch.randn(1, 3, 30, 30), logits_to_keep=1))
    assert measured - angles(model, 3 + visual) == count_cost(model.config, 3, visual).first_token


def test_crops_and_half_precision() -> None:
    config = build(FAMILIES[6]).config
    one, five = count_cost(config, 5, 6), count_cost(config, 5, 6, crops=5, dtype=torch.bfloat16)
    assert (five.vision, five.projector) == (5 * one.vision, 5 * one.projector)
    assert (five.prefill, five.decode, 2 * five.kv_bytes) == (one.prefill, one.decode, one.kv_bytes)


def test_published_sizes() -> None:
    """LLaVA-1.5-7B: about 2 FLOPs a weight and token (6.5e9 of 7e9 weights are in the layers), 0.5 MiB a token."""
    config = LlavaConfig(text_config=LlamaConfig(vocab_size=32064))
    cost = count_cost(config, 40, 576, dtype=torch.float16)
    assert cost.prefill == pytest.approx(2 * 6.476e9 * 616, rel=0.03)
    assert cost.kv_bytes == 616 * 2**19
    assert cost.vision == pytest.approx(2 * 0.303e9 * 577, rel=0.1)
    assert cost.prefill / count_cost(config, 40, 16).prefill > 10


def test_what_cannot_be_counted_is_refused() -> None:
    config = build(FAMILIES[0]).config
    counted = [kind for kind in list_model_types() if adapter_class(kind).counts_vision]
    assert {"llava", "llava_next", "llava_onevision"} <= set(counted)
    with pytest.raises(ValueError, match=f"config: model_type 'gpt2' .* accepted: {', '.join(counted)}$"):
        count_cost(GPT2Config(), 1, 1)
    with pytest.raises(ValueError, match=r"text_config: model_type 'gpt2' .* accepted: llama, mistral, qwen2"):
        decoder_flops(GPT2Config(), 1)
    with pytest.raises(ValueError, match="vision_config: model_type 'gpt2'"):
        tower_flops(GPT2Config())
    with pytest.raises(ValueError, match="visual_tokens=-1"):
        count_cost(config, 1, -1)
    with pytest.raises(ValueError, match="crops=0"):
        count_cost(config, 1, 1, crops=0)
