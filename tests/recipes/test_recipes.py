"""The recipe: training sees what inference sees, and a stopped run resumes as if it had not been stopped."""

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from clustrs.models.ask import chat_prompt
from clustrs_models.drawing import Scene, Thing, draw, sample
from clustrs_models.photographs import Question, generator_for
from clustrs_models.scenes import draw_questions, lists
from recipes import data, language, models, tower, train

ASKED = [
    Question("colour", "What colour is the star?", "red"),
    Question("size", "Is the red star larger or smaller than the blue circle?", "larger"),
    Question("list", "List the objects from left to right.", "red star 7, blue circle"),
]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The shipped settings with fewer, narrower layers and fewer steps."""
    settings = tomllib.loads(train.SETTINGS.read_text())
    for family in ("llava", "onevision"):
        settings[family]["encoder"] |= {"width": 32, "heads": 2, "warmup": 2, "horizon": 20, "cooldown": 2}
        settings[family]["language"] |= {"width": 32, "heads": 2, "inner": 48, "layers": 2, "warmup": 2, "horizon": 20}
        settings[family]["language"] |= {"questions": 3, "cooldown": 2}
        for part in ("encoder", "language"):
            settings[family][part]["stages"] = [
                {"sides": [64], "images": [3], "steps": 3, "lists": 2},
                {"sides": [64, 128], "images": [2, 1], "steps": 3, "lists": 1, "hints": 2, "grades": 2},
            ]
    return settings


def image(side: int, scale: float) -> Tensor:
    generator = generator_for(5)
    drawing = draw(sample(generator, side).scaled(round(side * scale)), generator)
    return torch.from_numpy(drawing.pixels)[None]


@pytest.mark.parametrize("family", ["llava", "onevision"])
def test_training_sees_what_inference_sees(settings: dict[str, Any], family: str) -> None:
    torch.manual_seed(0)
    model = getattr(models, family)(settings[family]).eval()
    processor = getattr(models, f"{family}_processor")(settings[family])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    encoder = (
        tower.Clip(model.model.vision_tower, fresh=False)
        if family == "llava"
        else tower.Siglip(model.model.vision_tower)
    )
    words = models.vocabulary()
    asker = language.Asking(model, encoder, words)
    pixels = image(192, settings[family]["scale"])
    blocks = {key: torch.from_numpy(value)[None] for key, value in data.blocks(ASKED, words).items()}
    with torch.no_grad():
        logits = asker({"pixels": pixels, "corner": torch.zeros(1, 2, dtype=torch.long), **blocks})
    begin = 0
    for question in ASKED:
        text = chat_prompt(processor, question.text) + " " + question.answer
        inputs = processor(images=[Image.fromarray(pixels[0].numpy())], text=[text], return_tensors="pt")
        length = len(data.split(question.answer)) + 1
        with torch.no_grad():
            expected = model(**inputs).logits[0, -length:]
        torch.testing.assert_close(logits[begin : begin + length], expected, rtol=1e-3, atol=1e-4)
        begin += length
    assert begin == len(logits)


def test_words_are_split_as_the_tokenizer_splits() -> None:
    tokens, words = models.tokenizer(), models.vocabulary()
    for question in ASKED:
        for text in (question.text, question.answer):
            assert tokens(text, add_special_tokens=False)["input_ids"] == [words[word] for word in data.split(text)]


def test_every_word_of_the_task_is_known() -> None:
    generator, words, corner = generator_for(6), models.vocabulary(), np.array([0, 0])
    for _ in range(100):
        scene = sample(generator)
        for question in [
            *draw_questions(scene, 20, generator),
            *lists(scene),
            *data.hints(scene, corner, 96),
            *data.grades(scene, corner, 192),
        ]:
            assert set(data.split(question.text)) | set(data.split(question.answer)) <= set(words)


def test_a_window_takes_the_positions_where_it_lies() -> None:
    at = tower.places(torch.tensor([[0, 0], [2, 3]]), 2, 5)
    assert at.tolist() == [[0, 1, 5, 6], [13, 14, 18, 19]]


def test_questions_see_the_image_and_themselves() -> None:
    seen = language.visible(2, torch.tensor([[0, 0, 1, 1, -1]]))[0, 0]
    assert seen.exp().int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]


def test_patch_labels_name_what_lies_there() -> None:
    generator = generator_for(8)
    drawing = draw(sample(generator, 96), generator)
    labels = data.patch_labels(drawing, np.array([3, 4]), 24)
    shapes, colors = list(data.SHAPE), list(data.COLOR)
    covered = drawing.coverage.reshape(len(drawing.scene.things), -1)
    for patch in range(covered.shape[1]):
        most = int(covered[:, patch].argmax())
        thing = drawing.scene.things[most]
        if covered[most, patch] >= data.CLEAR:
            assert shapes[labels["shape"][patch] - 1] == thing.shape
            assert colors[labels["color"][patch] - 1] == thing.color
            x, y, size = labels["geometry"][patch]
            assert (x + 2) / 4 * 192 == pytest.approx(thing.x + 4 * 8, abs=1e-3)
            assert (y + 2) / 4 * 192 == pytest.approx(thing.y + 3 * 8, abs=1e-3)
            assert size == pytest.approx(2 * np.log(thing.area / 800), abs=1e-3)
            assert labels["column"][patch] == 1 + (thing.x + 4 * 8) // 16
            assert labels["row"][patch] == 1 + (thing.y + 3 * 8) // 16
            low, high = (350 * (1.25 * 1900 / 350) ** (step / 9) for step in labels["size"][patch] + [-1, 0])
            assert low <= thing.area <= high
        elif covered[most, patch] <= data.FAINT:
            assert labels["shape"][patch] == labels["color"][patch] == labels["row"][patch] == 0
        else:
            assert labels["shape"][patch] == data.IGNORED


def test_a_spread_classifier_cannot_look_harder() -> None:
    """Neither longer classes nor longer features make its logits larger."""
    torch.manual_seed(2)
    head: Any = tower.Heads(16).shape
    patches = torch.randn(2, 3, 16)
    before = tower.spread(head, patches)
    classes = head[1].weight / head[1].weight.norm(dim=1, keepdim=True)
    centerd = patches - patches.mean(-1, keepdim=True)
    expected = 1.5 * (centerd / centerd.pow(2).mean(-1, keepdim=True).sqrt()) @ classes.T
    torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        head[1].weight *= 50
    torch.testing.assert_close(tower.spread(head, 7 * patches), before, rtol=1e-4, atol=1e-4)


def test_in_even_images_the_area_says_nothing_about_the_number() -> None:
    for side in (96, 128):
        generator = generator_for(12, side)
        scenes = [sample(generator, side, even=True) for _ in range(400)]
        counts = np.array([len(scene.things) for scene in scenes])
        totals = np.array([sum(thing.area for thing in scene.things) for scene in scenes])
        assert set(counts) == set(range(1, 4 if side == 96 else 5))
        assert abs(np.corrcoef(counts, totals)[0, 1]) < 0.12
        plain = [sample(generator, side) for _ in range(400)]
        plain_totals = [sum(thing.area for thing in scene.things) for scene in plain]
        assert np.corrcoef([len(scene.things) for scene in plain], plain_totals)[0, 1] > 0.7


def test_the_learning_rate_of_a_stage(tmp_path: Path) -> None:
    from recipes.running import Run, Schedule

    run = Run(tmp_path, {"layer": torch.nn.Linear(2, 1)}, Schedule(1e-2, 10, 100, 10, 200, rests=(100,)), 0.0)
    plain, own = data.Stage((1,), (1,), 100), data.Stage((1,), (1,), 100, rate=4e-3)
    expected = {0: (1e-3, 1e-3), 10: (1e-2, 4e-3), 95: (None, 2e-3), 100: (5e-4, 4e-3), 195: (2.5e-4, 2e-3)}
    for step, rates in expected.items():
        run.step = step
        for stage, rate in zip((plain, own), rates, strict=True):
            assert rate is None or run.learning_rate(stage) == pytest.approx(rate)
    run.stage_begin = 20
    for step, share in {20: 0.25, 22: 0.75, 23: 1.0, 40: 1.0}.items():
        run.step = step
        warm = data.Stage((1,), (1,), 100, rate=4e-3, warmup=4)
        assert run.learning_rate(warm) == pytest.approx(4e-3 * share)


def test_words_and_image_begin_alike(settings: dict[str, Any]) -> None:
    """Both enter the language model with values of about 1, and its layers neither drown nor ignore them."""
    torch.manual_seed(3)
    model = models.llava(settings["llava"])
    language.initialize(model, 10.0)
    features = 10 * torch.randn(1, 50, model.config.vision_config.hidden_size)
    words = torch.arange(50)[None]
    with torch.no_grad():
        visual = model.model.multi_modal_projector(features)
        text = model.model.language_model.embed_tokens(words)
        after = model.model.language_model.layers[0](
            text, position_embeddings=model.model.language_model.rotary_emb(text, words)
        )
    assert 0.3 < visual.std() < 1.5
    assert 0.8 < text.std() < 1.2
    assert 0.05 < (after - text).std() < 1.0


def test_hints_and_grades_of_a_known_scene() -> None:
    things = (Thing("red", "star", 40, 50, 1900, 0.0, None), Thing("blue", "heart", 90, 10, 350, 0.0, None))
    corner = np.array([96, 48])  # of the window in the whole image: row, column
    hints = {question.text: question.answer for question in data.hints(Scene(96, things), corner, 96)}
    assert hints["Is the red star left or right?"] == "left"
    assert hints["Is the blue heart left or right?"] == "right"
    assert hints["Is the red star above or below?"] == "below"
    assert hints["Is the red star larger or smaller?"] == "larger"
    assert hints["Is there a star?"] == hints["Is there a red object?"] == "yes"
    assert {answer for text, answer in hints.items() if text.startswith("Is there")} == {"yes", "no"}
    grades = {question.text: question.answer for question in data.grades(Scene(96, things), corner, 192)}
    assert grades["Which digit is the red star from left to right?"] == str(int(10 * (40 + 48) / 192))
    assert grades["Which digit is the blue heart from top to bottom?"] == str(int(10 * (10 + 96) / 192))
    assert grades["Which digit is the red star from small to large?"] == "9"
    assert grades["Which digit is the blue heart from small to large?"] == "0"


def test_counts_of_a_known_scene() -> None:
    pairs = (("red", "star"), ("red", "heart"), ("blue", "star"))
    scene = Scene(96, tuple(Thing(color, shape, 40, 50, 900, 0.0, None) for color, shape in pairs))
    questions = data.counts(scene)
    answers = {question.text: question.answer for question in questions}
    assert answers["How many red objects are there?"] == answers["How many star objects are there?"] == "2"
    assert answers["How many blue objects are there?"] == answers["How many heart objects are there?"] == "1"
    assert answers["How many green objects are there?"] == "0"
    assert len(answers) == len(data.COLOR) + len(data.SHAPE)
    chosen = [question.answer for question in data.drawn(questions, 3000, generator_for(5))]
    for answer in "012":
        assert chosen.count(answer) == pytest.approx(1000, abs=120)


def test_corrupted_images_stay_close(settings: dict[str, Any]) -> None:
    generator = generator_for(9)
    drawing = draw(sample(generator, 96), generator)
    changed = [data.corrupted(drawing.pixels, settings["photometry"], generator) for _ in range(50)]
    differences = [abs(image.astype(int) - drawing.pixels).mean() for image in changed]
    assert 0 < np.median(differences) < 40
    assert max(differences) < 90


def test_the_last_layer_for_cls_alone(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    vision = models.llava(settings["llava"]).model.vision_tower.eval()
    pixels = image(192, 1.0)
    with torch.no_grad():
        encoder = tower.Clip(vision)
        hidden = encoder(pixels, torch.zeros(1, 2, dtype=torch.long))
        whole = vision(tower.normalized(pixels), output_hidden_states=True)
    torch.testing.assert_close(hidden, whole.hidden_states[-2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoder.summaries(hidden)[1], whole.pooler_output, rtol=1e-4, atol=1e-5)


def test_a_stopped_run_goes_on(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models, both halves: interrupted after two steps, and not."""
    for part in (train.train_encoder, train.train_language):
        for family in ("llava", "onevision"):
            part(settings, family, tmp_path / "whole")
    monkeypatch.setattr("recipes.running.SAVE_EVERY", 0.0)
    for part in (train.train_encoder, train.train_language):
        name = part.__name__.removeprefix("train_")
        for family in ("llava", "onevision"):
            short = copy.deepcopy(settings)
            with monkeypatch.context() as patch:
                patch.setattr(data.Images, "__len__", lambda _: 2)
                patch.setattr(train, "stages", lambda own: [data.Stage((64,), (3,), 6, lists=2)])
                part(short, family, tmp_path / "parts")
            part(settings, family, tmp_path / "parts")
            whole, parts = (
                load_file(tmp_path / run / f"{family}-{name}" / "checkpoint.safetensors") for run in ("whole", "parts")
            )
            assert whole.keys() == parts.keys()
            for key, tensor in whole.items():
                torch.testing.assert_close(parts[key], tensor, rtol=1e-3, atol=1e-5)


def test_a_log_has_one_line_a_step_counted_once(tmp_path: Path) -> None:
    from recipes.running import Run, Schedule

    layer = torch.nn.Linear(2, 1)
    run = Run(tmp_path, {"layer": layer}, Schedule(1e-2, 1, 100, 10, 100), 0.0)
    stage = data.Stage((1,), (1,), 100)
    batches = [{"x": torch.ones(1, 2)}] * 60
    run.stages([stage], lambda *_: batches, lambda _, batch: (layer(batch["x"]).square().mean(), {"one": 1.0}))
    assert run.step == 60
    again = Run(tmp_path, {"layer": torch.nn.Linear(2, 1)}, Schedule(1e-2, 1, 100, 10, 100), 0.0)
    assert again.step == 60
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [25, 50]
    assert all(line["one"] == 1 for line in lines)
