"""The model's outputs while a method is attached, against the untouched model and against pruning by hand."""

from typing import Any

import oracle
import pytest
import torch
from tiny_models import FAMILIES, GRID, PATCHES, TOWERS, Load, asked, make_image, prepare
from torch.nn import functional

from clustrs import ClusterMeans, Layout, get_method, list_methods

pytestmark = pytest.mark.usefixtures("as_published")

KINDS = [(family, tower) for family in FAMILIES for tower in TOWERS]
PRUNING = [name for name in list_methods("encoder") if name != "none"]


def ask(processor: Any, **shape: int) -> dict[str, Any]:
    return prepare(processor, ["<s>user: <image> what is this?"], [[make_image(**shape)]])


@pytest.mark.parametrize(("family", "tower"), KINDS)
def test_keeping_everything_changes_nothing(load: Load, family: str, tower: str) -> None:
    model, processor = load(family, tower)
    inputs = ask(processor)
    with torch.no_grad():
        expected = model(**inputs).logits
        for name in list_methods("encoder"):
            method = get_method(name) if name == "none" else get_method(name, keep=1000)
            with method(model):
                torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("crops", ["all", "base"])
@pytest.mark.parametrize(("family", "tower"), KINDS)
def test_logits_and_cache_are_those_of_pruning_by_hand(load: Load, family: str, tower: str, crops: str) -> None:
    model, processor = load(family, tower)
    inputs = ask(processor, height=70, width=30)
    text = int((inputs["input_ids"] != model.config.image_token_id).sum())
    for name in PRUNING:
        method = get_method(name, keep=7)
        question = asked(model, "what is this?")
        kept = oracle.select(model, method, inputs, tower != "siglip", base_only=crops == "base", question=question)
        with torch.no_grad():
            expected = model(inputs_embeds=oracle.embeddings(model, inputs["input_ids"], [kept.tokens])).logits
            with method(model, crops=crops) as handle:
                out = model(**inputs, use_cache=True)
        assert handle.last[0].selection.indices.tolist() == kept.indices.tolist(), name
        torch.testing.assert_close(out.logits, expected, atol=1e-4, rtol=1e-4, msg=name)
        assert out.past_key_values.get_seq_length() == text + 7


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_the_base_crops_alone_go_through_the_tower(load: Load, family: str) -> None:
    model, processor = load(family)
    images = [make_image(), make_image(70, 30, 1)]
    together = prepare(processor, ["<s>a <image> b <image>"], [images])
    apart = prepare(processor, ["<s>a <image>", "<s>b <image>"], [[image] for image in images])
    flat = {**apart, "pixel_values": torch.cat([apart["pixel_values"][0], apart["pixel_values"][1]])}
    counts = []
    hook = model.model.vision_tower.register_forward_hook(lambda module, args, out: counts.append(len(args[0])))
    with torch.no_grad():
        for inputs in (together, apart, flat):
            count = int((inputs["input_ids"] == model.config.image_token_id).sum())
            with get_method("clustrs", keep=6)(model, crops="base") as handle:
                model(**inputs)
            assert [last.kept for last in handle.last] == [6, 6]
            assert sum(last.placeholders for last in handle.last) == count
            assert [len(last.scores) for last in handle.last] == [PATCHES, PATCHES]
    hook.remove()
    assert counts == [2, 2, 2]


@pytest.mark.parametrize(("family", "tower"), KINDS)
def test_places(load: Load, family: str, tower: str) -> None:
    """Every candidate's place is right: a score map with a mark in one cell is found again there."""
    model, processor = load(family, tower)
    inputs = ask(processor, height=70, width=30)
    with torch.no_grad(), get_method("fastervlm", keep=5)(model) as handle:
        model(**inputs)
    last = handle.last[0]
    assert last.placeholders == int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert last.kept == 5
    assert len(last.scores) == len(last.layout.tile) == len(last.layout.y) == len(last.layout.x)
    base = last.layout.tile == 0
    assert (last.layout.y[base] * GRID + last.layout.x[base]).tolist() == list(range(PATCHES))
    pixels = inputs["pixel_values"].flatten(0, -4)
    scores = oracle.eager_scores(model, pixels, tower != "siglip")
    place = last.layout.y * GRID + last.layout.x
    torch.testing.assert_close(last.scores, scores[last.layout.tile, place], atol=1e-6, rtol=1e-4)
    if family != "llava":
        assert int(last.layout.tile.max()) == len(last.grids) - 1 > 0
        assert len(last.scores) < PATCHES * len(last.grids), "the padding of the grid is no candidate"


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_one_budget_for_each_crop(load: Load, family: str) -> None:
    model, processor = load(family, "clip")
    inputs = ask(processor)
    with torch.no_grad():
        for name in PRUNING:
            with get_method(name, keep=3)(model, scope="crop") as handle:
                out = model(**inputs, use_cache=True)
            last = handle.last[0]
            crops = len(last.grids)
            assert last.kept == 3 * crops
            counts = last.layout.tile[last.selection.indices.clamp(min=0)].bincount(minlength=crops)
            if name != "visionzip":
                assert counts.tolist() == [3] * crops
            text = int((inputs["input_ids"] != model.config.image_token_id).sum())
            assert out.past_key_values.get_seq_length() == text + 3 * crops
            if last.selection.labels is not None and name == "clustrs":
                kept = last.selection.labels[last.selection.indices]
                assert kept.tolist() == list(range(3 * crops))


