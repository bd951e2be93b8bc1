"""One question about one image: load a model, open the image, ask, and say where the time went."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from clustrs.models.clock import now, timing
from clustrs.models.prompts import chat_prompt
from clustrs.models.vocabulary import unknown_words
from clustrs.pruners import Pruner
from clustrs.validation import Crops, Positions, PromptTemplate, Scope

if TYPE_CHECKING:
    from clustrs.models.attach import ImageSelection


@dataclass(frozen=True)
class Seconds:
    """Wall seconds of one answer. `prefill` and `decode` are the language model's; `decode` is its sum over tokens.

    `decode_per_token` is None when a single token was made, which is the prefill's work.
    """

    vision: float
    scoring: float
    selection: float
    prefill: float
    decode: float
    decode_per_token: float | None


@dataclass(frozen=True)
class Answer:
    """Answer of a model, the visual tokens it would have read and did read, and how long it took.

    `unknown_words` are those of the question that a word-level tokenizer does not have: the model was not asked them.
    """

    text: str
    unpruned_tokens: int
    visual_tokens: int
    new_tokens: int
    seconds: Seconds
    image: "ImageSelection"
    unknown_words: tuple[str, ...] = ()


def as_seen(processor: Any, image: Image.Image) -> Image.Image:
    """The part of an image that the base crop shows: processors pad it to a square, or cut a square out."""
    how = processor.image_processor
    tiled = ("crop_to_patches", "do_image_splitting")  # the whole image, squeezed into one tile
    if getattr(how, "image_grid_pinpoints", None) or any(hasattr(how, name) for name in tiled):
        return image
    width, height = image.size
    if getattr(how, "do_pad", False):
        width = height = max(image.size)
    edge = dict(how.size or {}).get("shortest_edge") if getattr(how, "do_resize", False) else None
    if edge and getattr(how, "do_center_crop", False):
        scale = min(width, height) / edge
        width, height = round(how.crop_size["width"] * scale), round(how.crop_size["height"] * scale)
    left, top = int((image.width - width) / 2), int((image.height - height) / 2)  # towards 0, as processors pad
    return image.crop((left, top, left + width, top + height))


def ask(
    model: Any,
    processor: Any,
    image: Image.Image,
    question: str,
    method: Pruner,
    max_new_tokens: int = 64,
    *,
    scope: Scope = "image",
    crops: Crops = "all",
    positions: Positions = "compact",
    prompt_template: PromptTemplate = "checkpoint",
) -> Answer:
    """Let a model answer a question about an image, greedily, with the visual tokens that `method` leaves it."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: give an integer of at least 1")
    text = chat_prompt(processor, question, prompt_template)
    inputs = processor(images=[image], text=[text], return_tensors="pt").to(model.device, model.dtype)
    with (
        method(model, scope=scope, crops=crops, positions=positions) as handle,
        call_seconds(model.get_decoder()) as calls,
        timing(),
        torch.inference_mode(),
    ):
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    result = handle.last[0]
    prefill, *steps = calls
    seconds = Seconds(
        vision=handle.seconds["vision"],
        scoring=handle.seconds["scoring"],
        selection=handle.seconds["selection"],
        prefill=prefill,
        decode=sum(steps),
        decode_per_token=sum(steps) / len(steps) if steps else None,
    )
    answer = processor.decode(new, skip_special_tokens=True).strip()
    unknown = tuple(unknown_words(processor, question))
    return Answer(answer, result.placeholders, result.kept, len(new), seconds, result, unknown)


@contextmanager
def call_seconds(module: nn.Module) -> Iterator[list[float]]:
    """Collects the wall seconds of every call of a module; the device is waited for before and after."""
    seconds: list[float] = []

    device = next(module.parameters()).device

    def before(*_: Any) -> None:
        seconds.append(now(device))

    def after(*_: Any) -> None:
        seconds[-1] = now(device) - seconds[-1]

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()
