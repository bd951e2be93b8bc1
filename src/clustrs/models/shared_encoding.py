"""Encode images once and prune them with several methods: the tower is most of the cost of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from clustrs.models.adapters.base import VisualTokens, get_adapter
from clustrs.models.scoring import StageTimer
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner
from clustrs.validation import Crops

ALONG = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Batch:
    """Prompts with one image each; prompts about the same image share its `VisualTokens`.

    `along` has further per-token arguments: token types, for the families that have some.
    """

    input_ids: Tensor
    attention_mask: Tensor
    images: list[VisualTokens]
    along: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Answer to one prompt, and the tokens kept of its image."""

    text: str
    image: ImageSelection


def encode(
    model: Any, processor: Any, images: Sequence[Image.Image], prompts: Sequence[tuple[int, str]], crops: Crops = "all"
) -> Batch:
    """Run the vision tower over `images`. A prompt is the index of its image and the text, with a placeholder."""
    adapter = get_adapter(model)
    inputs = processor(
        images=adapter.batch_images([images[index] for index, _ in prompts]),
        text=[text for _, text in prompts],
        padding=True,
        return_tensors="pt",
    ).to(model.device, model.dtype)
    first = {index: row for row, (index, _) in reversed(list(enumerate(prompts)))}
    rows = sorted(first.values())
    with torch.inference_mode():
        encoded = adapter.encode(adapter.take_images(dict(inputs), rows), StageTimer(model.device), crops)
    by_row = dict(zip(rows, encoded, strict=True))
    shared = [by_row[first[index]] for index, _ in prompts]
    along = {name: inputs[name] for name in ALONG if name in inputs}
    return Batch(inputs["input_ids"], inputs["attention_mask"], shared, along)


def reply(model: Any, processor: Any, batch: Batch, method: Pruner, max_new_tokens: int, **options: Any) -> list[Reply]:
    """Greedy answers to all prompts of a batch, with the tokens that `method` leaves. Options are those of `attach`."""
    with method(model, **options) as handle, torch.inference_mode():
        output = handle.generate(
            batch.images,
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            **batch.along,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        selections = handle.last
    new = output[:, batch.input_ids.shape[1] :]
    texts = processor.batch_decode(new, skip_special_tokens=True)
    return [Reply(text.strip(), image) for text, image in zip(texts, selections, strict=True)]


def part(batch: Batch, row: int) -> Batch:
    """One prompt of a batch alone, without its padding."""
    real = batch.attention_mask[row].bool()
    ids = batch.input_ids[row][real][None]
    along = {name: part[row][real][None] for name, part in batch.along.items()}
    return Batch(ids, torch.ones_like(ids), [batch.images[row]], along)