def test_a_image_that_is_scaled_down(load: Load) -> None:
    """OneVision shrinks the map of a very large image: scores and places go along."""
    model, processor = load("llava_onevision", "siglip")
    inputs = ask(processor, height=56, width=56)
    for call in (False, True):
        model.config.vision_aspect_ratio = "anyres_max_2" if call else "anyres_max_9"
        pack = model.model.pack_image_features([torch.randn(5, PATCHES, 3)], inputs["image_sizes"], torch.zeros(3))
        with torch.no_grad(), get_method("clustrs", keep=4)(model) as handle:
            ids = inputs["input_ids"]
            features = model.model.get_image_features(
                pixel_values=inputs["pixel_values"], image_sizes=inputs["image_sizes"], return_dict=True
            ).pooler_output
            extra = len(features[0]) - int((ids == model.config.image_token_id).sum())
            assert (extra < 0) == call, len(pack)
            at = int((ids[0] == model.config.image_token_id).nonzero()[0])
            fitted = torch.cat([ids[:, :at], ids[:, at : at + 1].expand(1, len(features[0])), ids[:, -8:]], 1)
            model(input_ids=fitted, pixel_values=inputs["pixel_values"], image_sizes=inputs["image_sizes"])
        last = handle.last[0]
        assert last.placeholders == len(features[0])
        assert bool((last.scores > 0).all())
        assert 0 <= int(last.layout.y.min()) <= int(last.layout.y.max()) < GRID
        assert int(last.layout.tile.max()) == 4


@pytest.mark.parametrize(("family", "tower"), KINDS)
def test_original_positions(load: Load, family: str, tower: str) -> None:
    model, processor = load(family, tower)
    inputs = ask(processor)
    ids = inputs["input_ids"]
    start = int((ids[0] == model.config.image_token_id).nonzero()[0])
    method = get_method("clustrs", keep=6)
    with torch.no_grad(), method(model, positions="original") as handle:
        ours = model(**inputs).logits
    last = handle.last[0]
    # placeholders run through the packed image: base rows first, then grid rows with a newline each
    inner = model.model
    whole = inner.get_image_features(
        **{k: inputs[k] for k in ("pixel_values", "image_sizes") if k in inputs}, return_dict=True
    ).pooler_output[0]
    newline = getattr(inner, "image_newline", None)
    real = [i for i, row in enumerate(whole) if newline is None or not torch.equal(row, newline)]
    places = [start + real[i] for i in last.selection.indices.tolist()]
    after = int((ids[0] == model.config.image_token_id).nonzero()[-1]) + 1
    positions = [*range(start), *places, *range(after, ids.shape[1])]
    embeds = oracle.embeddings(model, ids, [last.selection.tokens])
    with torch.no_grad():
        expected = model(
            inputs_embeds=embeds,
            position_ids=torch.tensor([positions]),
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
        ).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_model(load: Load, family: str) -> None:
    model, processor = load(family, "clip")
    inputs = ask(processor)
    method = get_method("clustrs", keep=6)
    with torch.no_grad():
        with method(model):
            expected = model(**inputs, output_hidden_states=True).hidden_states[-1]
        with method(model.model):
            ours = model.model(**inputs).last_hidden_state
    torch.testing.assert_close(ours, expected)


def test_several_images_and_a_video(load: Load) -> None:
    model, processor = load("llava_onevision", "siglip")
    several = prepare(processor, ["<s>a <image> b <image> c"], [[make_image(), make_image(30, 30, 1)]])
    method = get_method("clustrs", keep=6)
    with torch.no_grad(), method(model) as handle:
        out = model(**several, use_cache=True)
    text = int((several["input_ids"] != model.config.image_token_id).sum())
    assert [last.kept for last in handle.last] == [6, 6]
    assert out.past_key_values.get_seq_length() == text + 12
    frames = 3
    count = frames * 4 + 1
    ids = torch.tensor([[1, *[model.config.video_token_id] * count, 50, 51]])
    video = {"input_ids": ids, "pixel_values_videos": torch.randn(1, frames, 3, 28, 28)}
    with torch.no_grad(), method(model) as handle:
        out = model(**video, use_cache=True)
    (last,) = handle.last
    assert (last.placeholders, last.kept, len(last.scores)) == (count, 6, frames * 4)
    assert out.past_key_values.get_seq_length() == 3 + 6
    assert last.layout.tile.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    with torch.no_grad():
        untouched = model(**video).logits
        with get_method("clustrs", keep=1.0)(model):
            torch.testing.assert_close(model(**video).logits, untouched, atol=1e-5, rtol=1e-5)
        assert last.layout.frame is not None
        for name in ("clustrs", "evs", "vidcom2"):
            with get_method(name, keep=2).attach(model, scope="frame") as handle:
                model(**video)
            assert last.layout.frame[handle.last[0].selection.indices].tolist() == [0, 0, 1, 1, 2, 2]
            with get_method(name, keep=6).attach(model, scope="video") as handle:
                model(**video)
            kept = handle.last[0].selection.indices
            with get_method(name, keep=6).attach(model, scope="image") as handle:
                model(**video)
            assert torch.equal(handle.last[0].selection.indices, kept)


