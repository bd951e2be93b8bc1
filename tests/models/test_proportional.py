"""Proportional attention in every family, against keys and values that are repeated by hand."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import BUILDERS, Load, family_inputs, make_image, prepare
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from clustrs import (
    ClusterMeans,
    ClustRS,
    Compose,
    Denoise,
    FasterVLM,
    FastV,
    NoPruning,
    get_method,
    list_methods,
)

EACH = pytest.mark.parametrize("family", BUILDERS)
TEXTS = ["IMAGE what is it?", "IMAGE and why, if one may ask?"]
ORACLE = "repeated_keys"
BOTH = {"positions": "original", "attention": "proportional"}
LoadFamily = Callable[[str], tuple[Any, Any]]


class Copies:
    """Counts [B, W] of the compacted prompt's columns, 1 for later ones; how many columns there are so far; and whether
    logits are capped where a family says so: sdpa, by which transformers 5.18 runs Gemma 2, leaves that out."""

    counts: Tensor
    total: int
    capped: bool


def repeated_keys(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Softmax attention, row by row, with every key and value as often as its column counts."""
    key, value = (repeat_kv(part, query.shape[1] // part.shape[1]) for part in (key, value))
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    mask = mask.expand(len(query), -1, -1, -1)
    known = Copies.counts.repeat_interleave(len(query) // len(Copies.counts), 0)
    rows = []
    for row in range(len(query)):
        counts = torch.cat([known[row], torch.ones(keys, dtype=torch.long)])[: Copies.total][-keys:]
        copies = torch.arange(keys).repeat_interleave(counts)
        logits = query[row] @ key[row][:, copies].mT * scaling
        if Copies.capped and options.get("softcap") is not None:
            logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
        logits = logits.masked_fill(~mask[row][..., copies], torch.finfo(logits.dtype).min)
        rows.append(logits.softmax(-1) @ value[row][:, copies])
    return torch.stack(rows).transpose(1, 2).contiguous(), None


AttentionInterface.register(ORACLE, repeated_keys)
AttentionMaskInterface.register(ORACLE, sdpa_mask)


@contextmanager
def oracle(model: Any) -> Iterator[None]:
    """Let the language model attend by `repeated_keys`."""
    configs = {id(m.config): m.config for m in model.get_decoder().modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]
    Copies.capped = "sdpa" not in before
    for config in configs:
        config._attn_implementation = ORACLE

    def count(_: Any, args: tuple[Tensor, ...]) -> None:
        Copies.total = args[0].shape[1] if args[0].shape[1] > 1 else Copies.total + 1

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def count_columns(model: Any, inputs: dict[str, Any], sizes: list[Tensor], method: Any, options: Any) -> Tensor:
    """The sizes in the columns of the compacted prompt, whose ids are seen on their way to the embeddings."""
    seen: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with method(model, **options):
        model(**inputs)
    hook.remove()
    ids = next(one for one in seen if one.dim() == 2 and len(one) == len(inputs["input_ids"]))
    placeholder = model.config.image_token_id
    counts = torch.ones_like(ids)
    if bool((ids == placeholder).any()):
        counts[ids == placeholder] = torch.cat(sizes)
        return counts
    for row, size in enumerate(sizes):  # Gemma 4 embeds padding there: padded left, so counted from the right
        after = inputs["input_ids"].shape[1] - 1 - int((inputs["input_ids"][row] == placeholder).nonzero()[-1])
        end = ids.shape[1] - after
        counts[row, end - len(size) : end] = size
    return counts


@EACH
@torch.no_grad()
def test_one_key_with_log_n_is_n_keys(load_family: LoadFamily, family: str) -> None:
    """Logits of a padded batch, and those of every step of `generate`, with methods with and without clusters."""
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, TEXTS, [make_image(), make_image(60, 40, 1)])
    for method in (ClustRS(keep=5), FasterVLM(keep=5)):
        for positions in ("compact", "original"):
            with method(model, positions=positions, attention="proportional") as handle:
                logits = model(**inputs).logits
                sizes = [image.selection.sizes for image in handle.last]
                made = model.generate(
                    **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
                )
            assert all(size is not None and int(size.max()) > 1 for size in sizes)
            plain = {"positions": positions, "attention": "plain"}
            Copies.counts = count_columns(model, inputs, [size for size in sizes if size is not None], method, plain)
            with method(model, **plain), oracle(model):
                expected = model(**inputs).logits
                steps = model.generate(
                    **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
                )
            last = -1 if bool((inputs["attention_mask"][:, -1] != 0).all()) else slice(None)
            torch.testing.assert_close(logits[:, last], expected[:, last], rtol=1e-4, atol=1e-4)
            for ours, theirs in zip(made.logits, steps.logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@EACH
@torch.no_grad()
def test_all_tokens_are_bit_identical(load_family: LoadFamily, family: str) -> None:
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, TEXTS, [make_image(), make_image(60, 40, 1)])
    real = inputs["attention_mask"] != 0
    expected = model(**inputs).logits[real]
    for method in (NoPruning(), ClustRS(keep=1.0)):
        for options in (BOTH, {}):
            with method(model, **options):
                assert torch.equal(model(**inputs).logits[real], expected)
    assert torch.equal(model(**inputs).logits[real], expected)


@torch.no_grad()
def test_beams_and_several_images(load: Load) -> None:
    """Beams of a padded batch whose prompts have two images and one, against the oracle's."""
    model, processor = load()
    images = [make_image(seed=seed) for seed in range(3)]
    inputs = prepare(processor, ["<s>a <image> or <image>, which?", "<s><image> it?"], [images[:2], images[2:]])
    options: dict[str, Any] = {
        "num_beams": 3,
        "max_new_tokens": 5,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with ClusterMeans(keep=5)(model, **BOTH) as handle:
        made = model.generate(**inputs, **options, num_return_sequences=3)
        sizes = [image.selection.sizes for image in handle.last]
    plain = {"positions": "original", "attention": "plain"}
    Copies.counts = count_columns(model, inputs, [size for size in sizes if size is not None], ClusterMeans(5), plain)
    with ClusterMeans(keep=5)(model, **plain), oracle(model):
        expected = model.generate(**inputs, **options, num_return_sequences=3)
    assert len(sizes) == 3
    assert torch.equal(made.sequences, expected.sequences)
    torch.testing.assert_close(made.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
@torch.no_grad()
def test_static_cache(load_family: LoadFamily, family: str) -> None:
    """The logits of every step are those with a growing cache; Gemma 3 has layers with a window."""
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, TEXTS, [make_image(), make_image(60, 40, 1)])
    inputs.pop("labels", None)
    options: dict[str, Any] = {
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with ClustRS(keep=5)(model, **BOTH):
        expected = model.generate(**inputs, **options)
        made = model.generate(**inputs, **options, cache_implementation="static")
    for ours, theirs in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@torch.no_grad()
def test_attention_implementations(load: Load, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of a padded batch, and decoding, as with SDPA; flex uncompiled: its kernel breaks on a CPU."""
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", plain_flex)
    monkeypatch.setattr("clustrs.models.attach.CORRUPT_BIAS", set())
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image> or what?", "<s><image> it?"], [[make_image()], [make_image(60, 40, 1)]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with ClustRS(keep=5)(model, **BOTH):
        expected = model.generate(**inputs, **options, output_logits=True)
    other, _ = load(attn_implementation={"text_config": implementation})
    assert other.get_decoder().config._attn_implementation == implementation
    with ClustRS(keep=5)(other) as handle:
        made = other.generate(**inputs, **options, output_logits=True)
    assert handle.attention == "proportional"
    for ours, theirs in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def plain_flex(query: Tensor, key: Tensor, value: Tensor, training: bool = False, **options: Any) -> Any:
    return flex_attention(query, key, value, **options)


@pytest.mark.graphs
@torch.no_grad()
def test_compiled(load: Load) -> None:
    """In one graph; tests/models/test_calls.py has the default backend."""
    model, processor = load()
    inputs = prepare(processor, ["<s>user: <image> what is this?"], [[make_image()]])
    with ClustRS(keep=5)(model, **BOTH):
        expected = model(**inputs).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
    with ClustRS(keep=5)(model, positions="original", attention="plain"):
        plain = model(**inputs).logits
    torch._dynamo.reset()
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-2


@torch.no_grad()
def test_batch_equals_single(load_family: LoadFamily) -> None:
    model, processor = load_family("llava")
    images = [make_image(), make_image(60, 40, 1)]
    batch = family_inputs(model, processor, TEXTS, images)
    with ClusterMeans(keep=5)(model, **BOTH):
        together = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, -6:]
        for row, (text, image) in enumerate(zip(TEXTS, images, strict=True)):
            alone = family_inputs(model, processor, [text], [image])
            assert torch.equal(model.generate(**alone, max_new_tokens=6, do_sample=False)[0, -6:], together[row])


@pytest.mark.parametrize("name", sorted({*list_methods("encoder")} - {"none", "denoise"}))
@torch.no_grad()
def test_every_method_with_every_switch(load_family: LoadFamily, name: str) -> None:
    """Place, weight and both change the logits; Denoise and a second method go around each, or refuse it."""
    model, processor = load_family("llava")
    inputs = family_inputs(model, processor, TEXTS, [make_image(), make_image(60, 40, 1)])
    method, logits = get_method(name, keep=5), list[Tensor]()
    for positions, attention in itertools.product(("compact", "original"), ("plain", "proportional")):
        with method(model, positions=positions, attention=attention) as handle:
            logits.append(model(**inputs).logits[:, -1])
        assert [image.kept for image in handle.last] == [5, 5]
        if attention == "proportional":
            sizes = [image.selection.sizes for image in handle.last]
            total = 17 if name == "visionzip" else 16  # which keeps the CLS token, too
            assert [int(size.sum()) for size in sizes if size is not None] == [total, total]
    for one, other in itertools.combinations(logits, 2):
        assert (one - other).abs().max() > 1e-4
    with Compose(method, FastV(keep=3, layer=1))(model, **BOTH) as handle:
        model(**inputs)
    assert [image.kept for image in handle.last] == [3, 3]
    if method.merges:
        with pytest.raises(
            ValueError, match=f"inner must be a method that only drops tokens, got '{name}', which merges"
        ):
            Denoise(method)
        return
    with Denoise(method)(model, **BOTH) as handle:
        shrunk = model(**inputs).logits[:, -1]
    assert [image.kept for image in handle.last] == [5, 5]
    assert torch.equal(shrunk, logits[-1]) == (name == "clustrs")  # whose tokens are shrunk already


@pytest.mark.parametrize("name", [*list_methods("language model"), "compose"])
def test_denoise_refuses_methods_inside_the_language_model(name: str) -> None:
    with pytest.raises(ValueError, match=f"inner must be a method that prunes in the encoder, got '{name}'"):
        Denoise(get_method(name, keep=5))


@pytest.mark.parametrize("family", [name for name in BUILDERS if not name.startswith("paligemma")])
@torch.no_grad()
def test_a_second_turn_is_the_longer_prompt(load_family: LoadFamily, family: str) -> None:
    """Logits after the cache of the first turn, and of the whole prompt at once; a plain handle refuses the cache.

    Not PaliGemma, whose prompt attends to itself both ways: a longer one at once is not the shorter one continued.
    """
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, TEXTS[:1], [make_image()])
    inputs.pop("labels", None)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    names = ("image_token_id", "video_token_id", "audio_token_id")  # random weights may say anything
    options["suppress_tokens"] = [i for name in names if (i := getattr(model.config, name, None)) is not None]
    with ClustRS(keep=5)(model, **BOTH):
        first = model.generate(**inputs, max_new_tokens=3, **options)
        ids = torch.cat([first.sequences, torch.tensor([[40, 41, 42]])], 1)
        cache = first.past_key_values
        second = model.generate(input_ids=ids, past_key_values=copy.deepcopy(cache), max_new_tokens=2, **options)
        longer = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
            longer[name] = torch.nn.functional.pad(inputs[name], (0, ids.shape[1] - inputs[name].shape[1]))
        whole = model.generate(**{**inputs, **longer}, max_new_tokens=2, **options)
    for ours, theirs in zip(second.logits, whole.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    plain = ClustRS(keep=5)(model, attention="plain")
    with plain, pytest.raises(ValueError, match="past_key_values needs attention='proportional'"):
        model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=2, **options)


@EACH
@torch.no_grad()
def test_auto_says_what_it_chose(load_family: LoadFamily, family: str) -> None:
    """The default: positions as the family declares them, proportional attention; the same logits as if asked for."""
    model, processor = load_family(family)
    inputs = family_inputs(model, processor, TEXTS[:1], [make_image()])
    with ClustRS(keep=5)(model) as handle:
        logits = model(**inputs).logits
    chosen = {"positions": handle.positions, "attention": handle.attention}
    assert chosen == {"positions": type(handle.adapter).auto_positions, "attention": "proportional"}
    with ClustRS(keep=5)(model, **chosen):
        assert torch.equal(model(**inputs).logits, logits)


def test_positions_of_a_family_are_its_own(load_family: LoadFamily) -> None:
    model, _ = load_family("qwen3_vl")
    with ClustRS(keep=5)(model, positions="compact") as handle:
        assert handle.positions == "original"


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_bias(load_family: LoadFamily, name: str) -> None:
    """Asked for by name it is refused; the automatic choice is plain, and the handle says so."""
    model, _ = load_family("llava")
    model.get_decoder().config._attn_implementation = name
    with pytest.raises(ValueError, match=f"must be 'plain' or 'auto' with attn_implementation='{name}' on cpu"):
        ClustRS(keep=5)(model, attention="proportional")
    with ClustRS(keep=5)(model) as handle:
        assert handle.attention == "plain"
        assert "attention='plain'" in repr(handle)


def test_a_language_model_without_known_layers(load_family: LoadFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_family("llava")
    monkeypatch.setattr("clustrs.models.scoring.PROJECTIONS", ("c_attn",))
    with pytest.raises(ValueError, match="attention must be 'plain' for a LlamaModel, whose attention layers are not"):
        ClustRS(keep=5)(model)
    with ClustRS(keep=5)(model, attention="plain") as handle:
        assert handle.attention == "plain"
