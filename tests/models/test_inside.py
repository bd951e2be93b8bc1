"""Methods inside the language model, in every family, against layers that run by hand."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from inside_oracle import Oracle
from tiny_models import BUILDERS, Load, family_inputs, load, make_image, prepare
from torch import Tensor
from transformers import DynamicCache

from clustrs import (
    DART,
    ClusterMeans,
    ClustRS,
    Compose,
    Denoise,
    FasterVLM,
    FastV,
    InsidePruner,
    PyramidDrop,
    get_method,
)
from clustrs.cli.catalog import families

CASES: dict[str, Any] = {
    "fastv": FastV(keep=3, layer=2),
    "pyramiddrop": PyramidDrop(keep=2),
    "dart": DART(keep=9, layer=1),
}
REFUSED = ("gemma3", "gemma4", "paligemma2", "qwen3_5", "qwen3_5_moe")  # sliding windows, linear attention
TEXTS = ["IMAGE what is it?", "is there a cat in IMAGE or in the other one? say so"]


def deepen(model: Any, layers: int = 5) -> Any:
    """Add layers to a language model: copies of those it has, each with weights of its own."""
    decoder = model.get_decoder()
    torch.manual_seed(1)
    for index in range(len(decoder.layers), layers):
        layer = deepcopy(decoder.layers[index % len(decoder.layers)])
        layer.self_attn.layer_idx = index
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
        decoder.layers.append(layer)
    decoder.config.num_hidden_layers = layers
    if getattr(decoder.config, "layer_types", None):
        decoder.config.layer_types = ["full_attention"] * layers
    return model


@pytest.fixture
def llava(load_family: Load) -> tuple[Any, Any]:
    model, processor = load_family("llava")
    return deepen(model), processor


@pytest.fixture
def batch(llava: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """A model, and two prompts of different lengths with an image each."""
    model, processor = llava
    return model, family_inputs(model, processor, TEXTS, [make_image(seed=1), make_image(seed=2)])


def generate(model: Any, inputs: dict[str, Any], count: int = 3, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """New tokens [B, count], the logits [B, count, V] they were chosen by, and the cache."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **options}
    out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, **options)
    return out.sequences[:, -count:], torch.stack(out.logits, 1), out.past_key_values


def follow(oracle: Oracle, tokens: Tensor, logits: Tensor) -> None:
    """Compare the logits of every step with the oracle's."""
    ids = oracle.inputs["input_ids"]
    for step in range(tokens.shape[1]):
        torch.testing.assert_close(logits[:, step], oracle.logits(ids)[:, -1], atol=1e-4, rtol=1e-4)
        ids = torch.cat([ids, tokens[:, step : step + 1]], 1)


def places(oracle: Oracle) -> list[list[int]]:
    """What the oracle keeps of the only image of each prompt in the last layer, counted within the image."""
    columns = [row.nonzero()[:, 0].tolist() for row in oracle.is_image]
    kept = oracle.kept[max(oracle.kept)]
    return [[own.index(c) for c in row if c in own] for own, row in zip(columns, kept, strict=True)]


@pytest.mark.parametrize("family", BUILDERS)
def test_a_padded_batch_has_the_logits_of_layers_by_hand_or_is_refused(load_family: Load, family: str) -> None:
    model, processor = load_family(family)
    if family in REFUSED:
        for method in CASES.values():
            with pytest.raises(ValueError, match=f"{method.name} needs full attention in every layer"):
                method.attach(model)
        return
    deepen(model)
    inputs = family_inputs(model, processor, TEXTS, [make_image(seed=1), make_image(seed=2)])
    unpruned = generate(model, inputs)[1]
    for method in CASES.values():
        with method(model) as handle:
            tokens, logits, cache = generate(model, inputs)
            kept = handle.last
        oracle = Oracle(model, inputs, method)
        follow(oracle, tokens, logits)
        assert (logits - unpruned).abs().max() > 1e-2
        assert [image.kept for image in kept] == [method.keep] * 2
        total = oracle.images[0][0]
        lengths = [cache.get_seq_length(layer) - cache.get_seq_length() for layer in range(5)]
        left = dict.fromkeys(range(5), total)
        for layer, k in method.schedule(total, 5).items():
            left.update(dict.fromkeys(range(layer, 5), k))
        assert lengths == [left[layer] - total for layer in range(5)]
        assert kept[0].average == method.average_tokens(total, 5) == sum(left.values()) / 5
        if kept[0].placeholders == len(kept[0].scores):  # else some of the tokens end lines
            assert [image.selection.indices.tolist() for image in kept] == places(oracle)