def test_a_video_is_that_of_pruning_by_hand(load: Load) -> None:
    model, _ = load("llava_onevision", "siglip")
    inner, frames, side = model.model, 3, GRID // 2
    pixels = torch.randn(frames, 3, 28, 28, generator=torch.Generator().manual_seed(0))

    def pooled(part: torch.Tensor) -> torch.Tensor:
        grid = part.unflatten(1, (GRID, GRID)).permute(0, 3, 1, 2)
        return functional.interpolate(grid, size=side, mode="bilinear").flatten(2).mT.flatten(0, 1)

    frame, y, x = torch.cartesian_prod(*(torch.arange(n) for n in (frames, side, side))).T
    ids = torch.tensor([[1, *[model.config.video_token_id] * (len(frame) + 1), 50, 51]])
    methods = [get_method(name, keep=5) for name in ("clustrs", "clustermeans", "evs", "vidcom2", "divprune", "mmr")]
    with torch.no_grad():
        hidden = inner.vision_tower(pixels, output_hidden_states=True).hidden_states[-1]
        tokens = pooled(inner.multi_modal_projector(hidden))
        scores = pooled(oracle.eager_scores(model, pixels, cls=False)[..., None])[:, 0]
        for method in (*methods, ClusterMeans(keep=5, across_frames=True)):
            kept = method.select(tokens, scores, layout=Layout(frame, y, x, frame), cls=False)
            with method(model) as handle:
                logits = model(input_ids=ids, pixel_values_videos=pixels[None]).logits
            assert handle.last[0].selection.indices.tolist() == kept.indices.tolist(), method
            table = model.get_input_embeddings()
            rows = torch.cat([table(ids[0, :1]), kept.tokens, table(ids[0, -2:])])
            expected = model(inputs_embeds=rows[None]).logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, msg=method.name)
        untouched = model(input_ids=ids, pixel_values_videos=pixels[None]).logits
        with get_method("clustrs", keep=1.0)(model):
            assert torch.equal(model(input_ids=ids, pixel_values_videos=pixels[None]).logits, untouched)


@pytest.mark.parametrize("family", FAMILIES)
def test_training(load: Load, family: str) -> None:
    """Labels are shortened along with the ids, and gradients reach the projector."""
    model, processor = load(family, "clip")
    model.train()
    texts, images = (
        ["<s>one <image> yes", "<s>longer text <image> no, not at all"],
        [[make_image()], [make_image(seed=1)]],
    )
    processor.tokenizer.padding_side = "right"
    inputs = prepare(processor, texts, images)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == model.config.image_token_id, -100)
    labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    with get_method("clustrs", keep=6)(model) as handle:
        out = model(**inputs, labels=labels)
    out.loss.backward()
    assert float(model.model.multi_modal_projector.linear_1.weight.grad.abs().sum()) > 0
    expected, count = 0.0, 0
    for i, last in enumerate(handle.last):
        length = int(inputs["attention_mask"][i].sum())
        ids = inputs["input_ids"][i : i + 1, :length]
        rows = oracle.embeddings(model, ids, [last.selection.tokens.detach()])
        with torch.no_grad():
            logits = model(inputs_embeds=rows).logits
        tail = ids[0, int((ids[0] == model.config.image_token_id).nonzero()[-1]) + 1 :]
        head = ids[0, : int((ids[0] == model.config.image_token_id).nonzero()[0])]
        goal = torch.cat([head, torch.full((6,), -100), tail])
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], goal[1:], ignore_index=-100, reduction="sum")
        expected, count = expected + float(loss), count + int((goal[1:] != -100).sum())
    assert float(out.loss.detach()) == pytest.approx(expected / count, rel=1e-4)


def test_a_prompt_that_does_not_fit_its_images(load: Load) -> None:
    model, processor = load()
    inputs = prepare(processor, ["<s>a <image>", "<s>b <image>"], [[make_image()], [make_image(seed=1)]])
    fewer = {**inputs, "input_ids": inputs["input_ids"].clone()}
    at = (fewer["input_ids"][0] == model.config.image_token_id).nonzero()[0]
    fewer["input_ids"][0, at] = 50
    moved = {**fewer, "input_ids": fewer["input_ids"].clone()}
    moved["input_ids"][1, -1] = model.config.image_token_id
    with get_method("clustrs", keep=4)(model):
        for wrong in (fewer, moved):
            with pytest.raises(ValueError, match="Image features and image tokens do not match"):
                model(**wrong)
            with pytest.raises(ValueError, match="Image features and image tokens do not match"):
                model.generate(**wrong, max_new_tokens=2)
