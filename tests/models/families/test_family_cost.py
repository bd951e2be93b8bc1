"""What every family costs, counted from the config, against torch's own counter and the real cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qwen_models
import tiled_models
import tiny_models
import torch
import transformers as tf
from flop_counting import cache_bytes, count_flops
from models.families import gemma4_models
from torch import Tensor

from clustrs import ClustRS
from clustrs.models.cost import count_cost, vision_flops
from clustrs.models.decoder_cost import decoder_flops, kv_cache_bytes
from clustrs.models.flops import PatchGrid

QUESTION = "user: <image> what is this?"
CASES = [
    *(("qwen", family) for family in qwen_models.FAMILIES),
    *(("gemma4", variant) for variant in gemma4_models.VARIANTS),
    *(("tiled", family) for family in tiled_models.FAMILIES),
]
Case = tuple[Any, dict[str, Any], PatchGrid | None, int]
"""A model, a prompt with one image, the image's grid where the family has one, and how many crops the image has."""


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Case]:
    folders: dict[tuple[str, str], Path] = {}
    builders: dict[str, Any] = {"qwen": qwen_models.build, "gemma4": gemma4_models.build, "tiled": tiled_models.build}

    def case(name: tuple[str, str]) -> Case:
        kind, family = name
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(family)
            builders[kind](family, folders[name])
        if kind == "tiled":
            tiled = tiled_models.load_case(family, folders[name])
            image = tiny_models.make_image(40, 60)
            inputs = tiled.prepare(["user: IMAGE what is this?"], [[image]])
            return tiled.model, inputs, None, tiled.counts([image])[0]
        model, processor = tiny_models.load(folders[name])
        if kind == "gemma4":
            inputs = gemma4_models.ask(processor, height=30, width=48)
            width, height = (inputs["image_position_ids"][0].amax(0) + 1).tolist()
            grid = PatchGrid(height, width, padded=inputs["pixel_values"].shape[1])
        else:
            inputs = tiny_models.prepare(processor, [QUESTION], [[tiny_models.make_image(40, 56)]])
            frames, height, width = inputs["image_grid_thw"][0].tolist()
            grid = PatchGrid(height, width, frames)
        if hasattr(model.config.text_config, "num_experts"):
            model.set_experts_implementation("eager")  # only active experts; a fused kernel is not counted by torch
        return model, inputs, grid, 1

    return case


