"""Answer prompts with any number of images by a loaded and pruned model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from clustrs.corruptions import Corruption
from clustrs.corruptions.images import check_size, open_image, to_rgb
from clustrs.integrations.lmms_eval.arguments import ModelArguments
from clustrs.models.ask import messages_prompt
from clustrs.models.load import apply_image_padding, load_model
from clustrs.validation import PromptTemplate

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """Prompt of a model: text with a placeholder for each image, and the images."""

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
            raise ValueError(f"image_id must be a field of the document ({fields}), got {self.image_id!r}")
        value = document[self.image_id]
        names = value if isinstance(value, list) else [value]
        if len(names) == 1 < len(images):
            names = [f"{names[0]}#{number}" for number in range(len(images))]
        if len(names) != len(images) or not all(isinstance(name, str | int) for name in names):
            raise ValueError(
                f"image_id must be a field with a name for each of {len(images)} images, got {self.image_id!r}"
            )
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
    """Identify an image without a name by its size and its pixels."""
    content = f"{image.width}x{image.height}:".encode() + image.tobytes()
    return hashlib.sha256(content).hexdigest()


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Messages as chat templates take them, without the images themselves; only images and text are understood."""
    plain: Messages = []
    for message in messages:
        content = []
        for part in message["content"]:
            if part["type"] not in ("image", "text"):
                raise ValueError(f"{part['type']} is not supported (only images and text are)")
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


MAX_NEW_TOKENS = 1024
"""Default where a task sets none, as LLaVA-1.5 is evaluated."""
PASSED_ON = ("max_new_tokens", "temperature", "do_sample", "top_p", "top_k", "num_beams", "repetition_penalty")
"""Entries of a task's generation_kwargs that are passed to `generate`."""
SAMPLING = ("temperature", "top_p", "top_k")
NO_CONCERN = ("image_aspect_ratio",)
"""Settings of other models that stand in tasks' generation_kwargs and change nothing here."""
STOPS = ("until", "stop_sequences")
PARAGRAPH = "\n\n"
"""Stop that lmms-eval adds to `until` when a task has none; like its own models, this one ignores it."""


@dataclass(frozen=True)
class VisualCount:
    """Visual tokens of a prompt's images, before and after pruning."""

    unpruned: int
    kept: int


