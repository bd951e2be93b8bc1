"""Positions of pruned prompts, against those that transformers' own model counts for the whole prompt."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers as tf
from tiny_models import qwen as qwen_models

from clustrs.serving import pruning

PROMPTS: dict[str, list[Any]] = {
    "no image": [7],
    "square": [3, (4, 4), 2],
    "tall": [3, (12, 3), 2],
    "wide": [3, (3, 12), 2],
    "no text before": [(5, 7), 2],
    "no text after": [4, (5, 7)],
    "two with a long prefix": [300, (12, 3), 1, (2, 9), 6],
    "three": [1, (2, 2), 2, (9, 4), 2, (4, 9), 1],
    "one token": [2, (1, 1), 2],
}
"""Runs of text by their length, images by their height and width in tokens."""
MODELS = {"qwen2_5_vl": tf.Qwen2_5_VLModel, "qwen3_vl": tf.Qwen3VLModel}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    words, family = tiny_models.tokenizer(), request.param
    config = qwen_models.CONFIGS[family](
        vision_config=qwen_models.vision_config(family),
        text_config=qwen_models.text_config(family, len(words)),
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
    )
    return MODELS[family](config)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("keep", [1, 5, 1000])
def test_positions_of_survivors(model: Any, prompt: str, keep: int) -> None:
    generator = torch.Generator().manual_seed(keep)
    placeholder, grids = model.config.image_token_id, []
    ids: list[int] = []
    kept: list[int] = []
    places: list[tuple[int, int, int]] = []
    offsets = []
    for part in PROMPTS[prompt]:
        if isinstance(part, int):
            kept += range(len(ids), len(ids) + part)
            offsets.append(torch.zeros(3, part, dtype=torch.long))
            ids += [60] * part
            continue
        height, width = part
        cells = torch.randperm(height * width, generator=generator)[:keep].sort().values
        places.append((len(kept), len(cells), max(height, width)))
        given = torch.stack([torch.zeros_like(cells), cells // width, cells % width])
        offsets.append(pruning.split_channels([pruning.offset_channels(given, torch.bfloat16)])[1])
        kept += (len(ids) + cells).tolist()
        ids += [placeholder] * (height * width)
        grids.append((1, 2 * height, 2 * width))
    tokens = torch.tensor([ids])
    types = (tokens == placeholder).int()
    sizes = torch.tensor(grids) if grids else None
    whole, delta = model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=sizes)
    positions, added = pruning.starting_positions(len(kept), places)
    assert torch.equal(positions + torch.cat(offsets, 1), whole[:, 0, kept])
    assert added == int(delta) + len(ids) - len(kept)


@pytest.mark.parametrize("keep", [1, 5, 1000])
def test_positions_of_survivors_in_one_row(keep: int) -> None:
    """LLaVA: what is left of 0, 1, 2 ... where all but some tokens of two images are gone, in three equal rows."""
    generator, images = torch.Generator().manual_seed(keep), [(4, 24), (31, 9)]
    survive = [torch.randperm(total, generator=generator)[:keep].sort().values for _, total in images]
    gone: set[int] = set()
    for (start, total), kept in zip(images, survive, strict=True):
        gone |= {start + slot for slot in range(total)} - {start + slot for slot in kept.tolist()}
    expected = torch.tensor([place for place in range(45) if place not in gone])
    starts = [int((expected < start).sum()) for start, _ in images]
    places = [(start, len(kept), total) for start, kept, (_, total) in zip(starts, survive, images, strict=True)]
    positions, added = pruning.starting_positions(len(expected), places)
    for start, kept in zip(starts, survive, strict=True):
        positions[:, start : start + len(kept)] += kept
    assert torch.equal(positions, expected.expand(3, -1))
    assert added == len(gone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_channels_are_exact(dtype: torch.dtype) -> None:
    y = torch.arange(2**16)
    offsets = torch.stack([torch.zeros_like(y), y, y.flip(0)])
    channels = pruning.offset_channels(offsets, dtype)
    assert channels.dtype == dtype
    assert channels.shape == (2**16, pruning.CHANNELS)
    assert torch.equal(pruning.split_channels([channels])[1], offsets)
    batch = pruning.offset_channels(offsets.unflatten(1, (2, -1)), dtype)
    assert torch.equal(batch.flatten(0, 1), channels)


def test_channels_come_off_again() -> None:
    offsets = torch.tensor([[0, 0, 0], [300, 2, 0], [1, 511, 0]])
    features = torch.arange(12.0).view(3, 4)
    rows = torch.cat([features, pruning.offset_channels(offsets, torch.float32)], 1)
    images, found = pruning.split_channels([rows[:2], rows[2:]])
    assert [len(image) for image in images] == [2, 1]
    assert torch.equal(torch.cat(images), features)
    assert torch.equal(found, offsets)