def recurrent_by_products(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """The gated delta rule for one token, with its reads and its write as the products of matrices that they are.

    From transformers 5.23 on, it is given each head of queries and keys once, and has to repeat it for its values.
    """
    query, key = (part.repeat_interleave(value.shape[2] // part.shape[2], 2) for part in (query, key))
    q, k = (part[:, 0] / (part[:, 0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    state = initial_state * g[:, 0].exp()[..., None, None]
    read = (k[..., None, :] @ state).squeeze(-2)
    state = state + k[..., None] @ ((value[:, 0] - read) * beta[:, 0, :, None])[..., None, :]
    return ((q * q.shape[-1] ** -0.5)[..., None, :] @ state).squeeze(-2)[:, None], state


def products_in_linear_layers(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Compute what transformers writes as sums of elementwise products in a form that torch counts."""
    for kind in ("qwen3_5", "qwen3_5_moe"):
        module = getattr(getattr(tf.models, kind), f"modeling_{kind}")
        monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", recurrent_by_products)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES, ids=lambda name: name[1])
def test_a_call_costs_what_torch_counts(
    case_of: Callable[[tuple[str, str]], Case],
    name: tuple[str, str],
    implementation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs, grid, crops = case_of(name)
    model.set_attn_implementation(implementation)
    width = inputs["input_ids"].shape[1]
    visual = int((inputs["input_ids"] == model.config.image_token_id).sum())
    whole = count_cost(model.config, width - visual, visual, crops, grid=grid)
    measured, _ = count_flops(lambda: model(**inputs, logits_to_keep=1))
    assert measured == whole.first_token

    cost = count_cost(model.config, width - visual, 6, crops, grid=grid)
    with ClustRS(keep=6)(model):
        out = model(**inputs, use_cache=True)
    assert cache_bytes(out.past_key_values) == cost.kv_bytes
    token = torch.tensor([[9]])
    _, reference = count_flops(lambda: model(input_ids=token, past_key_values=out.past_key_values))
    with ClustRS(keep=6)(model):
        out = model(**inputs, use_cache=True)
    products_in_linear_layers(monkeypatch, model)
    measured, again = count_flops(lambda: model(input_ids=token, past_key_values=out.past_key_values))
    torch.testing.assert_close(again.logits, reference.logits, atol=1e-4, rtol=1e-4)
    assert measured == cost.decode
    assert cost.prefill < whole.prefill


@pytest.mark.parametrize("name", CASES, ids=lambda name: name[1])
def test_tower_and_projector_apart(case_of: Callable[[tuple[str, str]], Case], name: tuple[str, str]) -> None:
    """The projector is what the tokens meet after the tower, deepstack features included."""
    model, inputs, grid, crops = case_of(name)
    inner = model.model
    projectors = {
        "qwen": lambda: [inner.visual.merger, *getattr(inner.visual, "deepstack_merger_list", [])],
        "gemma4": lambda: [inner.embed_vision],
        "tiled": lambda: [inner.multi_modal_projector if name[1] == "internvl" else inner.connector],
    }[name[0]]()
    calls: list[tuple[Any, Any]] = []
    hooks = [
        part.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, (args, kwargs))), with_kwargs=True
        )
        for part in projectors
    ]
    given = {key: inputs[key] for key in ("pixel_values", "image_grid_thw", "image_position_ids") if key in inputs}
    both, _ = count_flops(lambda: inner.get_image_features(**given))
    for hook in hooks:
        hook.remove()
    projected, _ = count_flops(lambda: [module(*args, **kwargs) for module, (args, kwargs) in calls])
    tower, projector = vision_flops(model.config, grid)
    assert (both - projected, projected) == (crops * tower, crops * projector)


@pytest.mark.parametrize("family", qwen_models.FAMILIES)
def test_videos_of_several_frames(case_of: Callable[[tuple[str, str]], Case], family: str) -> None:
    """Frames do not attend to each other; windows are cut off at the edges of each."""
    model, _, _, _ = case_of(("qwen", family))
    inputs = qwen_models.video_inputs(model.config, [(3, 5, 3)], timestamps=family.startswith("qwen3"))
    measured, _ = count_flops(
        lambda: model.model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    )
    assert measured == sum(vision_flops(model.config, PatchGrid(10, 6, frames=3)))


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
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=12),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "every other layer": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2),
    "mistral with a window": lambda: tf.MistralConfig(**SIZES, sliding_window=8),
    "qwen2 with a window": lambda: tf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
}


@pytest.mark.parametrize("tokens", [1, 5, 7, 8, 13])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_that_others_build_on(name: str, tokens: int) -> None:
    """Also with more positions than a window has: prefill masks the rest, the cache leaves it out."""
    config = DECODERS[name]()
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if hasattr(config, "num_experts"):
        model.set_experts_implementation("eager")
    ids = torch.arange(tokens)[None]
    measured, out = count_flops(lambda: model(ids, use_cache=True, logits_to_keep=1))
    assert measured == decoder_flops(config, tokens)
    assert cache_bytes(out.past_key_values) == kv_cache_bytes(config, tokens, torch.float32)
    measured, _ = count_flops(lambda: model(torch.tensor([[7]]), past_key_values=out.past_key_values))
    assert measured == decoder_flops(config, 1, cached=tokens)


@pytest.mark.parametrize("tokens", [1, 3, 64, 65])
def test_linear_attention_in_chunks(
    case_of: Callable[[tuple[str, str]], Case], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is not full counts in full, as it is computed; the state does not grow."""
    model, _, _, _ = case_of(("qwen", "qwen3_5"))
    config, ids = model.config.text_config, torch.arange(10, 10 + tokens)[None]
    measured, out = count_flops(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))
    assert measured == decoder_flops(config, tokens)
    assert cache_bytes(out.past_key_values) == kv_cache_bytes(config, tokens, torch.float32)
    assert kv_cache_bytes(config, 2, torch.float32) - kv_cache_bytes(config, 1, torch.float32) == 2 * 2 * 64 * 4
    with pytest.raises(ValueError, match="tokens=3 after 5 cached ones: linear attention is counted for prefill"):
        decoder_flops(config, 3, cached=5)


def test_a_linear_layers_state_stays_in_float32(case_of: Callable[[tuple[str, str]], Case]) -> None:
    model, _, _, _ = case_of(("qwen", "qwen3_5"))
    out = model.to(torch.bfloat16)(input_ids=torch.arange(10, 14)[None], use_cache=True)
    assert cache_bytes(out.past_key_values) == kv_cache_bytes(model.config.text_config, 4, torch.bfloat16)


def test_what_cannot_be_counted_is_refused() -> None:
    qwen, gemma, text = tf.Qwen3VLConfig(), tf.Gemma4Config(vision_config={}), tf.Qwen3Config(**SIZES)
    for config in (qwen, gemma):
        with pytest.raises(ValueError, match=f"grid is missing: a {config.model_type} model takes images of any size"):
            count_cost(config, 5, 6)
    with pytest.raises(ValueError, match="crops of a llava model have one size; leave it out"):
        count_cost(tf.LlavaConfig(), 5, 6, grid=PatchGrid(4, 4))
    with pytest.raises(ValueError, match=r"grid.height=5: give a multiple of 2 patches, at least 2"):
        count_cost(qwen, 5, 6, grid=PatchGrid(5, 4))
    with pytest.raises(ValueError, match=r"grid.width=0: give a multiple of 2 patches"):
        count_cost(qwen, 5, 6, grid=PatchGrid(4, 0))
    with pytest.raises(ValueError, match=r"grid.frames=0"):
        count_cost(qwen, 5, 6, grid=PatchGrid(4, 4, frames=0))
    with pytest.raises(ValueError, match=r"grid.padded=16: qwen3_vl images are not padded; leave it out"):
        count_cost(qwen, 5, 6, grid=PatchGrid(4, 4, padded=16))
    for padded in (None, 9, 19):
        with pytest.raises(ValueError, match=rf"grid.padded={padded}: give the number of patches"):
            count_cost(gemma, 5, 6, grid=PatchGrid(3, 6, padded=padded))
    gemma.vision_config = None
    with pytest.raises(ValueError, match="vision_config is None: this Gemma 4 has no vision tower"):
        count_cost(gemma, 5, 6, grid=PatchGrid(3, 6, padded=18))
    text.layer_types = ["chunked_attention"] * 3
    with pytest.raises(
        ValueError, match=r"text_config.layer_types: 'chunked_attention' cannot be counted; accepted: full"
    ):
        decoder_flops(text, 4)
