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
    spans: list[pruning.ImageSpan] = []
    offsets = []
    for part in PROMPTS[prompt]:
        if isinstance(part, int):
            kept += range(len(ids), len(ids) + part)
            offsets.append(torch.zeros(3, part, dtype=torch.long))
            ids += [60] * part
            continue
        height, width = part
        cells = torch.randperm(height * width, generator=generator)[:keep].sort().values
        spans.append(pruning.ImageSpan(len(kept), len(cells), height, width))
        channels = pruning.cell_channels(cells // width, cells % width, torch.bfloat16)
        offsets.append(pruning.position_offsets(channels))
        kept += (len(ids) + cells).tolist()
        ids += [placeholder] * (height * width)
        grids.append((1, 2 * height, 2 * width))
    tokens = torch.tensor([ids])
    types = (tokens == placeholder).int()
    sizes = torch.tensor(grids) if grids else None
    whole, delta = model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=sizes)
    positions, added = pruning.starting_positions(len(kept), spans)
    assert torch.equal(positions + torch.cat(offsets, 1), whole[:, 0, kept])
    assert added == int(delta) + len(ids) - len(kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_channels_are_exact(dtype: torch.dtype) -> None:
    y = torch.arange(2**16)
    channels = pruning.cell_channels(y, y.flip(0), dtype)
    assert channels.dtype == dtype
    assert channels.shape == (2**16, pruning.CHANNELS)
    assert torch.equal(pruning.position_offsets(channels), torch.stack([torch.zeros_like(y), y, y.flip(0)]))


def test_channels_come_off_again() -> None:
    y, x = torch.tensor([300, 2, 0]), torch.tensor([1, 511, 0])
    features = torch.arange(12.0).view(3, 4)
    rows = torch.cat([features, pruning.cell_channels(y, x, torch.float32)], 1)
    images, offsets = pruning.split_channels([rows[:2], rows[2:]])
    assert [len(image) for image in images] == [2, 1]
    assert torch.equal(torch.cat(images), features)
    assert offsets.tolist() == [[0, 0, 0], [300, 2, 0], [1, 511, 0]]
