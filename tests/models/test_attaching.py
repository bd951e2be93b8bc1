"""Attaching and removing: nothing is left behind, and mistakes are named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Load, make_image, prepare

from clustrs import ClustRS, get_method, list_methods
from clustrs.models.adapters.base import VisualTokens, list_model_types
from clustrs.models.adapters.llava import LlavaAdapter


def state(model: Any) -> dict[str, Any]:
    """All that attaching could change: attributes of every module, hooks included."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_put_back(load: Load, family: str) -> None:
    model, processor = load(family)
    inputs = prepare(processor, ["<s>a <image> b"], [[make_image()]])
    with torch.no_grad():
        expected = model(**inputs).logits
    before = state(model)
    for name in list_methods("encoder"):
        method = get_method(name) if name == "none" else get_method(name, keep=3)
        with method(model), torch.no_grad():
            model(**inputs)
            model.generate(**inputs, max_new_tokens=2)
        handle = method.attach(model)
        handle.remove()
        handle.remove()
        with pytest.raises(RuntimeError, match="in the middle"), method(model):
            raise RuntimeError("in the middle")
        with pytest.raises(Exception), method(model):  # noqa: B017, PT011
            model(**{**inputs, "pixel_values": inputs["pixel_values"][..., :5]})
    after = state(model)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].keys() == after[name].keys(), name
        assert all(before[name][key] is after[name][key] for key in before[name] if key != "_clustrs"), name
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


def test_a_replaced_forward_comes_back(load: Load) -> None:
    model, _ = load()
    mine = model.forward
    model.forward = mine
    with ClustRS(keep=3)(model):
        assert model.__dict__["forward"] is not mine
    assert model.__dict__["forward"] is mine


def test_attaching_twice(load: Load) -> None:
    model, _ = load()
    with ClustRS(keep=3)(model):
        for again in (model, model.model):
            with pytest.raises(ValueError, match="attached to this model already"):
                ClustRS(keep=4).attach(again)
    ClustRS(keep=4).attach(model).remove()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "images"}, "scope must be one of 'image', 'crop', 'video', 'frame', got 'images'"),
        ({"crops": "none"}, "crops must be one of 'all', 'base', got 'none'"),
        ({"attention": "flash"}, "attention must be one of 'auto', 'plain', 'proportional', got 'flash'"),
        ({"positions": "old"}, "positions must be one of 'auto', 'compact', 'original', got 'old'"),
    ],
)
def test_options(load: Load, options: dict[str, Any], words: str) -> None:
    model, _ = load()
    with pytest.raises(ValueError, match=words):
        ClustRS(keep=3).attach(model, **options)


def test_other_models() -> None:
    known = ", ".join(list_model_types())
    with pytest.raises(ValueError, match=f"'Linear' is not supported: known are {known}; .* use select"):
        ClustRS(keep=3).attach(torch.nn.Linear(2, 2))


def test_inputs_that_cannot_be_pruned(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> b"], [[make_image()]])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with ClustRS(keep=3)(model), torch.no_grad():
        with pytest.raises(ValueError, match="input_ids is missing"):
            model(pixel_values=inputs["pixel_values"])
        with pytest.raises(ValueError, match="inputs_embeds"):
            model(**inputs, inputs_embeds=embeds)
        with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
            model(**{**inputs, "attention_mask": torch.ones(1, 3)})
        cache = model(input_ids=inputs["input_ids"][:, :3], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="past_key_values"):
            model(**inputs, past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "missing", "words"),
    [
        ("visionzip", "hidden", "hidden states"),
        ("visionzip", "keys", "keys"),
        ("vispruner", "hidden", "hidden states"),
        ("hiprune", "more", "received attention"),
    ],
)
def test_a_family_without_the_states_that_a_method_needs(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str, missing: str, words: str
) -> None:
    """The error says which and why; methods that need none of them still prune."""
    encode = LlavaAdapter.encode

    def without(self: LlavaAdapter, *args: Any, **options: Any) -> list[VisualTokens]:
        absent: dict[str, Any] | None = {} if missing == "more" else None
        closed: dict[str, Any] = {missing: absent, "missing_states_reason": "its tower is closed"}
        return [replace(image, **closed) for image in encode(self, *args, **options)]

    monkeypatch.setattr(LlavaAdapter, "encode", without)
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> b"], [[make_image()]])
    wanted = f"{name} needs the {words} of the vision tower's tokens: its tower is closed"
    with torch.no_grad():
        with get_method(name, keep=3)(model):
            for call in (model, model.generate):
                with pytest.raises(ValueError, match=wanted):
                    call(**inputs)
        with ClustRS(keep=3)(model) as handle:
            model(**inputs)
    assert handle.last[0].kept == 3


def test_peft(load: Load) -> None:
    peft = pytest.importorskip("peft")
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> b"], [[make_image()]])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad(), ClustRS(keep=3)(wrapped) as handle:
        out = wrapped(**inputs, use_cache=True)
        text = int((inputs["input_ids"] != model.config.image_token_id).sum())
        assert out.past_key_values.get_seq_length() == text + 3
        new = wrapped.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert new.shape[1] == inputs["input_ids"].shape[1] + 3
    assert handle.last[0].kept == 3


def test_seconds_and_last(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> b"], [[make_image()]])
    with torch.no_grad(), ClustRS(keep=3)(model) as handle:
        assert handle.last == []
        model(**inputs)
    assert set(handle.seconds) == {"vision", "scoring", "selection"}
    assert all(value > 0 for value in handle.seconds.values())
    assert handle.last[0].selection.tokens.shape == (3, 32)
