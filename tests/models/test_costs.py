"""Costs counted on the meta device against what torch counts while the real model runs, and against known numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import BUILDERS, family_inputs, make_image
from tiny_models.qwen import video_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clustrs import DART, ClustRS, Compose, FastV, PyramidDrop, Random
from clustrs.models.adapters.base import PatchGrid, get_adapter
from clustrs.models.costs import _triangular_flops, count_cost, count_text, count_vision, meta_model, total

LoadFamily = Callable[[str], tuple[Any, Any]]


def count_flops(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return what torch counts while a real model runs, and its result; SDPA with the backend that torch can count."""
    mapping = {torch.ops.aten.linalg_solve_triangular: _triangular_flops}
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=mapping) as counter,
    ):
        result = call()
    return total(counter), result


def cache_bytes(cache: Any) -> int:
    """Bytes of keys, values and states of linear layers that a cache really holds."""
    held: list[Any] = []
    for layer in cache.layers:
        held += [getattr(layer, name, None) for name in ("keys", "values")]
        for name in ("conv_states", "recurrent_states"):
            held += list((getattr(layer, name, None) or {}).values())
    return sum(part.numel() * part.element_size() for part in held if part is not None)


def patch_grid(inputs: dict[str, Any]) -> PatchGrid | None:
    """The size of the only image, where the family has images of any size."""
    if "image_position_ids" in inputs:
        width, height = (inputs["image_position_ids"][0].amax(0) + 1).tolist()
        return PatchGrid(height, width, padded=inputs["pixel_values"].shape[1])
    if "image_grid_thw" in inputs:
        frames, height, width = inputs["image_grid_thw"][0].tolist()
        return PatchGrid(height, width, frames)
    return None


def test_counting_leaves_a_live_model_as_it_is(load_family: LoadFamily) -> None:
    config = load_family("llava")[0].config
    parts = (config, config.text_config, config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert "eager" not in before
    count_cost(config, 5, 6)
    assert [part._attn_implementation for part in parts] == before


@pytest.mark.parametrize("family", BUILDERS)
def test_a_real_call_costs_as_much(load_family: LoadFamily, family: str) -> None:
    """Tower, projector and prefill with eager and SDPA attention; cache and next token of a pruned prompt."""
    model, processor = load_family(family)
    if hasattr(model.config.text_config, "num_experts"):
        model.set_experts_implementation("eager")  # only active experts; a fused kernel is not counted by torch
    inputs = family_inputs(model, processor, ["IMAGE what is it?"], [make_image(40, 60)])
    inputs.pop("labels", None)
    grid, width = patch_grid(inputs), inputs["input_ids"].shape[1]
    visual = int((inputs["input_ids"] == get_adapter(model).placeholder("image")).sum())
    with torch.no_grad(), ClustRS(keep=6)(model) as handle:
        out = model(**inputs, use_cache=True)
    crops = len(handle.last[0].grids)
    pruned = count_cost(model.config, width - visual, 6, crops, grid=grid)
    assert pruned.kv_bytes == cache_bytes(out.past_key_values)
    token = torch.tensor([[9]])
    assert pruned.decode == count_flops(lambda: model(input_ids=token, past_key_values=out.past_key_values))[0]
    whole = count_cost(model.config, width - visual, visual, crops, grid=grid)
    for implementation in ("eager",) if family == "paligemma2" else ("eager", "sdpa"):  # Gemma 2 has eager alone
        model.set_attn_implementation(implementation)
        assert whole.first_token == count_flops(lambda: model(**inputs, logits_to_keep=1))[0]
    assert pruned.prefill < whole.prefill
    assert (pruned.vision, pruned.projector) == (whole.vision, whole.projector)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma4", "smolvlm"])
def test_tower_and_projector_apart(load_family: LoadFamily, family: str) -> None:
    """The projector is what the tokens pass after the tower, deepstack features included."""
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, ["IMAGE what is it?"], [make_image(32, 32)])
    adapter, calls = get_adapter(model), []
    hooks = [
        part.register_forward_pre_hook(lambda module, *given: calls.append((module, given)), with_kwargs=True)
        for part in adapter.projectors()
    ]
    given = ("pixel_values", "image_grid_thw", "image_position_ids")
    arguments = {name: inputs[name] for name in given if name in inputs}
    both, _ = count_flops(lambda: model.model.get_image_features(**arguments))
    for hook in hooks:
        hook.remove()
    projected, _ = count_flops(lambda: [module(*args, **kwargs) for module, (args, kwargs) in calls])
    tower, projector = count_vision(meta_model(model.config), patch_grid(inputs))
    crops = projected // projector
    assert (both - projected, projected) == (crops * tower, crops * projector)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos_of_several_frames(load_family: LoadFamily, family: str) -> None:
    """Frames do not attend to each other; windows are cut off at the edges of each."""
    model, _ = load_family(family)
    inputs = video_inputs(model.config, [(3, 5, 3)], timestamps=family.startswith("qwen3"))
    measured, _ = count_flops(
        lambda: model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    )
    assert measured == sum(count_vision(meta_model(model.config), PatchGrid(10, 6, frames=3)))


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama with wide heads": lambda: tf.LlamaConfig(**SIZES, head_dim=12),
    "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": lambda: tf.MistralConfig(**SIZES, sliding_window=8),
    "qwen2 with a window": lambda: tf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=12),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
}


