"""One question about one picture: load a model, open the picture, ask, and say where the time went."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import nn

from clustrs.embedded import MODELS, model_folder
from clustrs.pruners import Pruner

if TYPE_CHECKING:
    from clustrs.vlm.attach import PictureSelection

PLAIN_PROMPT = "USER: {image}\n{question} ASSISTANT:"
"""For processors without a chat template: how LLaVA-1.5 was trained."""


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
    """What the model said, how many visual tokens it would have read and did read, and how long it took."""

    text: str
    unpruned_tokens: int
    visual_tokens: int
    new_tokens: int
    seconds: Seconds
    picture: "PictureSelection"


def load(model_id: str) -> tuple[Any, Any]:
    """A model and its processor: an embedded one, or from a folder or the Hugging Face hub. Float32 on a CPU, its own
    type elsewhere."""
    from transformers import AutoModelForImageTextToText

    from clustrs.vlm.processors import load_processor

    expanded = model_folder(model_id) if model_id in MODELS else Path(model_id).expanduser()
    if not expanded.exists() and (model_id.startswith((".", "/", "~")) or model_id.count("/") > 1):
        raise ValueError(f"model {model_id!r}: there is no such folder")
    source = str(expanded) if expanded.exists() else model_id
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        processor = load_processor(source)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            source, dtype=torch.float32 if accelerator is None else "auto"
        )
    except Exception as error:  # transformers, safetensors and the hub raise many kinds
        advice = "give a folder that save_pretrained wrote (model and processor), or an id of the Hugging Face hub"
        raise ValueError(f"model {model_id!r} could not be loaded: {_first_sentence(error)}; {advice}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"model {model_id!r} has no image processor, only a {type(processor).__name__}")
    return model.to(accelerator or "cpu").eval(), processor


def _first_sentence(error: Exception) -> str:
    """The start of a long message, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().split(". ")[0].rstrip(".:")


def open_picture(path: str | os.PathLike[str]) -> Image.Image:
    """The picture in a file, upright and in RGB. A ValueError says what is wrong with a file that has none."""
    if not Path(path).is_file():
        raise ValueError(f"picture {str(path)!r}: {'not a file' if Path(path).exists() else 'there is no such file'}")
    try:
        with Image.open(path) as file:
            file.load()
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I;16"):  # Pillow would cut off the values above 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError("it has 32-bit pixels, give 8 or 16 bits")
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(f"picture {str(path)!r}: not a picture in any format that Pillow reads") from None
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"picture {str(path)!r}: too large, more than {limit} pixels") from None
    except Exception as error:  # damaged files make the decoders raise many kinds
        raise ValueError(f"picture {str(path)!r} could not be read: {_first_sentence(error)}") from error


def as_seen(processor: Any, image: Image.Image) -> Image.Image:
    """The part of a picture that the base crop shows: processors pad it to a square, or cut a square out."""
    how = processor.image_processor
    if getattr(how, "image_grid_pinpoints", None):
        return image
    width, height = image.size
    if getattr(how, "do_pad", False):
        width = height = max(image.size)
    edge = dict(how.size).get("shortest_edge") if getattr(how, "do_resize", False) else None
    if edge and getattr(how, "do_center_crop", False):
        scale = min(width, height) / edge
        width, height = round(how.crop_size["width"] * scale), round(how.crop_size["height"] * scale)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def ask(
    model: Any,
    processor: Any,
    image: Image.Image,
    question: str,
    method: Pruner,
    max_new_tokens: int = 64,
    *,
    scope: str = "image",
    crops: str = "all",
    positions: str = "compact",
) -> Answer:
    """Let a model answer a question about a picture, greedily, with the visual tokens that `method` leaves it."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: give an integer of at least 1")
    text = prompt(processor, question)
    inputs = processor(images=[image], text=[text], return_tensors="pt").to(model.device, model.dtype)
    inner = getattr(model, "model", model)
    with (
        method(model, scope=scope, crops=crops, positions=positions) as handle,
        call_seconds(inner.language_model) as calls,
        torch.inference_mode(),
    ):
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    picture = handle.last[0]
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
    return Answer(answer, picture.placeholders, picture.kept, len(new), seconds, picture)


def prompt(processor: Any, question: str) -> str:
    """The question with one picture before it, in the words that the model was trained on."""
    if not question.strip():
        raise ValueError("the question is empty: give some words")
    placeholder = processor.image_token
    if placeholder in question:
        raise ValueError(f"the question has {placeholder!r} in it, which stands for a picture: leave it out")
    if not getattr(processor, "chat_template", None):
        return PLAIN_PROMPT.format(image=placeholder, question=question)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))


@contextmanager
def call_seconds(module: nn.Module) -> Iterator[list[float]]:
    """Collects the wall seconds of every call of a module; the device is waited for before and after."""
    seconds: list[float] = []

    def now() -> float:
        if next(module.parameters()).device.type != "cpu":
            torch.accelerator.synchronize()
        return perf_counter()

    def before(*_: Any) -> None:
        seconds.append(now())

    def after(*_: Any) -> None:
        seconds[-1] = now() - seconds[-1]

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()