def test_the_list_of_models_says_which_families_are_refused() -> None:
    listed = {row["model_type"]: row["inside"] for row in families()}
    assert listed == {family: "no" if family in REFUSED else "yes" for family in BUILDERS if family != "paligemma2"}


@pytest.mark.parametrize("family", [family for family in BUILDERS if family not in REFUSED])
def test_all_tokens_change_no_bit_and_a_batch_is_pruned_as_if_alone(load_family: Load, family: str) -> None:
    model, processor = load_family(family)
    deepen(model)
    images = [make_image(seed=1), make_image(seed=2)]
    batch = family_inputs(model, processor, TEXTS, images)
    single = [family_inputs(model, processor, [text], [image]) for text, image in zip(TEXTS, images, strict=True)]
    plain = generate(model, batch)
    for name, method in CASES.items():
        for keep in (500, 1.0):
            with get_method(name, keep=keep)(model) as handle:
                tokens, logits, _ = generate(model, batch)
            assert torch.equal(tokens, plain[0]), name
            assert torch.equal(logits, plain[1]), name
            assert all(image.kept == image.placeholders for image in handle.last), name
        with method(model) as handle:
            logits = generate(model, batch)[1]
            together = [image.selection.indices.tolist() for image in handle.last]
            for row, inputs in enumerate(single):
                alone = generate(model, inputs)[1]
                torch.testing.assert_close(alone[0], logits[row], atol=1e-4, rtol=1e-4, msg=name)
                assert handle.last[0].selection.indices.tolist() == together[row], name


@pytest.mark.parametrize("name", CASES)
def test_prompts_with_different_numbers_of_images(llava: Any, name: str) -> None:
    """Each image has its budget; a prompt that loses more tokens than another is padded from there on."""
    model, processor = llava
    images = [[make_image(seed=1), make_image(seed=2)], [make_image(seed=3)]]
    inputs = prepare(processor, ["<image> and <image> alike?", "<image> what is it?"], images)
    with CASES[name](model) as handle:
        tokens, logits, _ = generate(model, inputs)
    follow(Oracle(model, inputs, CASES[name], [[16, 16], [16]]), tokens, logits)
    assert [image.kept for image in handle.last] == [CASES[name].keep] * 3


@pytest.mark.parametrize("way", [{"use_cache": False}, {"attn_implementation": "eager"}, {"compact": True}], ids=str)
def test_without_a_cache_with_eager_attention_and_with_compact_positions(batch: Any, way: dict[str, Any]) -> None:
    model, inputs = batch
    method = PyramidDrop(keep=2, compact=way.get("compact", False))
    if "attn_implementation" in way:
        model.set_attn_implementation(way["attn_implementation"])
    options = {"use_cache": False} if "use_cache" in way else {}
    with method(model):
        tokens, logits, _ = generate(model, inputs, **options)
    follow(Oracle(model, inputs, method), tokens, logits)


def test_deepstack_features_without_a_cache(load_family: Load) -> None:
    model, processor = load_family("qwen3_vl")
    inputs = family_inputs(deepen(model), processor, TEXTS, [make_image(seed=1), make_image(seed=2)])
    with CASES["dart"](model):
        tokens, logits, _ = generate(model, inputs, use_cache=False)
    follow(Oracle(model, inputs, CASES["dart"]), tokens, logits)


@pytest.mark.parametrize("attention", ["plain", "proportional"])
def test_compose_prunes_what_the_first_method_kept(batch: Any, attention: Any) -> None:
    model, inputs = batch
    first = FasterVLM(keep=8)
    for second in (FastV(keep=3, layer=2), PyramidDrop(keep=2)):
        method = Compose(first, second)
        with method(model, attention=attention) as handle:
            tokens, logits, _ = generate(model, inputs)
        oracle = Oracle(model, inputs, second, first=first, attention=attention)
        follow(oracle, tokens, logits)
        with first(model) as alone:
            generate(model, inputs, count=1)
        for image, before, own in zip(handle.last, alone.last, places(oracle), strict=True):
            assert image.selection.indices.tolist() == before.selection.indices[own].tolist()
            assert image.average == method.average_tokens(16, 5) < 8
    with pytest.raises(ValueError, match="first must be a method that prunes in the encoder, got 'fastv'"):
        Compose(FastV(keep=3), FastV(keep=3))
    with pytest.raises(
        ValueError, match="second must be a method that prunes in the language model, got 'clustermeans'"
    ):
        Compose(FasterVLM(keep=8), ClusterMeans(keep=3))  # type: ignore[arg-type]


