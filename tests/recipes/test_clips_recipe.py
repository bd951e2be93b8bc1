"""The recipe for clips: training sees what inference sees, and only what may be trained changes."""

import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clustrs.models.ask import chat_prompt, prepare
from clustrs.models.load import load_model
from clustrs_models.clips import DIRECTIONS, MOST, draw, every, sample
from clustrs_models.drawing import SHAPES
from clustrs_models.photographs import generator_for
from recipes import clips, data, models, tower, train


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads(train.SETTINGS.read_text())


def test_training_sees_what_inference_sees(settings: dict[str, Any]) -> None:
    model = clips.build(settings).eval()
    processor = clips.make_processor(settings)
    generator = generator_for(3)
    clip = sample(generator, 8)
    frames, asked = draw(clip, generator), every(clip) + clips.hints(clip)[:2]
    words = clips.vocabulary()
    blocks = {key: torch.from_numpy(value)[None] for key, value in data.blocks(asked, words, clips.NAMES).items()}
    asker = clips.Asking(model, tower.Siglip(model.model.vision_tower), words)
    with torch.no_grad():
        logits = asker({"pixels": torch.from_numpy(np.stack(frames))[None], **blocks})
    images = [Image.fromarray(frame) for frame in frames]
    for number, question in enumerate(asked):
        text = chat_prompt(processor, question.text, images=len(images)) + " " + question.answer
        inputs = prepare(model, processor, images, text)
        assert words["<unk>"] not in inputs["input_ids"]
        with torch.no_grad():
            expected = model(**inputs).logits[0, -2:]
        torch.testing.assert_close(logits[2 * number : 2 * number + 2], expected, rtol=1e-3, atol=1e-4)
    assert len(logits) == 2 * len(asked)


def test_the_tower_is_mini_onevisions_and_stays(settings: dict[str, Any]) -> None:
    model, old = clips.build(settings), load_model("mini-onevision")[0]
    ours, theirs = model.model.vision_tower.state_dict(), old.model.vision_tower.state_dict()
    for name, tensor in ours.items():
        if not name.endswith("position_embedding.weight"):
            assert torch.equal(tensor, theirs[name]), name
    assert not any(parameter.requires_grad for parameter in model.model.vision_tower.parameters())
    known = len(models.vocabulary())
    assert torch.equal(model.lm_head.weight[:known], old.lm_head.weight)
    step = clips.Clips(settings, 0, train.stages(settings["clips"]["language"])[0], clips.vocabulary())
    assert torch.equal(step[3]["pixels"], step[3]["pixels"])
    assert step[2]["pixels"].shape == (4, 8, 56, 56, 3)


def test_traces_say_what_the_frames_so_far_show() -> None:
    generator = generator_for(4)
    for _ in range(30):
        clip = sample(generator, 16)
        labels = clips.traces(clip)
        for frame in range(clip.length):
            there = [number for number, one in enumerate(clip.passing) if frame in one.frames]
            assert set(labels["order"][frame]) <= {data.IGNORED, *there}
            moving = [clip.passing[n].direction for n in there if frame > clip.passing[n].frames.start]
            ways = {list(DIRECTIONS).index(direction) for direction in moving}
            assert set(labels["way"][frame]) <= {data.IGNORED, *ways}
            late = {int(clip.changed)} if frame >= clip.until else set()
            assert set(labels["swap"][frame]) - {data.IGNORED} == late
        assert {n for n in set(labels["order"].flatten()) if n >= 0} == set(range(len(clip.passing)))
        assert labels["begins"][:, -1].sum() == len(clip.passing)
        assert labels["number"][:, -1].tolist() == labels["begins"][:, -1].cumsum().tolist()
        assert set(labels["begins"][:, :-1].flatten()) == set(labels["number"][:, :-1].flatten()) == {data.IGNORED}


def test_questions_point_at_the_object_of_their_answer(settings: dict[str, Any]) -> None:
    generator = generator_for(6)
    for _ in range(20):
        clip = sample(generator, 8)
        things = {number: one.thing for number, one in enumerate(clip.passing)}
        things |= {MOST: clip.standing, MOST + 1: clip.after}
        for question in every(clip) + clips.hints(clip):
            number = clips.subject(clip, question.text)
            if question.kind == "passing":
                assert number == data.IGNORED
            elif "colour" in question.text or "shape" in question.text:
                assert question.answer in (things[number].color, things[number].shape)
            elif "direction" in question.text:
                assert question.answer == clip.passing[number].direction
    words = clips.vocabulary()
    batch = clips.Clips(settings, 0, data.Stage((8,), (2,), 1), words)[0]
    answers = batch["kinds"] >= 0
    asked = batch["kinds"] == clips.NAMES.index("direction")
    assert (batch["about"] != data.IGNORED).eq(answers & (batch["kinds"] != clips.NAMES.index("passing"))).all()
    ends = (batch["named"] != data.IGNORED).nonzero()
    assert len(ends) == asked.sum() > 0
    for row, place in ends.tolist():
        assert batch["ids"][row, place + 1] == words["move"]
        assert int(batch["ids"][row, place]) in {words[shape] for shape in SHAPES}
    model = clips.build(settings)
    asker = clips.Asking(model, tower.Siglip(model.model.vision_tower), words)
    total, report = clips.loss(asker, batch, traced=True)
    total.backward()
    assert set(clips.TRACES) | set(clips.POINTING) <= set(report)
    for layer, name in ((3, "named"), (4, "about")):
        assert 0 < report[name] < 1
        assert model.model.language_model.layers[layer].self_attn.q_proj.weight.grad.abs().sum() > 0
