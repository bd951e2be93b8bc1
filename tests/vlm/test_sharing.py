"""Pictures encoded once for several prompts and methods: the same answers as one by one."""

from typing import Any

import pytest
import tiny_models
import torch

from clustrs import ClustRS, NoPruning, Pruner, VisionZip
from clustrs.vlm import asking, sharing

METHODS = [NoPruning(), ClustRS(keep=5), VisionZip(keep=4)]
CASES = [("llava", "clip"), ("llava_next", "clip"), ("llava_onevision", "siglip")]


@pytest.mark.parametrize(("family", "tower"), CASES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_as_one_by_one(load: Any, family: str, tower: str, method: Pruner) -> None:
    model, processor = load(family, tower)
    pictures = [tiny_models.picture(40, 60, seed) for seed in (1, 2, 3)]
    words = [(0, "What is this?"), (2, "How many?"), (0, "Why so many of them?"), (1, "Who?"), (2, "What?")]
    prompts = [(number, asking.prompt(processor, question)) for number, question in words]
    batch = sharing.encode(model, processor, pictures, prompts)
    assert batch.pictures[0] is batch.pictures[2]
    assert batch.pictures[1] is batch.pictures[4]
    assert len({id(picture) for picture in batch.pictures}) == 3
    replies = sharing.reply(model, processor, batch, method, 6)
    for (number, question), reply in zip(words, replies, strict=True):
        alone = asking.ask(model, processor, pictures[number], question, method, 6)
        assert reply.text == alone.text
        assert torch.equal(reply.picture.selection.indices, alone.picture.selection.indices)
        assert reply.picture.kept == alone.picture.kept
        assert reply.picture.placeholders == alone.picture.placeholders


def test_one_prompt_of_a_batch(load: Any) -> None:
    model, processor = load()
    pictures = [tiny_models.picture(40, 60, seed) for seed in (1, 2)]
    prompts = [(0, asking.prompt(processor, "A?")), (1, asking.prompt(processor, "A much longer question?"))]
    batch = sharing.encode(model, processor, pictures, prompts)
    together = sharing.reply(model, processor, batch, ClustRS(keep=5), 6)
    for row, expected in enumerate(together):
        (alone,) = sharing.reply(model, processor, sharing.part(batch, row), ClustRS(keep=5), 6)
        assert alone.text == expected.text


def test_base_crops_alone(load: Any) -> None:
    model, processor = load("llava_next", "clip")
    prompts = [(0, asking.prompt(processor, "What?"))]
    picture = tiny_models.picture(40, 60)
    batch = sharing.encode(model, processor, [picture], prompts, crops="base")
    (reply,) = sharing.reply(model, processor, batch, ClustRS(keep=5), 4, crops="base")
    alone = asking.ask(model, processor, picture, "What?", ClustRS(keep=5), 4, crops="base")
    assert reply.text == alone.text
    assert reply.picture.grids == alone.picture.grids
    assert len(reply.picture.grids) == 1


def test_the_model_is_left_as_it_was(load: Any) -> None:
    model, processor = load()
    batch = sharing.encode(model, processor, [tiny_models.picture()], [(0, asking.prompt(processor, "What?"))])
    before = set(model.__dict__), set(model.model.__dict__)
    sharing.reply(model, processor, batch, ClustRS(keep=5), 2)
    assert (set(model.__dict__), set(model.model.__dict__)) == before
