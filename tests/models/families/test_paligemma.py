"""PaliGemma alone: prefix and suffix, its own prompt, and what its processor returns besides the prompt."""

from typing import Any

import pytest
import torch
from tiny_models import make_image
from tiny_models.gemma import CELLS, Oracle, load, prompt

from clustrs import ClustRS
from clustrs.models.ask import chat_prompt

KINDS = ("paligemma", "paligemma2")
pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.usefixtures("as_published")]


def trained_on(processor: Any) -> dict[str, Any]:
    """A prompt with the answer that it should get."""
    return dict(processor(images=[[make_image()]], text=["<image>what is it?"], suffix=["a cat"], return_tensors="pt"))


def test_the_suffix_is_causal_and_the_prefix_is_not(kind: str) -> None:
    model, processor = load(kind)
    inputs, method, oracle = trained_on(processor), ClustRS(keep=5), Oracle(model)
    assert set(inputs["token_type_ids"][0].tolist()) == {0, 1}
    selection = oracle.select(method, inputs["pixel_values"])
    columns = oracle.columns(inputs["input_ids"][0], [selection.indices.tolist()])
    ids, types, labels = (inputs[name][0, columns] for name in ("input_ids", "token_type_ids", "labels"))
    expected = oracle.logits(ids, types, selection.tokens)
    model.train()
    with method(model):
        out = model(**inputs)
    out.loss.backward()
    torch.testing.assert_close(out.logits[0], expected, atol=3e-5, rtol=0)
    loss = torch.nn.functional.cross_entropy(expected[:-1], labels[1:])
    assert float(out.loss.detach()) == pytest.approx(float(loss), rel=1e-4)
    assert float(model.model.multi_modal_projector.linear.weight.grad.abs().sum()) > 0


def test_what_the_processor_returns_goes_to_generate_as_it_is(kind: str) -> None:
    """The processor returns labels, too, which count the prompt as it was given."""
    model, processor = load(kind)
    whole = dict(processor(images=[[make_image()]], text=["<image>what?"], return_tensors="pt"))
    assert "labels" in whole
    with ClustRS(keep=5)(model):
        out = model.generate(**whole, max_new_tokens=4, do_sample=False)
        del whole["labels"]
        assert torch.equal(model.generate(**whole, max_new_tokens=4, do_sample=False), out)


def test_without_token_types(kind: str) -> None:
    """What the model does with a prompt that has none is what it does with the compacted one."""
    model, processor = load(kind)
    inputs, method = prompt(processor, "<image>what?", [make_image()]), ClustRS(keep=CELLS)
    del inputs["token_type_ids"]
    with torch.no_grad():
        expected = model(**inputs).logits
        with method(model):
            assert torch.equal(model(**inputs).logits, expected)


def test_positions_start_at_one(kind: str) -> None:
    model, processor = load(kind)
    inputs = prompt(processor, "<image>what?", [make_image()])
    length = inputs["input_ids"].shape[1]
    for positions in ("compact", "original"):
        seen: list[list[int]] = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
        )
        with torch.no_grad(), ClustRS(keep=4)(model, positions=positions) as handle:
            model(**inputs)
            model.generate(**inputs, max_new_tokens=3, do_sample=False)
        hook.remove()
        kept = [1 + i for i in handle.last[0].selection.indices.tolist()]
        text = list(range(1 + CELLS, 1 + length))
        whole = [*kept, *text] if positions == "original" else list(range(1, 1 + 4 + len(text)))
        assert seen == [whole, whole, [whole[-1] + 1], [whole[-1] + 2]]


def test_the_image_comes_first_in_a_plain_question(kind: str) -> None:
    model, processor = load(kind)
    text = chat_prompt(processor, "What is it?")
    assert text == "<image>What is it?"
    ids = processor(images=[make_image()], text=[text], return_tensors="pt")["input_ids"][0]
    assert (ids == model.config.image_token_id).nonzero()[:, 0].tolist() == list(range(CELLS))
    assert processor.decode(ids[CELLS:]) == "<bos>What is it?\n"
