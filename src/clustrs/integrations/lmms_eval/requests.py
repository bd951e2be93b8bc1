"""From the documents of a task to prompts: words, and images that are opened and corrupted."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from clustrs.corruptions import Corruption
from clustrs.corruptions.images import check_size, open_image, to_rgb
from clustrs.models.prompts import messages_prompt
from clustrs.options import PromptTemplate

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: the text with a placeholder for each image, and the images."""

    text: str
    images: tuple[Image.Image, ...]


@dataclass(frozen=True)
class PromptBuilder:
    """Makes prompts of messages, the same ones for every method and whatever else is in a batch."""

    processor: Any
    template: PromptTemplate
    corruption: Corruption | None
    seed: int
    image_id: str | None

    def build(self, messages: Sequence[Mapping[str, Any]], document: Mapping[str, Any], where: str) -> Prompt:
        """A prompt; `where` names the document in errors."""
        try:
            parts = [part for message in messages for part in message["content"]]
            opened = [open_visual(part["url"]) for part in parts if part["type"] == "image"]
            ids = self._ids(document, opened)
            images = [self._corrupted(image, name) for image, name in zip(opened, ids, strict=True)]
            placed = place_images(plain_messages(messages), self.processor.image_token)
            return Prompt(messages_prompt(self.processor, placed, self.template), tuple(images))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _corrupted(self, image: Image.Image, name: str) -> Image.Image:
        return image if self.corruption is None else self.corruption.apply(image, name, self.seed)

    def _ids(self, document: Mapping[str, Any], images: Sequence[Image.Image]) -> list[str]:
        """A name for each image. The corruption of an image depends on it: never on the method or on the batch."""
        if self.image_id is None:
            return [fingerprint(image) for image in images]
        if self.image_id not in document:
            fields = ", ".join(map(str, document))
            raise ValueError(f"image_id={self.image_id!r}: the document has no such field, give one of {fields}")
        value = document[self.image_id]
        names = value if isinstance(value, list) else [value]
        if len(names) == 1 < len(images):
            names = [f"{names[0]}#{number}" for number in range(len(images))]
        if len(names) != len(images) or not all(isinstance(name, str | int) for name in names):
            raise ValueError(f"image_id={self.image_id!r}: give a field with a name for each of {len(images)} images")
        return [str(name) for name in names]


def open_visual(visual: Any) -> Image.Image:
    """An image of a task, in RGB: one that is open already, or a file."""
    if isinstance(visual, str):
        return open_image(visual)
    if not isinstance(visual, Image.Image):
        raise ValueError(f"an image is a {type(visual).__name__}: a PIL image or the name of a file is expected")
    check_size("image", visual.size)
    return to_rgb(visual)


def fingerprint(image: Image.Image) -> str:
    """What an image is known by when it has no name: its size and its pixels."""
    content = f"{image.width}x{image.height}:".encode() + image.tobytes()
    return hashlib.sha256(content).hexdigest()


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Messages as chat templates take them, without the images themselves; only images and text are understood."""
    plain: Messages = []
    for message in messages:
        content = []
        for part in message["content"]:
            if part["type"] not in ("image", "text"):
                raise ValueError(f"there is {part['type']} in it: give a task of images and text")
            content.append({"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"})
        plain.append({"role": message["role"], "content": content})
    return plain


def place_images(messages: Messages, placeholder: str) -> Messages:
    """Put images where the text has placeholders for them, as some tasks write it; the text must have all or none."""
    marks = sum(part["text"].count(placeholder) for part in parts_of(messages, "text"))
    if not marks:
        return messages
    images = len(parts_of(messages, "image"))
    if marks != images:
        raise ValueError(f"the text has {marks} times {placeholder!r}, which stands for an image, and {images} images")
    return [{**message, "content": split_parts(message["content"], placeholder)} for message in messages]


def parts_of(messages: Messages, kind: str) -> list[dict[str, str]]:
    """The parts of a kind, in order."""
    return [part for message in messages for part in message["content"] if part["type"] == kind]


def split_parts(content: Sequence[Mapping[str, str]], placeholder: str) -> list[dict[str, str]]:
    """The text of a message, with images in the place of placeholders."""
    parts: list[dict[str, str]] = []
    for part in content:
        if part["type"] == "text":
            for number, text in enumerate(part["text"].split(placeholder)):
                parts += [{"type": "image"}] * bool(number)
                parts += [{"type": "text", "text": text.strip()}] * bool(text.strip())
    return parts


def user_turn(visuals: Sequence[Any] | None, text: str) -> Messages:
    """The messages of a task of the older form, which has a text and a list of images."""
    images = [{"type": "image", "url": visual} for visual in flat(visuals or [])]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def flat(visuals: Sequence[Any]) -> list[Any]:
    """Images that may stand in lists of lists."""
    return [one for visual in visuals for one in (flat(visual) if isinstance(visual, list | tuple) else [visual])]
