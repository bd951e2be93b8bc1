"""Images encoded once for several prompts and methods: the same answers as one by one."""

from typing import Any

import pytest
import tiny_models
import torch

from clustrs import ClustRS, Config, HiPrune, NoPruning, Pruner, VisionZip, expand_methods
from clustrs.evaluation.runner import Unit, Worker
from clustrs.models import ask as sharing
from clustrs.models.ask import ask, chat_prompt
from clustrs.pruners.inputs import FURTHER

METHODS = [NoPruning(), ClustRS(keep=5), VisionZip(keep=4)]
CASES = [("llava", "clip"), ("llava_next", "clip"), ("llava_onevision", "siglip")]


@pytest.mark.parametrize(("family", "tower"), CASES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_as_one_by_one(load: Any, family: str, tower: str, method: Pruner) -> None:
    model, processor = load(family, tower)
    images = [tiny_models.make_image(40, 60, seed) for seed in (1, 2, 3)]
    words = [(0, "What is this?"), (2, "How many?"), (0, "Why so many of them?"), (1, "Who?"), (2, "What?")]
    prompts = [(number, chat_prompt(processor, question)) for number, question in words]
    batch = sharing.encode(model, processor, images, prompts)
    assert batch.images[0] is batch.images[2]
    assert batch.images[1] is batch.images[4]
    assert len({id(image) for image in batch.images}) == 3
    replies = sharing.reply(model, processor, batch, method, 6)
    for (number, question), reply in zip(words, replies, strict=True):
        alone = ask(model, processor, images[number], question, method, 6)
        assert reply.text == alone.text
        assert torch.equal(reply.image.selection.indices, alone.image.selection.indices)
        assert reply.image.kept == alone.image.kept
        assert reply.image.placeholders == alone.image.placeholders


def test_one_prompt_of_a_batch(load: Any) -> None:
    model, processor = load()
    images = [tiny_models.make_image(40, 60, seed) for seed in (1, 2)]
    prompts = [(0, chat_prompt(processor, "A?")), (1, chat_prompt(processor, "A much longer question?"))]
    batch = sharing.encode(model, processor, images, prompts)
    together = sharing.reply(model, processor, batch, ClustRS(keep=5), 6)
    for row, expected in enumerate(together):
        (alone,) = sharing.reply(model, processor, sharing.part(batch, row), ClustRS(keep=5), 6)
        assert alone.text == expected.text


@pytest.mark.parametrize(("family", "tower"), [("llava", "clip"), ("llava_onevision", "siglip")])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_clips_as_one_by_one(load: Any, family: str, tower: str, method: Pruner) -> None:
    """Prompts about clips of different lengths, two of them about the same one: one budget for the frames of each."""
    model, processor = load(family, tower)
    clips = [
        [tiny_models.make_image(40, 60, 10 * clip + frame) for frame in range(count)]
        for clip, count in ((1, 3), (2, 2))
    ]
    words = [(0, "What is this?"), (1, "How many?"), (0, "Why so many of them?")]
    prompts = [(number, chat_prompt(processor, question, images=len(clips[number]))) for number, question in words]
    batch = sharing.encode(model, processor, clips, prompts)
    assert batch.frames == (3, 2, 3)
    assert batch.images[:3] == batch.images[5:]
    replies = sharing.reply(model, processor, batch, method, 6)
    for row, ((number, question), reply) in enumerate(zip(words, replies, strict=True)):
        alone = ask(model, processor, clips[number], question, method, 6)
        (single,) = sharing.reply(model, processor, sharing.part(batch, row), method, 6)
        assert reply.text == single.text == alone.text
        assert sum(frame.kept for frame in reply.frames) == alone.visual_tokens
        for frame, other, expected in zip(reply.frames, single.frames, alone.frames, strict=True):
            assert torch.equal(frame.selection.indices, expected.selection.indices)
            assert torch.equal(other.selection.indices, expected.selection.indices)


def test_base_crops_alone(load: Any) -> None:
    model, processor = load("llava_next", "clip")
    prompts = [(0, chat_prompt(processor, "What?"))]
    image = tiny_models.make_image(40, 60)
    batch = sharing.encode(model, processor, [image], prompts, crops="base")
    (reply,) = sharing.reply(model, processor, batch, ClustRS(keep=5), 4, crops="base")
    alone = ask(model, processor, image, "What?", ClustRS(keep=5), 4, crops="base")
    assert reply.text == alone.text
    assert reply.image.grids == alone.image.grids
    assert len(reply.image.grids) == 1


def test_the_model_is_left_as_it_was(load: Any) -> None:
    model, processor = load()
    batch = sharing.encode(model, processor, [tiny_models.make_image()], [(0, chat_prompt(processor, "What?"))])
    before = set(model.__dict__), set(model.model.__dict__)
    sharing.reply(model, processor, batch, ClustRS(keep=5), 2)
    assert (set(model.__dict__), set(model.model.__dict__)) == before


def test_only_what_methods_need_is_recorded(load: Any) -> None:
    model, processor = load()
    images, prompts = [tiny_models.make_image()], [(0, chat_prompt(processor, "What?"))]
    few = HiPrune(keep=5).requirements()
    parts = [sharing.encode(model, processor, images, prompts, "all", records).images[0] for records in (few, FURTHER)]
    assert [sorted(part.more) for part in parts] == [sorted(few), sorted(FURTHER)]
    for name in few:
        assert torch.equal(parts[0].more[name], parts[1].more[name])
    assert torch.equal(parts[0].scores, parts[1].scores)


def test_eval_records_what_its_methods_need(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[set[str]] = []
    encode = sharing.encode

    def spy(*args: Any) -> Any:
        recorded.append(set(args[5]))
        return encode(*args)

    monkeypatch.setattr(sharing, "encode", spy)
    methods = expand_methods(["none", "hiprune"], [16])
    worker = Worker(Config(task="scenes", model="mini-llava", methods=methods, limit=1))
    answers = list(worker.run(Unit("clean", 0, (0,), (0, 1))))
    assert [records[0].error for records in answers] == [None, None]
    assert recorded == [{"received", "object_scores"}]