@pytest.mark.parametrize("tokens", [5, 8, 13])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_that_others_build_on(name: str, tokens: int) -> None:
    """Also with more positions than a window has: prefill masks the rest, the cache leaves it out."""
    vision = tf.CLIPVisionConfig(**CROP, intermediate_size=40)
    config = tf.LlavaConfig(text_config=DECODERS[name](), vision_config=vision, image_token_index=49)
    model = tf.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    if hasattr(config.text_config, "num_experts"):
        model.set_experts_implementation("eager")
    measured, out = count_flops(lambda: model(input_ids=torch.arange(tokens)[None], use_cache=True, logits_to_keep=1))
    held = cache_bytes(out.past_key_values)
    decoded, _ = count_flops(lambda: model(input_ids=torch.tensor([[7]]), past_key_values=out.past_key_values))
    assert count_text(meta_model(config), tokens) == (measured, decoded, held)


CROP: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 7,
}
TOWERS: dict[str, tuple[Callable[[], Any], str, Any, int]] = {
    "clip, two layers": (lambda: tf.CLIPVisionConfig(**CROP, intermediate_size=40), "default", [-2, -1], 16),
    "siglip with head": (lambda: tf.SiglipVisionConfig(**CROP, intermediate_size=40), "full", -1, 16),
    "dinov2 swiglu": (lambda: tf.Dinov2Config(**CROP, mlp_ratio=3, use_swiglu_ffn=True), "full", -1, 17),
    "registers": (
        lambda: tf.Dinov2WithRegistersConfig(**CROP, mlp_ratio=2, num_register_tokens=3),
        "default",
        -1,
        19,
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_whole_forward_with_an_image(name: str) -> None:
    """Vision, projector and prefill together are all there is until the first token."""
    tower, strategy, layer, visual = TOWERS[name]
    config = tf.LlavaConfig(
        vision_config=tower(),
        text_config=DECODERS["mistral"](),
        image_token_index=49,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    model = tf.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    call = {"input_ids": torch.tensor([[1, 2] + [49] * visual + [3]]), "pixel_values": torch.randn(1, 3, 30, 30)}
    measured, _ = count_flops(lambda: model(**call, logits_to_keep=1))
    assert measured == count_cost(config, 3, visual).first_token


def test_published_sizes() -> None:
    """LLaVA-1.5-7B by hand: a layer has 4 D^2 + 3 D I weights, each 2 FLOPs a token, and 4 n^2 D of attention."""
    config = tf.LlavaConfig(text_config=tf.LlamaConfig(vocab_size=32064))
    cost = count_cost(config, 40, 576, dtype=torch.float16)
    n, width, inner = 616, 4096, 11008
    layer = 2 * n * (4 * width**2 + 3 * width * inner) + 4 * n**2 * width
    assert cost.prefill == 32 * layer + 2 * width * 32064
    assert cost.prefill == pytest.approx(2 * 6.476e9 * n, rel=0.03)
    assert cost.kv_bytes == n * 2**19
    assert cost.vision == pytest.approx(2 * 0.303e9 * 577, rel=0.1)
    assert cost.prefill / count_cost(config, 40, 16).prefill > 10


def test_crops_and_half_precision() -> None:
    config = tf.LlavaConfig(vision_config=TOWERS["clip, two layers"][0](), text_config=DECODERS["mistral"]())
    one, five = count_cost(config, 5, 6), count_cost(config, 5, 6, crops=5, dtype=torch.bfloat16)
    assert (five.vision, five.projector) == (5 * one.vision, 5 * one.projector)
    assert (five.prefill, five.decode, 2 * five.kv_bytes) == (one.prefill, one.decode, one.kv_bytes)


def test_a_linear_layers_state_stays_in_float32(load_family: LoadFamily) -> None:
    model, _ = load_family("qwen3_5")
    out = model.to(torch.bfloat16)(input_ids=torch.arange(10, 14)[None], use_cache=True)
    assert count_text(meta_model(model.config, torch.bfloat16), 4)[2] == cache_bytes(out.past_key_values)


def test_what_cannot_be_counted_is_refused() -> None:
    qwen, gemma = tf.Qwen3VLConfig(), tf.Gemma4Config(vision_config={"num_hidden_layers": 1})
    qwen.text_config.num_hidden_layers = gemma.text_config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="a model of type 'gpt2' is not supported"):
        count_cost(tf.GPT2Config(), 1, 1)
    with pytest.raises(ValueError, match="visual_tokens must be an integer of at least 0, got -1"):
        count_cost(qwen, 1, -1)
    with pytest.raises(ValueError, match="crops must be an integer of at least 1, got 0"):
        count_cost(qwen, 1, 1, crops=0)
    for config in (qwen, gemma):
        with pytest.raises(ValueError, match=f"grid must be a PatchGrid for a {config.model_type} model"):
            count_cost(config, 5, 6)
    with pytest.raises(ValueError, match="grid must be None for a llava model"):
        count_cost(tf.LlavaConfig(), 5, 6, grid=PatchGrid(4, 4))
    for grid, words in (
        (PatchGrid(5, 4), r"grid.height must be a positive multiple of 2 patches, got 5"),
        (PatchGrid(4, 0), r"grid.width must be a positive multiple of 2 patches, got 0"),
        (PatchGrid(4, 4, frames=0), r"grid.frames must be at least 1, got 0"),
        (PatchGrid(4, 4, padded=16), r"grid.padded must be None for a qwen3_vl model"),
    ):
        with pytest.raises(ValueError, match=words):
            count_vision(meta_model(qwen), grid)
    for padded in (None, 9, 19):
        with pytest.raises(ValueError, match=rf"grid.padded must be pixel_values.* got {padded}"):
            count_vision(meta_model(gemma), PatchGrid(3, 6, padded=padded))


def test_layers_after_pruning_inside_the_language_model_cost_as_much_as_a_shorter_prompt() -> None:
    """By hand: layers that read everything, then layers that read less; the head and the tower stay."""
    text, visual, layers = 10, 40, 4
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
        ),
        vision_config=tf.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=28,
            patch_size=7,
        ),
    )

    def by_hand(new: int, tokens: int) -> int:
        """FLOPs of one layer for `new` tokens that attend to `tokens`."""
        projections = 2 * new * 32 * (32 + 16 + 16 + 32)
        return projections + 2 * 2 * new * tokens * 32 + 3 * 2 * new * 32 * 48

    methods = {
        FastV(keep=8, layer=1): [40, 8, 8, 8],
        PyramidDrop(keep=5): [40, 20, 10, 5],
        DART(keep=0.5, layer=3): [40, 40, 40, 20],
        Compose(Random(keep=16), FastV(keep=4, layer=2)): [16, 16, 4, 4],
        Random(keep=8): [8] * 4,
    }
    for method, visible in methods.items():
        lengths = [text + count for count in visible]
        cost = count_cost(config, text, visual, method=method)
        head = 2 * 32 * 50
        assert cost.prefill == sum(by_hand(n, n) for n in lengths) + head
        assert cost.decode == sum(by_hand(1, n + 1) for n in lengths) + head
        assert cost.kv_bytes == sum(2 * 16 * n * 4 for n in lengths)
        assert cost.average_tokens == method.average_tokens(visual, layers) == sum(visible) / layers
        assert cost.visual_tokens == visible[-1]