@dataclass(frozen=True)
class Generated:
    """An answer, with the tokens of the pruned prompt and of the answer."""

    text: str
    input_tokens: int
    output_tokens: int
    visual: VisualCount


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood per token of a continuation, and whether greedy decoding produces it."""

    loss: float
    greedy: bool
    visual: VisualCount


class Engine:
    """The model, its processor, and the method that is attached to it until `close`."""

    def __init__(self, arguments: ModelArguments) -> None:
        self.model, processor = load_model(arguments.pretrained, arguments.load_options())
        self.processor = apply_image_padding(processor, arguments.image_padding)
        self.builder = PromptBuilder(
            self.processor, arguments.prompt_template, arguments.corrupt, arguments.seed, arguments.image_id
        )
        self.handle = arguments.method(self.model, **arguments.attach_options())

    def close(self) -> None:
        """Put the model back as it was, so that it can be freed."""
        self.handle.remove()

    def generate(self, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> list[Generated]:
        """Answers to prompts that all have images, or all have none, with a task's generation_kwargs."""
        options, stops = read_generation(settings)
        inputs = self._inputs([prompt.text for prompt in prompts], prompts, "left")
        with torch.inference_mode():
            output = self.model.generate(**inputs, **options)
        new = output[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(new, skip_special_tokens=True)
        visuals = self._visuals(prompts)
        lengths = inputs["attention_mask"].sum(1).tolist()
        return [
            Generated(
                cut(text, stops).strip(),
                length - visual.unpruned + visual.kept,
                self._answer_length(row),
                visual,
            )
            for text, length, row, visual in zip(texts, lengths, new, visuals, strict=True)
        ]

    def likelihoods(self, prompts: Sequence[Prompt], continuations: Sequence[str]) -> list[Likelihood]:
        """Score each continuation of its prompt. The prompts all have images, or all have none."""
        wholes = [continued(prompt.text, text) for prompt, text in zip(prompts, continuations, strict=True)]
        inputs = self._inputs(wholes, prompts, "right")
        lengths = inputs["attention_mask"].sum(1).tolist()
        with torch.inference_mode():
            logits = self.model(**inputs).logits
        results = []
        for row, visual in enumerate(self._visuals(prompts)):
            targets = self._new_tokens(prompts[row].text, wholes[row])
            if inputs["input_ids"][row, : lengths[row]].tolist()[-len(targets) :] != targets:
                kind = type(self.processor).__name__
                raise ValueError(f"continuation {continuations[row]!r}: {kind} writes something after it")
            last = lengths[row] - visual.unpruned + visual.kept - 1
            fitted = fit(logits[row, last - len(targets) : last], torch.tensor(targets, device=logits.device))
            results.append(Likelihood(*fitted, visual))
        return results

    def _new_tokens(self, prompt: str, whole: str) -> list[int]:
        """The tokens that a continuation adds to a prompt."""
        before, after = (self.processor.tokenizer(text)["input_ids"] for text in (prompt, whole))
        if len(after) <= len(before):
            raise ValueError(f"continuation {whole[len(prompt) :]!r}: it has no tokens of its own")
        return list(after[len(before) :])

    def _inputs(self, texts: Sequence[str], prompts: Sequence[Prompt], padding_side: str) -> Any:
        """Texts and images as the model takes them."""
        images = [list(prompt.images) for prompt in prompts]
        pixels = {"images": images} if any(images) else {}
        self.processor.tokenizer.padding_side = padding_side
        inputs = self.processor(text=list(texts), **pixels, padding=True, return_tensors="pt")
        return inputs.to(self.model.device, self.model.dtype)

    def _visuals(self, prompts: Sequence[Prompt]) -> list[VisualCount]:
        """Count the tokens that the last call kept of each prompt's images."""
        left = list(self.handle.last) if any(prompt.images for prompt in prompts) else []
        counts = []
        for prompt in prompts:
            own, left = left[: len(prompt.images)], left[len(prompt.images) :]
            counts.append(VisualCount(sum(one.placeholders for one in own), sum(one.kept for one in own)))
        return counts

    def _answer_length(self, row: Tensor) -> int:
        """The tokens of an answer up to its end, which is counted; padding is not."""
        ends = self.model.generation_config.eos_token_id
        found = torch.isin(row, torch.tensor(ends, device=row.device)).nonzero() if ends is not None else row[:0]
        return int(found[0]) + 1 if len(found) else len(row)


def read_generation(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a task's generation_kwargs into arguments of `generate` and stop strings."""
    unknown = [name for name in settings if name not in (*PASSED_ON, *STOPS, *NO_CONCERN)]
    if unknown:
        raise ValueError(
            f"unknown generation_kwargs entry {unknown[0]}={settings[unknown[0]]!r} (accepted: {PASSED_ON})"
        )
    options = {name: settings[name] for name in PASSED_ON if settings.get(name) is not None}
    options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    sampled = bool(options.get("do_sample", options.get("temperature", 0) > 0)) and options.get("temperature", 1) > 0
    options = {name: value for name, value in options.items() if sampled or name not in SAMPLING}
    stops: list[str] = []
    for name in STOPS:
        given = settings.get(name) or []
        stops += [given] if isinstance(given, str) else list(given)
    return {**options, "do_sample": sampled}, [stop for stop in stops if stop and stop != PARAGRAPH]


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of some stops."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def continued(prompt: str, continuation: str) -> str:
    """A prompt and its continuation: a space between them, unless the prompt ends with one or with a new line."""
    return prompt + ("" if prompt[-1:].isspace() else " ") + continuation.strip()


def fit(logits: Tensor, targets: Tensor) -> tuple[float, bool]:
    """The mean negative log-likelihood of tokens [n] under logits [n, V], and whether each is the most likely one."""
    loss = torch.nn.functional.cross_entropy(logits.float(), targets)
    return float(loss), bool((logits.argmax(-1) == targets).all())


class Tally:
    """Sums over the questions of each task."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}

    def add(self, task: str, visual: VisualCount) -> None:
        """Count a question."""
        sums = self._sums.setdefault(task, [0, 0, 0])
        for i, value in enumerate((1, visual.unpruned, visual.kept)):
            sums[i] += value

    def to_json(self) -> dict[str, Any]:
        """The means per question, by task."""
        return {
            task: {"questions": count, "unpruned_tokens": unpruned / count, "visual_tokens": kept / count}
            for task, (count, unpruned, kept) in self._sums.items()
        }