def test_beams_have_the_scores_of_layers_by_hand(batch: Any) -> None:
    model, inputs = batch
    for method in CASES.values():
        with method(model):
            out = model.generate(
                **inputs,
                num_beams=3,
                max_new_tokens=3,
                length_penalty=0.0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        oracle = Oracle(model, inputs, method)
        oracle.logits(inputs["input_ids"])
        logits = oracle.logits(out.sequences[:, :-1])[:, -3:].log_softmax(-1)
        expected = logits.gather(2, out.sequences[:, -3:, None]).sum((1, 2))
        torch.testing.assert_close(out.sequences_scores, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_second_turn_reads_the_shorter_caches(batch: Any, name: str) -> None:
    model, inputs = batch
    more = torch.tensor([[40, 41, 42], [43, 44, 45]])
    oracle = Oracle(model, inputs, CASES[name])
    oracle.logits(inputs["input_ids"])
    with CASES[name](model):
        cache = DynamicCache(config=model.config)
        first = model.generate(**inputs, max_new_tokens=2, past_key_values=cache)
        longer = torch.cat([first, more], 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
        tokens, logits, _ = generate(
            model, {"input_ids": longer, "attention_mask": mask}, past_key_values=deepcopy(cache)
        )
        ids = longer
        for step in range(3):
            torch.testing.assert_close(logits[:, step], oracle.logits(ids)[:, -1], atol=1e-4, rtol=1e-4)
            ids = torch.cat([ids, tokens[:, step : step + 1]], 1)
        cache.crop(-1)
        places_of_new = (mask.cumsum(1) - 1)[:, -5:]
        out = model(input_ids=longer[:, -5:], attention_mask=mask, position_ids=places_of_new, past_key_values=cache)
    torch.testing.assert_close(out.logits, oracle.logits(longer)[:, -5:], atol=1e-4, rtol=1e-4)
    with ClustRS(keep=4)(model), pytest.raises(ValueError, match="past_key_values needs a method inside the language"):
        model(input_ids=longer[:, -1:], past_key_values=cache)
    with CASES[name](model), pytest.raises(ValueError, match="crop must leave the images"):
        cache.crop(-60)


@pytest.mark.parametrize("name", CASES)
def test_forward_returns_logits_for_the_whole_prompt(batch: Any, name: str) -> None:
    """In a dropped token's place are those of the one kept before it; the loss is that of the kept ones."""
    model, inputs = batch
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] < 10, -100)
    with CASES[name](model):
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)  # those that `generate` counts
        out = model(**inputs, labels=labels, position_ids=positions)
    oracle = Oracle(model, inputs, CASES[name])
    expected = oracle.logits(inputs["input_ids"])
    losses = []
    for row, kept in enumerate(oracle.kept[max(oracle.kept)]):
        real = [c for c in kept if inputs["attention_mask"][row, c]]
        torch.testing.assert_close(out.logits[row, real], expected[row, real], atol=1e-4, rtol=1e-4)
        losses.append(
            torch.nn.functional.cross_entropy(expected[row, real[:-1]], labels[row, real[1:]], reduction="none")
        )
    counted = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(out.loss, torch.cat(losses).sum() / counted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_dropped_token_has_the_logits_of_the_one_kept_before_it(llava: Any, name: str) -> None:
    """Also in a prompt that loses more tokens than another, where some dropped ones stay as padding."""
    model, processor = llava
    images = [[make_image(seed=1), make_image(seed=2)], [make_image(seed=3)]]
    inputs = prepare(processor, ["<image> and <image> alike?", "<image> what is it?"], images)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with CASES[name](model):
        logits = model(**inputs).logits
    oracle = Oracle(model, inputs, CASES[name], [[16, 16], [16]])
    oracle.logits(inputs["input_ids"])
    for row, kept in enumerate(oracle.kept[max(oracle.kept)]):
        for column in range(kept[0], logits.shape[1]):
            assert torch.equal(logits[row, column], logits[row, max(c for c in kept if c <= column)])


def test_what_cannot_be_pruned_inside_is_refused(batch: Any, folder_of: Any) -> None:
    model, inputs = batch
    method = FastV(keep=3)
    with pytest.raises(ValueError, match="layer must be less than 5, the model's number of layers, got 5"):
        FastV(keep=3, layer=5).attach(model)
    with method(model, attention="proportional", positions="compact") as handle:  # there is nothing to weigh or to move
        assert (handle.positions, handle.attention) == ("original", "plain")
    with method(model) as handle:
        assert (handle.positions, handle.attention) == ("original", "plain")
        with pytest.raises(
            ValueError, match="past_key_values must be a DynamicCache while fastv is attached, got Static"
        ):
            model.generate(**inputs, max_new_tokens=2, cache_implementation="static")
        with pytest.raises(ValueError, match="fastv needs the whole prompt in one forward pass"):
            model.generate(**inputs, max_new_tokens=2, prefill_chunk_size=8)
    assert not any(layer._forward_pre_hooks for layer in model.get_decoder().layers)
    model.get_decoder().config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation must be 'sdpa' or 'eager' for fastv, got 'flash_"):
        method.attach(model)
    model, _ = load(folder_of("llava", "clip"))
    with pytest.raises(ValueError, match="layer must be less than 2"):
        method.attach(model)


def test_qwen_has_no_compact_positions(load_family: Load) -> None:
    model, _ = load_family("qwen2_5_vl")
    with pytest.raises(ValueError, match="compact must be False for a qwen2_5_vl model"):
        PyramidDrop(compact=True).attach(model)


def test_parameters_and_what_they_say_about_themselves() -> None:
    assert PyramidDrop(keep=72).schedule(576, 28) == {7: 288, 14: 144, 21: 72}
    assert FastV(keep=64, layer=2).average_tokens(576, 32) == (2 * 576 + 30 * 64) / 32
    both = Compose(FasterVLM(keep=144), FastV(keep=32, layer=8))
    assert both.average_tokens(576, 32) == (8 * 144 + 24 * 32) / 32
    refused: list[dict[str, Any]] = [{"layers": [0.5, 0.25]}, {"layers": []}, {"layers": [1.0]}, {"layers": 3}]
    for bad in [*refused, {"compact": 1}]:
        with pytest.raises(ValueError, match=r"(layers|compact) must be"):
            PyramidDrop(**bad)
    for kind in (FastV, DART):
        with pytest.raises(ValueError, match="layer must be an integer of at least 1, got 0"):
            kind(keep=3, layer=0)
    with pytest.raises(ValueError, match="inner must be a method that prunes in the encoder, got 'fastv'"):
        Denoise(FastV(keep=3))
    for method in (*CASES.values(), Compose(FasterVLM(keep=8), FastV(keep=3))):
        assert (method.servable, method.exportable) == (False, False)
        with pytest.raises(ValueError, match="prunes inside the language model: attach it to a model"):
            method.select(torch.rand(9, 4), torch.rand(9))


class Everything(InsidePruner):
    """A method that another package might bring."""

    name = "everything"

    def schedule(self, n: int, layers: int) -> dict[int, int]:
        return {1: self.count(n)}

    def choose(self, state: Any, k: int) -> Tensor:
        return torch.arange(k)


def test_a_method_of_another_package(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = batch
    with Everything(keep=2)(model) as handle:
        model.generate(**inputs, max_new_tokens=2)
        assert [image.selection.indices.tolist() for image in handle.last] == [[0, 1], [0, 1]]
        copied = deepcopy(model)
    with monkeypatch.context() as patch:
        patch.setattr(Everything, "choose", lambda self, state, k: torch.zeros(k, dtype=torch.long))
        with Everything(keep=2)(model), pytest.raises(ValueError, match="everything must return 2 distinct indices"):
            model.generate(**inputs, max_new_tokens=2)
    other = copied.__dict__["_clustrs_handle"]
    copied.generate(**inputs, max_new_tokens=2)
    assert [image.kept for image in other.last] == [2, 2]
    other.remove()
    assert not any(layer._forward_pre_hooks for layer in copied.get_decoder().layers)
    assert torch.equal(copied.generate(**inputs, max_new_tokens=2), model.generate(**inputs, max_new_tokens=2))
