"""Encode images once, then let any number of methods prune them: the tower is most of the cost of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from clustrs.models.attach import ImageSelection
from clustrs.models.candidates import Candidates, Clock, opener
from clustrs.pruners import Pruner

PER_IMAGE = ("pixel_values", "image_sizes", "batch_num_images")


@dataclass(frozen=True)
class Batch:
    """Prompts with one image each; prompts about the same image share its `Candidates`."""

    input_ids: Tensor
    attention_mask: Tensor
    images: list[Candidates]


@dataclass(frozen=True)
class Reply:
    """What the model said to one prompt, and what was kept of its image."""

    text: str
    image: ImageSelection


def encode(
    model: Any, processor: Any, images: Sequence[Image.Image], prompts: Sequence[tuple[int, str]], crops: str = "all"
) -> Batch:
    """Run the vision tower over `images`. A prompt is the number of its image and the text, with a placeholder."""
    shown = [images[number] for number, _ in prompts]
    one_each = model.config.model_type == "llava_onevision"
    inputs = processor(
        images=[[image] for image in shown] if one_each else shown,
        text=[text for _, text in prompts],
        padding=True,
        return_tensors="pt",
    ).to(model.device, model.dtype)
    first = {number: place for place, (number, _) in reversed(list(enumerate(prompts)))}
    rows = torch.tensor(sorted(first.values()), device=model.device)
    arguments = {name: inputs[name][rows] for name in PER_IMAGE if name in inputs}
    with torch.inference_mode():
        encoded = opener(model.config.model_type, crops)(model.model, arguments, Clock(model.device))
    by_place = dict(zip(rows.tolist(), encoded, strict=True))
    each = [by_place[first[number]] for number, _ in prompts]
    return Batch(inputs["input_ids"], inputs["attention_mask"], each)


def reply(model: Any, processor: Any, batch: Batch, method: Pruner, max_new_tokens: int, **options: str) -> list[Reply]:
    """Greedy answers to all prompts of a batch, with the tokens that `method` leaves. Options are those of `attach`."""
    with method(model, **options) as handle, torch.inference_mode():
        handle.ready = batch.images
        output = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    new = output[:, batch.input_ids.shape[1] :]
    texts = processor.batch_decode(new, skip_special_tokens=True)
    return [Reply(text.strip(), image) for text, image in zip(texts, handle.last, strict=True)]


def part(batch: Batch, row: int) -> Batch:
    """One prompt of a batch alone, without its padding."""
    real = batch.attention_mask[row].bool()
    ids = batch.input_ids[row][real][None]
    return Batch(ids, torch.ones_like(ids), [batch.images[row]])
