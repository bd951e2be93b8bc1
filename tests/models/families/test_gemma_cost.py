"""What Gemma 3 and PaliGemma cost, counted from the config, against torch's own counter and the real cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models.families.gemma_models import CELLS, KINDS, WINDOW, load, prompt, question
from tiny_models import make_image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clustrs import ClustRS
from clustrs.models.adapters import adapter_class
from clustrs.models.cost import count_cost

pytestmark = pytest.mark.parametrize("kind", KINDS)


def flops(call: Callable[[], Any]) -> tuple[int, Any]:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


def angles(model: Any, tokens: int) -> int:
    """What torch counts for the rotary embedding alone: older transformers have a matrix product in it."""
    language, positions = model.model.language_model, torch.arange(tokens)[None]
    kinds = [[kind] for kind in sorted(set(language.config.layer_types))] if is_gemma3(model) else [[]]
    return sum(flops(partial(language.rotary_emb, torch.zeros(1), positions, *kind))[0] for kind in kinds)


def is_gemma3(model: Any) -> bool:
    return bool(model.config.model_type == "gemma3")


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("window", [WINDOW, 64])
def test_every_part_agrees_with_torchs_counter(kind: str, eager: bool, window: int) -> None:
    """With prompts that are wider than the window of the sliding layers, and with such that are not."""
    model, processor = load(kind)
    if kind != "paligemma":
        model.config.text_config.sliding_window = window
    if eager:
        model.set_attn_implementation("eager")
    inputs = prompt(processor, question(kind), [make_image()])
    tower, projector = adapter_class(model.config.model_type).vision_flops(model.config)
    measured, encoded = flops(lambda: model.model.vision_tower(inputs["pixel_values"]))
    assert measured == tower
    measured, _ = flops(lambda: model.model.multi_modal_projector(encoded.last_hidden_state))
    assert measured == projector

    width = inputs["input_ids"].shape[1]
    cost = count_cost(model.config, width - CELLS, 5)
    assert WINDOW < width - CELLS + 5 < 64
    with ClustRS(keep=5)(model):
        out = model(**inputs, use_cache=True)
    held = [part for layer in out.past_key_values.layers for part in (layer.keys, layer.values)]
    assert cost.kv_bytes == sum(part.numel() * part.element_size() for part in held)
    token = torch.tensor([[9]])
    measured, _ = flops(lambda: model(input_ids=token, past_key_values=out.past_key_values))
    assert cost.decode == measured - angles(model, 1)

    whole = count_cost(model.config, width - CELLS, CELLS)
    measured, _ = flops(lambda: model(**inputs, logits_to_keep=1))
    assert whole.first_token == measured - angles(model, width)
    assert cost.first_token < whole.first_token
