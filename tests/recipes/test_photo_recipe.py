"""photo-llava's recipe: the converted tower, features, packed questions, and a run that can be stopped."""

import argparse
import copy
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import recipes.card
from clustrs import ClustRS
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs_models.photographs import (
    KINDS,
    PHOTOS,
    QUESTION_KINDS,
    SIDE,
    Question,
    draw_kinds,
    every,
    generator_for,
    list_photos,
)
from recipes.data import IGNORED, blocks, pad, split
from recipes.photo import card, data, features, language, measure, models, tower, train
from recipes.photo.images import TrainingImages, halves, kind_indices, pixel_values
from recipes.photo.settings import read_settings

BUILT = Path(os.environ.get("CLUSTRS_PHOTO", "build/photo"))
"""Where `python -m recipes.photo.tower` has written the tower."""
ASKED = [
    Question("name", "What is at the top left?", "panda"),
    Question("count", "How many animals are there?", "3"),
    Question("place", "Is the car on the left or on the right?", "left"),
]


COUNTS = {"single": 2, "name": 4, "neighbour": 2, "which": 1, "presence": 4, "count": 1, "place": 2}


@pytest.fixture
def settings() -> dict[str, Any]:
    """The recipe's settings with fewer, narrower layers and fewer steps."""
    settings = copy.deepcopy(read_settings())
    settings["tower"]["layers"] = 1
    settings["language"] |= {"width": 32, "layers": 2, "heads": 2, "inner": 48}
    settings["language"] |= {"warmup": 2, "horizon": 20, "cooldown": 2, "judged_every": 3}
    settings["language"]["stages"] = [{"images": 3, "steps": 2, "language": False}, {"images": 2, "steps": 4}]
    return settings


@pytest.mark.skipif(not (BUILT / "tower").exists(), reason="python -m recipes.photo.tower WHEEL has not been run")
def test_the_tower_computes_what_onnx_runtime_computed() -> None:
    converted, recorded, tokens = tower.load(BUILT), load_file(tower.RECORD), tower.recorded_tokens()
    states = tower.hidden_states(converted, tower.pattern())
    assert len(states) == len(recorded) == tower.LAYERS
    for layer, state in enumerate(states, 1):
        torch.testing.assert_close(state[0, tokens], recorded[f"hidden_state_{layer}"], rtol=1e-4, atol=1e-4)


def test_the_embedded_tower_computes_what_onnx_runtime_computed() -> None:
    """Its weights are rounded to float16: the outputs are those of ONNX Runtime to 1.2 thousandths of their length."""
    packed = load_model("photo-llava")[0].model.vision_tower
    recorded, tokens = load_file(tower.RECORD), tower.recorded_tokens()
    states = tower.hidden_states(packed, tower.pattern())
    assert len(states) == read_settings()["tower"]["layers"]
    for layer, state in enumerate(states, 1):
        expected = recorded[f"hidden_state_{layer}"]
        assert ((state[0, tokens] - expected).norm(dim=-1) < 1.2e-3 * expected.norm(dim=-1)).all(), layer


def test_the_card_says_what_was_measured() -> None:
    page = recipes.card.PAGE.read_text()
    for name, block in (recipes.card.stored() | card.stored()).items():
        assert f"<!-- {name} -->\n{block}\n<!-- end -->" in page


@pytest.mark.skipif(not (BUILT / "tower").exists(), reason="python -m recipes.photo.tower WHEEL has not been run")
def test_a_tower_that_is_cut_off_ends_where_the_whole_one_passes() -> None:
    whole, shorter = tower.load(BUILT), tower.load(BUILT, 3)
    pixels = tower.pattern()
    assert len(tower.hidden_states(shorter, pixels)) == 3
    torch.testing.assert_close(tower.hidden_states(shorter, pixels)[-1], tower.hidden_states(whole, pixels)[2])


