"""Gemma 3 alone: pooled patches, attention within an image, and pan-and-scan, where text stands between the crops."""

from typing import Any

import pytest
import torch
from drawn_cells import lit_cells, lit_tile_cells
from tiny_models import make_image
from tiny_models.gemma import CELLS, GRID, Oracle, batch, load, prompt
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from clustrs import ClustRS, FasterVLM, NoPruning, Pruner, get_method, list_methods

pytestmark = pytest.mark.usefixtures("as_published")

CROPS = 3
"""Crops of the wide image: itself and two halves."""
SCAN: dict[str, Any] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
CLOSE: dict[str, Any] = {"atol": 3e-5, "rtol": 0.0}
TEXT = "<bos>user: <image> what?"


def scanned(processor: Any, seed: int = 0) -> dict[str, Any]:
    """A prompt about a wide image, and how many crops it has."""
    image = make_image(40, 80, seed)
    inputs = prompt(processor, TEXT, [image], **SCAN)
    return {**inputs, "num_crops": processor.image_processor([image], **SCAN)["num_crops"]}


def pruned(oracle: Oracle, method: Pruner, inputs: dict[str, Any], pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, token types and rows of a prompt with one image, of whose crops `pixels` compete."""
    selection = oracle.select(method, pixels)
    ids, types = inputs["input_ids"][0], inputs["token_type_ids"][0]
    columns = oracle.columns(ids, [selection.indices.tolist()], CELLS * CROPS)
    return ids[columns], types[columns], selection.tokens


def test_crops_share_a_budget_and_keep_their_own_slots() -> None:
    model, processor = load("gemma3")
    inputs, oracle = scanned(processor), Oracle(model)
    ids = inputs["input_ids"][0]
    slots = (ids == model.config.image_token_id).nonzero()[:, 0]
    assert len(slots) == CROPS * CELLS
    assert int(slots[-1] - slots[0]) > len(slots), "text stands between the crops"
    method = FasterVLM(keep=7)
    expected = oracle.logits(*pruned(oracle, method, inputs, inputs["pixel_values"]))
    with torch.no_grad(), method(model) as handle:
        logits = model(**inputs).logits[0]
        told = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, len(ids) :].tolist()
    torch.testing.assert_close(logits, expected, **CLOSE)
    parts = pruned(oracle, method, inputs, inputs["pixel_values"])
    assert told == oracle.greedy(*parts, torch.arange(len(parts[0])), 4)
    (last,) = handle.last
    assert (last.placeholders, last.kept, last.grids) == (CROPS * CELLS, 7, [(GRID, GRID)] * CROPS)
    scores = oracle.maps(inputs["pixel_values"]).scores
    place = last.layout.y * GRID + last.layout.x
    torch.testing.assert_close(last.scores, scores[last.layout.tile, place], atol=1e-6, rtol=0)
    assert (last.layout.tile * CELLS + place).tolist() == list(range(CROPS * CELLS))
    assert len(set(last.layout.tile[last.selection.indices].tolist())) > 1, "more than one crop has survivors"


def test_kept_tokens_are_drawn_in_their_crops() -> None:
    """The crops are the left and the right half of the image."""
    model, processor = load("gemma3")
    with torch.no_grad(), FasterVLM(keep=7)(model) as handle:
        model(**scanned(processor))
    (last,) = handle.last
    kept = last.selection.indices
    places = [part[kept].tolist() for part in (last.layout.tile, last.layout.y, last.layout.x)]
    whole = [(y, x) for tile, y, x in zip(*places, strict=True) if tile == 0]
    halves = [(y, (tile - 1) * GRID + x) for tile, y, x in zip(*places, strict=True) if tile > 0]
    image = make_image(40, 80)
    assert lit_cells(image, last) == sorted(whole)
    assert lit_tile_cells(image, last, (GRID, 2 * GRID)) == sorted(halves)
    assert len(whole) + len(halves) == 7


def test_all_crops_kept_are_bit_identical() -> None:
    model, processor = load("gemma3")
    inputs = scanned(processor)
    with torch.no_grad():
        expected = model(**{name: value for name, value in inputs.items() if name != "num_crops"}).logits
        for method in (NoPruning(), ClustRS(keep=1000)):
            with method(model):
                assert torch.equal(model(**inputs).logits, expected)


def test_each_crop_is_an_image_when_nobody_says_otherwise() -> None:
    model, processor = load("gemma3")
    inputs = scanned(processor)
    del inputs["num_crops"]
    with torch.no_grad(), ClustRS(keep=4)(model) as handle:
        model(**inputs)
    assert [(last.placeholders, last.kept, len(last.grids)) for last in handle.last] == [(CELLS, 4, 1)] * CROPS


@pytest.mark.parametrize("name", [name for name in list_methods("encoder") if name != "none"])
def test_a_budget_for_each_crop(name: str) -> None:
    """As if each crop were an image."""
    model, processor = load("gemma3")
    inputs = scanned(processor)
    apart = {name: value for name, value in inputs.items() if name != "num_crops"}
    with torch.no_grad():
        with get_method(name, keep=4)(model, scope="crop") as handle:
            logits = model(**inputs).logits
        with get_method(name, keep=4)(model):
            torch.testing.assert_close(logits, model(**apart).logits, **CLOSE)
    (last,) = handle.last
    assert last.kept == 4 * CROPS
    assert last.layout.tile[last.selection.indices].bincount().tolist() == [4] * CROPS


def test_the_base_crop_alone_goes_through_the_tower() -> None:
    model, processor = load("gemma3")
    inputs, oracle, method = scanned(processor), Oracle(model), ClustRS(keep=5)
    ids, types, rows = pruned(oracle, method, inputs, inputs["pixel_values"][:1])
    seen: list[int] = []
    hook = model.model.vision_tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    with torch.no_grad(), method(model, crops="base") as handle:
        logits = model(**inputs).logits[0]
    hook.remove()
    assert seen == [1]
    torch.testing.assert_close(logits, oracle.logits(ids, types, rows), **CLOSE)
    assert (handle.last[0].placeholders, handle.last[0].kept, handle.last[0].grids) == (48, 5, [(GRID, GRID)])


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_whose_images_keep_different_numbers(beams: int) -> None:
    """A quarter of one crop, and a quarter of three: each row as the untouched model continues what is left of it."""
    model, processor = load("gemma3")
    plain = {**prompt(processor, TEXT, [make_image(40, 40, 1)], **SCAN), "num_crops": [0]}
    rows, oracle, method = [scanned(processor), plain], Oracle(model), ClustRS(keep=0.25)
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams}
    inputs = {**batch(rows), "num_crops": torch.tensor([2, 0])}
    with method(model) as handle:
        out = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    assert [last.kept for last in handle.last] == [12, 4]
    for i, row in enumerate(rows):
        ids, types, features = pruned(oracle, method, row, row["pixel_values"])
        given = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=features[None])}}
        expected = model.generate(
            input_ids=ids[None],
            token_type_ids=types[None],
            attention_mask=torch.ones_like(ids)[None],
            **given,
            **options,
        )
        assert torch.equal(out[i], expected[0, len(ids) :])


@pytest.mark.parametrize("wrong", [[1], [2, 0], [3, -1]])
def test_counts_of_crops_that_do_not_fit(wrong: list[int]) -> None:
    model, processor = load("gemma3")
    inputs = {**scanned(processor), "num_crops": torch.tensor(wrong)}
    with ClustRS(keep=4)(model), pytest.raises(ValueError, match=r"num_crops=\[.*\]: .* but pixel_values has 3"):
        model(**inputs)


def test_images_do_not_see_each_other() -> None:
    """Survivors of one image see each other in both directions, those of the next image only backwards."""
    model, processor = load("gemma3")
    images = [make_image(30, 70, 1), make_image(50, 50, 2)]
    inputs = prompt(processor, "<bos><image> and <image>?", images)
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]["full_attention"][0, 0]), with_kwargs=True
    )
    with torch.no_grad(), ClustRS(keep=3)(model):
        model(**inputs)
    hook.remove()
    ids = inputs["input_ids"][0].tolist()
    first = ids.index(model.config.image_token_id)
    second = ids.index(model.config.image_token_id, first + CELLS) - CELLS + 3
    allowed = seen[0]
    assert bool(allowed[first : first + 3, first : first + 3].all())
    assert bool(allowed[second : second + 3, second : second + 3].all())
    assert not bool(allowed[first : first + 3, second : second + 3].any())
    assert bool(allowed[second : second + 3, first : first + 3].all())
