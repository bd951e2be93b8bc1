"""`generate` while a method is attached, and what is built on it."""

import threading
from typing import Any

import oracle
import pytest
import torch
from tiny_models import FAMILIES, Load, make_image, prepare
from torch import Tensor
from transformers import GenerationConfig, TextIteratorStreamer, pipeline

from clustrs import ClustRS, get_method

pytestmark = pytest.mark.usefixtures("as_published")

WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "num_beams": 3},
    {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    {"do_sample": True, "temperature": 2.0},
    {"do_sample": False, "cache_implementation": "static"},
    {"do_sample": False, "repetition_penalty": 1.3},
]


def generate(model: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        out: Tensor = model.generate(**kwargs, max_new_tokens=6)
    return out


def by_hand_tokens(model: Any, handle: Any, ids: Tensor, **way: Any) -> Tensor:
    """New tokens from hand-built embeddings, on the untouched model."""
    rows = oracle.embeddings(model, ids, [last.selection.tokens for last in handle.last])
    return generate(model, inputs_embeds=rows, attention_mask=torch.ones(rows.shape[:2], dtype=torch.long), **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_tokens_are_those_of_pruning_by_hand(load: Load, family: str, way: dict[str, Any]) -> None:
    model, processor = load(family)
    inputs = prepare(processor, ["<s>user: <image> what is it?"], [[make_image()]])
    ids = inputs["input_ids"]
    with ClustRS(keep=6)(model) as handle:
        out = generate(model, **inputs, **way)
    rows = way.get("num_return_sequences", 1)
    assert out.shape == (rows, ids.shape[1] + 6)
    assert torch.equal(out[:, : ids.shape[1]], ids.expand(rows, -1)), "the caller's own prompt stands in front"
    if "repetition_penalty" not in way:
        assert torch.equal(out[:, ids.shape[1] :], by_hand_tokens(model, handle, ids, **way))
    else:
        assert torch.equal(out[:, ids.shape[1] :], generate_with_ids(model, handle, ids, way))


def generate_with_ids(model: Any, handle: Any, ids: Tensor, way: dict[str, Any]) -> Tensor:
    """As above, for settings that look at the prompt's ids: the text and the kept placeholders."""
    image = model.config.image_token_id
    start = int((ids[0] == image).nonzero()[0])
    end = int((ids[0] == image).nonzero()[-1]) + 1
    short = torch.cat([ids[:, :start], ids[:, start : start + 6], ids[:, end:]], 1)
    rows = oracle.embeddings(model, ids, [last.selection.tokens for last in handle.last])
    out = generate(model, input_ids=short, inputs_embeds=rows, attention_mask=torch.ones_like(short), **way)
    return out[:, short.shape[1] :]


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_padded_batch_is_the_prompt_alone(load: Load, family: str, positions: str) -> None:
    """Four prompts of different lengths, one without a image and one with two."""
    model, processor = load(family)
    texts = [
        "<s>user: <image> what?",
        "<s>no image here, only words",
        "<s><image> and <image> differ how?",
        "<s><image>",
    ]
    images = [[make_image()], [], [make_image(30, 70, 1), make_image(50, 50, 2)], [make_image(28, 28, 3)]]
    inputs = prepare(processor, texts, images)
    if family == "llava_onevision":
        inputs["batch_num_images"] = torch.tensor([1, 2, 1])
    method = ClustRS(keep=6)
    with method(model, positions=positions):
        batch = generate(model, **inputs, do_sample=False)
    length = inputs["input_ids"].shape[1]
    assert torch.equal(batch[:, :length], inputs["input_ids"])
    for i in range(4):
        alone = prepare(processor, [texts[i]], [images[i]])
        if family == "llava_onevision" and images[i]:
            alone["batch_num_images"] = torch.tensor([len(images[i])])
        with method(model, positions=positions):
            single = generate(model, **alone, do_sample=False)
        assert torch.equal(batch[i, length:], single[0, alone["input_ids"].shape[1] :]), texts[i]


def test_original_positions_go_on_where_the_prompt_ended(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>user: <image> what?"], [[make_image()]])
    seen: list[list[int]] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    with ClustRS(keep=4)(model, positions="original") as handle:
        generate(model, **inputs, do_sample=False)
    hook.remove()
    ids = inputs["input_ids"][0]
    start = int((ids == model.config.image_token_id).nonzero()[0])
    kept = [start + i for i in handle.last[0].selection.indices.tolist()]
    assert seen[0] == [*range(start), *kept, *range(start + 16, len(ids))]
    assert seen[1:] == [[len(ids) + i] for i in range(len(seen) - 1)]


@pytest.mark.parametrize("where", ["argument", "config"])
def test_max_length_counts_the_callers_prompt(load: Load, where: str) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>user: <image> what?"], [[make_image()]])
    total = inputs["input_ids"].shape[1] + 5
    config = GenerationConfig(max_length=total, do_sample=False, pad_token_id=0)
    length = {"max_length": total, "do_sample": False} if where == "argument" else {"generation_config": config}
    with torch.no_grad(), ClustRS(keep=4)(model):
        assert model.generate(**inputs, **length).shape[1] == total
    assert config.max_length == total


def test_prompt_by_position_and_result_as_an_object(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>user: <image> what?"], [[make_image()]])
    with ClustRS(keep=4)(model):
        expected = generate(model, **inputs, do_sample=False)
        ids = inputs.pop("input_ids")
        with torch.no_grad():
            out = model.generate(ids, **inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        assert torch.equal(generate(model, input_ids=ids[:, :3], do_sample=False)[:, :3], ids[:, :3])


def test_streaming(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>user: <image> what?"], [[make_image()]])
    for skip_prompt in (False, True):
        streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=skip_prompt)
        with ClustRS(keep=4)(model):
            full = generate(model, **inputs, do_sample=False)
            thread = threading.Thread(
                target=model.generate, kwargs={**inputs, "streamer": streamer, "max_new_tokens": 6, "do_sample": False}
            )
            thread.start()
            text = "".join(streamer)
            thread.join()
        start = inputs["input_ids"].shape[1] if skip_prompt else 0
        assert text == processor.tokenizer.decode(full[0, start:])


def test_pipeline(load: Load) -> None:
    model, processor = load()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    text = "<s>user: <image> what?"
    inputs = prepare(processor, [text], [[make_image()]])
    with ClustRS(keep=4)(model) as handle:
        full = generate(model, **inputs, do_sample=False)
        answer = pipe(images=make_image(), text=text, max_new_tokens=6, do_sample=False, return_full_text=False)
    assert handle.last[0].kept == 4
    new = full[0, inputs["input_ids"].shape[1] :]
    assert answer[0]["generated_text"].strip() == processor.decode(new, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", ["visionzip", "vispruner", "divprune", "random", "grid", "fastervlm", "none"])
def test_every_method_generates(load: Load, name: str) -> None:
    model, processor = load("llava_next", "siglip")
    inputs = prepare(processor, ["<s>user: <image> what?"], [[make_image()]])
    method = get_method(name) if name == "none" else get_method(name, keep=0.25)
    with method(model) as handle:
        out = generate(model, **inputs, do_sample=False)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 6
    last = handle.last[0]
    assert last.kept == (last.placeholders if name == "none" else round(0.25 * len(last.scores)))