def test_training_sees_what_inference_sees(settings: dict[str, Any]) -> None:
    """Packed questions on stored features, and the model's own forward on the image."""
    torch.manual_seed(0)
    model, processor, words = models.photo_llava(settings).eval(), models.processor(), models.vocabulary()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    image = Image.fromarray(generator_for(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    tokens = features.tokens(model.model.vision_tower, pixel_values([image]))
    packed = {key: torch.from_numpy(value)[None] for key, value in blocks(ASKED, words, QUESTION_KINDS).items()}
    with torch.no_grad():
        logits = language.PhotoAsking(model, words)({"features": tokens, **packed})
    begin = 0
    for question in ASKED:
        text = chat_prompt(processor, question.text) + " " + question.answer
        inputs = processor(images=[image], text=[text], return_tensors="pt")
        with torch.no_grad():
            expected = model(**inputs).logits[0, -2:]
        torch.testing.assert_close(logits[begin : begin + 2], expected, rtol=1e-3, atol=1e-4)
        begin += 2
    assert begin == len(logits)


def test_every_word_of_the_task_is_known_and_none_is_unused() -> None:
    generator, words, tokens = generator_for(6), models.vocabulary(), models.processor().tokenizer
    used = {*models.SPECIAL, "user", "assistant", ":"}
    for number in range(150):
        kinds = [KINDS[number % len(KINDS)]] if number % 3 == 0 else draw_kinds(generator, animals=number % 5)
        for question in every(kinds):
            used |= set(split(question.text)) | set(split(question.answer))
            if number < 2:
                assert tokens(question.text, add_special_tokens=False)["input_ids"] == [
                    words[word] for word in split(question.text)
                ]
    assert used == set(words)


def test_words_and_image_begin_alike(settings: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = models.photo_llava(settings)
    spread = torch.linspace(0.1, 30, tower.WIDTH)
    tokens = 5 + spread * torch.randn(2, 500, tower.WIDTH)
    models.initialize(model, tokens)
    with torch.no_grad():
        visual = model.model.multi_modal_projector(tokens)
    words = model.model.language_model.embed_tokens.weight
    assert visual.norm(dim=-1).mean().item() == pytest.approx(words.norm(dim=-1).mean().item(), rel=0.2)
    centerd = visual.flatten(0, 1) - visual.flatten(0, 1).mean(0)
    share = torch.linalg.svdvals(centerd).square()
    assert share[0] / share.sum() < 0.5


def test_a_saved_model_answers_as_before(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = models.photo_llava(settings).eval()
    models.save(model, tmp_path)
    loaded, processor = load_model(str(tmp_path))
    assert type(loaded) is type(model)
    image = Image.fromarray(generator_for(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    inputs = processor(images=[image], text=[chat_prompt(processor, "What is this?")], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    handle = ClustRS(keep=16)(loaded)
    loaded(**inputs)
    handle.remove()
    assert len(handle.last[0].scores) == 576


def test_geometry_of_known_tokens() -> None:
    torch.manual_seed(5)
    tokens = torch.randn(3, 40, 6)
    tokens[..., 0] *= 10
    tokens *= 2
    found = measure.spread(tokens, torch.full((5, 4), 0.5))
    assert found["mean norm of words"] == pytest.approx(1)
    assert found["share of the first direction, %"] == pytest.approx(100 * 100 / 105, abs=2)
    each = [(tokens[i, a] - tokens[i, b]).norm().item() for i in range(3) for a in range(40) for b in range(a)]
    assert found["mean distance between tokens of an image"] == pytest.approx(np.mean(each), rel=1e-4)


def test_quarters_are_those_of_the_collage() -> None:
    """A token's number says where it lies: the quarters of numbered tokens are compared with the grid itself."""
    numbered = torch.arange(576.0)[None, :, None]
    grid = numbered[0, :, 0].reshape(24, 24)
    expected = [grid[:12, :12], grid[:12, 12:], grid[12:, :12], grid[12:, 12:]]
    for quarter, own in zip(language.by_quarter(numbered)[0, :, :, 0], expected, strict=True):
        assert sorted(quarter.tolist()) == sorted(own.flatten().tolist())


def test_a_quarter_may_be_named_by_one_of_its_tokens() -> None:
    words = models.vocabulary()
    embeddings = torch.nn.Embedding(len(words), 8)
    with torch.no_grad():
        embeddings.weight.zero_()
        embeddings.weight[words[KINDS[5].name], 0] = 30.0
    heads = language.Heads(embeddings, words)
    visual = torch.zeros(1, 576, 8)
    visual[0, 0, 0] = visual[0, 12, 0] = visual[0, -1, 0] = visual[0, 24 * 12, 0] = 1.0
    kind, _, right = language.quarter_losses(heads, visual, torch.full((1, 4), 5))
    assert right == 1
    assert kind < 0.5  # by chance 3.9: cosines of 1 among many tokens that say nothing


def test_a_quarter_is_known_by_its_two_words() -> None:
    words = models.vocabulary()
    embeddings = torch.nn.Embedding(len(words), 8)
    with torch.no_grad():
        embeddings.weight.zero_()
        for i, word in enumerate(("top", "bottom", "left", "right")):
            embeddings.weight[words[word], i] = 30.0
    half = torch.arange(24) >= 12
    vertical, horizontal = half[:, None].expand(24, 24).flatten().long(), half[None].expand(24, 24).flatten().long()
    visual = torch.zeros(1, 576, 8)
    visual[0, torch.arange(576), vertical] = 1.0
    visual[0, torch.arange(576), 2 + horizontal] = 1.0
    heads = language.Heads(embeddings, words)
    assert language.quarter_losses(heads, visual, torch.zeros(1, 4, dtype=torch.long))[1] < 0.05
    assert list(dict(heads.named_parameters())) == ["kind_bias", "quarter_bias"]


def test_images_of_words_show_what_the_image_shows() -> None:
    words = models.vocabulary()
    embeddings = torch.nn.Embedding(len(words), 64)
    heads = language.Heads(embeddings, words)
    batch = {"quarters": torch.tensor([[1, 2, 3, 4], [5, 5, 5, 5]]), "single": torch.tensor([False, True])}
    visual = language.images_of_words(embeddings, heads, batch, seed=3)
    side = language.WORD_SIDE
    assert visual.shape == (2, side**2, 64)
    quarters = language.by_quarter(visual)
    assert (heads.quarter(quarters).argmax(-1) == torch.arange(4)[None, :, None]).all()
    assert heads.kind(quarters).amax(2).argmax(-1).tolist() == batch["quarters"].tolist()
    norms = visual.norm(dim=-1)
    assert norms.min().item() == pytest.approx(norms.max().item(), rel=1e-5)
    assert norms.mean().item() == pytest.approx(embeddings.weight.norm(dim=-1).mean().item(), rel=1e-5)
    assert torch.equal(visual, language.images_of_words(embeddings, heads, batch, seed=3))
    assert not torch.equal(visual, language.images_of_words(embeddings, heads, batch, seed=4))


def test_an_answer_can_be_expected_at_every_word_of_its_question() -> None:
    words = models.vocabulary()
    rows = [blocks(ASKED, words, QUESTION_KINDS), blocks(ASKED[:1], words, QUESTION_KINDS)]
    for name, value in data.PADDING.items():
        pad(rows, name, value)
    batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in data.PADDING}
    found = language.expected_everywhere(batch)
    for row, own in zip(found, batch["targets"], strict=True):
        assert torch.equal(row[own != IGNORED], own[own != IGNORED])
    for number, question in enumerate(ASKED):
        mine = (batch["segments"][0] == number) & (batch["targets"][0] == IGNORED)
        assert set(found[0][mine].tolist()) == {words[question.answer]}
    assert (found[1][batch["segments"][1] < 0] == IGNORED).all()


def test_norms_near_those_of_words_cost_nothing() -> None:
    words = torch.nn.functional.normalize(torch.randn(7, 6), dim=-1) * 4
    at = {norm: language.norm_penalty(torch.full((1, 3, 6), norm / 6**0.5), words).item() for norm in (1.0, 4.0, 16.0)}
    assert at[4.0] == pytest.approx(0, abs=1e-6)
    assert at[1.0] == pytest.approx(at[16.0], rel=1e-4)
    assert at[1.0] == pytest.approx(np.log(4) ** 2, rel=1e-4)


def test_held_out_photographs_are_not_learnt_from() -> None:
    photos = list_photos(PHOTOS)
    learn, held = halves(photos, 0.3, 1)
    assert not set(learn) & set(held)
    assert set(learn) | set(held) == set(photos)
    assert {photo.kind for photo in held} == set(KINDS)


def test_training_images_are_the_same_in_every_run(settings: dict[str, Any]) -> None:
    first, again = (TrainingImages(settings, list_photos(PHOTOS)) for _ in range(2))
    for number in (0, 1, 2):
        assert first[number].kinds == again[number].kinds
        assert first[number].pixels.tobytes() == again[number].pixels.tobytes()
    assert first[0].pixels.tobytes() != first[1].pixels.tobytes()
    counts = [len(first[number].kinds) for number in range(40)]
    assert set(counts) == {1, 4}
    assert kind_indices([KINDS[3]]).tolist() == [3] * 4


def test_pixels_are_normalised_as_the_processor_does_it() -> None:
    image = Image.fromarray(generator_for(4).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    processor = models.processor()
    expected = processor(images=[image], text=[chat_prompt(processor, "What is this?")], return_tensors="pt")
    torch.testing.assert_close(pixel_values([image]), expected["pixel_values"], rtol=1e-4, atol=1e-5)


def write_features(folder: Path, numbers: range, images: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        torch.manual_seed(number)
        single = torch.arange(images) % 3 == 0
        kinds = torch.stack([torch.randperm(len(KINDS))[:4] for _ in range(images)])
        kinds[single] = kinds[single][:, :1].expand(-1, 4)
        tensors = {"features": torch.randn(images, 576, tower.WIDTH).half(), "kinds": kinds, "single": single}
        features.write_shard(features.shard_path(folder, number), tensors)


def test_features_that_are_there_are_not_computed_again(settings: dict[str, Any], tmp_path: Path) -> None:
    vision = tower.dinov2(SIDE, 1)
    images = TrainingImages(settings, list_photos(PHOTOS))
    features.compute(vision, images, 2, 1, tmp_path)
    first, second = (features.shard_path(tmp_path, number) for number in range(2))
    before = load_file(second)
    assert before["features"].shape == (1, 576, tower.WIDTH)
    expected = features.tokens(vision, pixel_values([images[1].pixels]))
    torch.testing.assert_close(before["features"].float(), expected, rtol=1e-2, atol=1e-2)
    first.write_bytes(b"untouched")
    second.unlink()
    features.compute(vision, images, 2, 1, tmp_path)
    assert first.read_bytes() == b"untouched"
    assert torch.equal(load_file(second)["features"], before["features"])
    features.compute(vision, images, 4, 1, tmp_path, (2, 2))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["00000", "00001", "00003"]


def test_a_part_of_the_work_is_named_by_two_numbers() -> None:
    assert features.part_of("2/3") == (2, 3)
    for wrong in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be I/N"):
            features.part_of(wrong)


def test_features_that_come_later_are_taken_in(tmp_path: Path) -> None:
    write_features(tmp_path, range(1))
    shards = data.Shards(tmp_path)
    assert len(shards) == 4
    write_features(tmp_path, range(1, 3))
    steps = data.batches(shards, models.vocabulary(), 1, 4, COUNTS, range(19, 21))
    next(steps)
    assert len(shards) == 4
    next(steps)
    assert len(shards) == 12
    with pytest.raises(SystemExit, match="has no features: compute some first"):
        data.Shards(tmp_path / "nowhere")


def test_training_waits_for_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        write_features(tmp_path / "features", range(len(waited)))
        if len(waited) == 2:
            write_features(tmp_path / "development", range(1))

    monkeypatch.setattr("time.sleep", sleep)
    train.wait_for(9, tmp_path)
    assert len(waited) == 3


def test_questions_of_each_kind_have_all_answers() -> None:
    shown = [kind for kind in KINDS if kind.name in ("panda", "car", "guitar", "rooster")]
    asked = data.some_questions(shown, COUNTS, generator_for(2))
    found = Counter(question.kind for question in asked)
    assert found == {kind: count for kind, count in COUNTS.items() if kind != "single"}
    assert {question.answer for question in asked if question.kind == "name"} == {kind.name for kind in shown}
    assert Counter(q.answer for q in asked if q.kind == "presence") == {"yes": 2, "no": 2}
    alone = data.some_questions(shown[:1], COUNTS, generator_for(2))
    assert Counter(question.kind for question in alone) == {"single": 2, "presence": 4}


def test_a_batch_asks_about_what_its_images_show(tmp_path: Path) -> None:
    write_features(tmp_path, range(1))
    shards, words = data.Shards(tmp_path), models.vocabulary()
    batch = data.batch_of([shards[n] for n in range(4)], words, COUNTS, (1, 2))
    names = list(words)
    for row in range(4):
        shown = {KINDS[i].name for i in shards[row]["quarters"].tolist()}
        assert batch["features"][row].shape == (576, tower.WIDTH)
        asked = batch["targets"][row] >= 0
        for target, kind in zip(
            batch["targets"][row][asked].tolist(), batch["kinds"][row][asked].tolist(), strict=True
        ):
            if kind >= 0 and QUESTION_KINDS[kind] in ("single", "name", "neighbour", "which"):
                assert names[target] in shown


@pytest.mark.slow
def test_a_stopped_run_resumes(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in each stage, and not: the weights are the same."""
    for run in ("whole", "parts"):
        write_features(tmp_path / run / "features", range(4))
        write_features(tmp_path / run / "development", range(9, 10))
    train.train(settings, tmp_path / "whole")
    original = language.loss

    def stopping(steps: int) -> Any:
        left = iter(range(steps))

        def stop(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return original(*arguments)

        return stop

    monkeypatch.setattr("recipes.running.SAVE_EVERY", 0.0)
    for steps in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(language, "loss", stopping(steps))
            with pytest.raises(KeyboardInterrupt):
                train.train(settings, tmp_path / "parts")
    train.train(settings, tmp_path / "parts")
    whole, parts = (load_file(tmp_path / run / "language" / "checkpoint.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(parts[key], tensor, rtol=1e-3, atol=1e-5)
