"""The settings of `--model_args`, and prompts with any number of images answered by the model that they describe."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from PIL import Image

from clustrs import __version__, validation
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import check_size, open_image, to_rgb
from clustrs.evaluation.config import CLEAN, LARGEST, convert, parse_corruption
from clustrs.models.ask import messages_prompt
from clustrs.models.load import apply_image_padding, load_model
from clustrs.pruners import Pruner, from_dict
from clustrs.pruners.registry import method_class, parse_method
from clustrs.validation import Attention, Crops, ImagePadding, LoadOptions, Positions, PromptTemplate, Scope

Messages = list[dict[str, Any]]
MAX_NEW_TOKENS = 1024  # where a task sets none, as LLaVA-1.5 is evaluated
PASSED_ON = ("max_new_tokens", "temperature", "do_sample", "top_p", "top_k", "num_beams", "repetition_penalty")
SAMPLING = ("temperature", "top_p", "top_k")
NO_CONCERN = ("image_aspect_ratio",)  # of other models: changes nothing here
STOPS = ("until", "stop_sequences")
PARAGRAPH = "\n\n"  # lmms-eval adds this stop when a task has none; like its own models, this one ignores it
DEFAULT_METHOD = "clustrs"


@dataclass(frozen=True, kw_only=True)
class ModelArguments(LoadOptions):
    """The settings of a model in lmms-eval. Those of `LoadOptions` say how it is loaded."""

    pretrained: str  # A folder, a Hugging Face id, or an embedded model
    method: Pruner
    corrupt: Corruption | None = None
    seed: int = 0  # of the corruption
    image_id: str | None = None  # the field of a task's documents that names their images; None: by their pixels
    batch_size: int = 1
    prompt_template: PromptTemplate = "checkpoint"
    image_padding: ImagePadding = "checkpoint"
    scope: Scope = "image"
    crops: Crops = "all"
    positions: Positions = "auto"
    attention: Attention = "auto"

    def to_json(self) -> dict[str, Any]:
        """Return all settings and the version of clustrs, as results store them."""
        return {
            "clustrs": __version__,
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in OPTIONAL},
            "method": self.method.to_dict(),
            "corrupt": CLEAN if self.corrupt is None else str(self.corrupt),
            **self.given(),
        }


OPTIONAL = {one.name for one in fields(LoadOptions)}
NAMES = {one.name for one in fields(ModelArguments)} | {"keep"}


def read_arguments(given: Mapping[str, Any]) -> ModelArguments:
    """Read model_args as lmms-eval splits them; a name that is not a setting is a parameter of the method (tau=2)."""
    values = {name: value for name, value in given.items() if value is not None}
    if "pretrained" not in values:
        raise ValueError("pretrained is missing (write pretrained=... with a folder, a Hugging Face id or mini-llava)")
    described = values.pop("method", DEFAULT_METHOD)
    what = f"the name of a method (for example {DEFAULT_METHOD})"
    validation.check(isinstance(described, str), "method", what, described)
    method = parse_method(described.strip("\"'"))
    known = {one.name: one.default for one in fields(method_class(method["name"]))}
    hints = get_type_hints(ModelArguments)
    settings = {}
    for name, value in values.items():
        if name in hints:
            settings[name] = read_value(name, value, hints[name])
        elif name in known:
            method[name] = validation.key_value(f"{name}={value}", "")[1] if isinstance(value, str) else value
        else:
            own = [one for one in known if one not in NAMES]
            near = validation.nearest(name, [*sorted(NAMES), *own])
            accepted = f"{', '.join(sorted(NAMES))}, or a parameter of {method['name']}: {', '.join(own)}"
            raise ValueError(f"unknown argument {name}={value!r}{near} (accepted: {accepted})")
    if "keep" not in method and known["keep"] is MISSING:
        raise ValueError("keep is missing (write keep=64 for a count, keep=0.25 for a fraction of the visual tokens)")
    return ModelArguments(**settings, method=from_dict(method))


def read_value(name: str, value: Any, hint: Any) -> Any:
    if name == "corrupt":
        what = f"NAME:LEVEL (for example gaussian:0.5) or {CLEAN}"
        validation.check(isinstance(value, str), "corrupt", what, value)
        return parse_corruption(value)
    if name == "batch_size":  # lmms-eval passes it as text
        accepted = re.fullmatch("0*[1-9][0-9]*", str(value)) is not None
        validation.check(accepted, name, "an integer of at least 1", value)
        return int(value)
    found = convert(name, value, validation.plain_hint(hint))
    accepted = name != "seed" or 0 <= found <= LARGEST
    validation.check(accepted, "seed", f"an integer from 0 to {LARGEST}", value)
    return found


class Prompt(NamedTuple):
    """Prompt of a model: text with a placeholder for each image, and the images."""

    text: str
    images: tuple[Image.Image, ...]


@dataclass(frozen=True)
class PromptBuilder:
    """Makes prompts of messages, the same ones for every method and whatever else is in a batch."""

    processor: Any
    arguments: ModelArguments

    def build(self, messages: Sequence[Mapping[str, Any]], document: Mapping[str, Any], where: str) -> Prompt:
        """Build a prompt; `where` names the document in errors."""
        try:
            parts = [part for message in messages for part in message["content"]]
            images = [open_visual(part["url"]) for part in parts if part["type"] == "image"]
            names, corruption = self._names(document, images), self.arguments.corrupt
            if corruption is not None:
                named = zip(images, names, strict=True)
                images = [corruption.apply(image, name, self.arguments.seed) for image, name in named]
            placed = place_images(messages, self.processor.image_token)
            return Prompt(messages_prompt(self.processor, placed, self.arguments.prompt_template), tuple(images))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _names(self, document: Mapping[str, Any], images: Sequence[Image.Image]) -> list[str]:
        """Name each image. The corruption of an image depends on its name: never on the method or on the batch."""
        field = self.arguments.image_id
        if field is None:
            return [fingerprint(image) for image in images]
        if field not in document:
            listed = ", ".join(map(str, document))
            raise ValueError(f"image_id must be a field of the document ({listed}), got {field!r}")
        names = document[field] if isinstance(document[field], list) else [document[field]]
        if len(names) == 1 < len(images):
            names = [f"{names[0]}#{number}" for number in range(len(images))]
        if len(names) != len(images) or not all(isinstance(name, str | int) for name in names):
            raise ValueError(f"image_id must be a field with a name for each of {len(images)} images, got {field!r}")
        return [str(name) for name in names]


def open_visual(visual: Any) -> Image.Image:
    if isinstance(visual, str):
        return open_image(visual)
    if not isinstance(visual, Image.Image):
        raise ValueError(f"an image is a {type(visual).__name__}: a PIL image or the name of a file is expected")
    check_size("image", visual.size)
    return to_rgb(visual)


def fingerprint(image: Image.Image) -> str:
    """Identify an image without a name by its size and its pixels."""
    return hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes()).hexdigest()


def place_images(messages: Sequence[Mapping[str, Any]], placeholder: str) -> Messages:
    """Return messages for a chat template; images stand where the text has placeholders, which must be all or none."""
    parts = [part for message in messages for part in message["content"]]
    for part in parts:
        if part["type"] not in ("image", "text"):
            raise ValueError(f"{part['type']} is not supported (only images and text are)")
    marks = sum(part["text"].count(placeholder) for part in parts if part["type"] == "text")
    images = sum(part["type"] == "image" for part in parts)
    if marks not in (0, images):
        raise ValueError(f"the text has {marks} times {placeholder!r}, which stands for an image, and {images} images")
    placed: Messages = []
    for message in messages:
        content: list[dict[str, str]] = []
        for part in message["content"]:
            if part["type"] == "image":
                content += [] if marks else [{"type": "image"}]
                continue
            for number, text in enumerate(part["text"].split(placeholder)):
                text = text.strip() if marks else text
                content += [{"type": "image"}] if number else []
                content += [{"type": "text", "text": text}] if text or not marks else []
        placed.append({"role": message["role"], "content": content})
    return placed


def user_turn(visuals: Sequence[Any] | None, text: str) -> Messages:
    """Return the messages of a task of the older form, which has a text and a list of images."""
    images = [{"type": "image", "url": visual} for visual in flat(visuals or [])]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def flat(visuals: Sequence[Any]) -> list[Any]:
    return [one for visual in visuals for one in (flat(visual) if isinstance(visual, list | tuple) else [visual])]


class VisualCount(NamedTuple):
    """Visual tokens of a prompt's images: before pruning, after it, and in the prompt that the language model reads."""

    unpruned: int
    kept: int
    entered: int


class Generated(NamedTuple):
    """An answer, with the tokens of the pruned prompt and of the answer."""

    text: str
    input_tokens: int
    output_tokens: int
    visual: VisualCount


class Likelihood(NamedTuple):
    """Mean negative log-likelihood per token of a continuation, and whether greedy decoding produces it."""

    loss: float
    greedy: bool
    visual: VisualCount


class Engine:
    """The model, its processor, and the method that is attached to it until `close`."""

    def __init__(self, arguments: ModelArguments) -> None:
        self.model, processor = load_model(arguments.pretrained, arguments.load_options())
        self.processor = apply_image_padding(processor, arguments.image_padding)
        self.builder = PromptBuilder(self.processor, arguments)
        options = {name: getattr(arguments, name) for name in ("scope", "crops", "positions", "attention")}
        self.handle = arguments.method(self.model, processor=self.processor, **options)

    def close(self) -> None:
        self.handle.remove()

    def generate(self, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> list[Generated]:
        """Answer prompts that all have images, or all have none, with a task's generation_kwargs."""
        options, stops = read_generation(settings)
        inputs = self._inputs([prompt.text for prompt in prompts], prompts, "left")
        with torch.inference_mode():
            output = self.model.generate(**inputs, **options)
        new = output[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(new, skip_special_tokens=True)
        lengths = inputs["attention_mask"].sum(1).tolist()
        ends = self.model.generation_config.eos_token_id
        results = []
        for text, length, row, visual in zip(texts, lengths, new, self._visuals(prompts), strict=True):
            found = torch.isin(row, torch.tensor(ends, device=row.device)).nonzero() if ends is not None else row[:0]
            answered = int(found[0]) + 1 if len(found) else len(row)  # the end is counted, padding is not
            read = length - visual.unpruned + visual.entered
            results.append(Generated(cut(text, stops).strip(), read, answered, visual))
        return results

    def likelihoods(self, prompts: Sequence[Prompt], continuations: Sequence[str]) -> list[Likelihood]:
        """Score each continuation of its prompt. The prompts all have images, or all have none."""
        wholes = [continued(prompt.text, text) for prompt, text in zip(prompts, continuations, strict=True)]
        inputs = self._inputs(wholes, prompts, "right")
        lengths = inputs["attention_mask"].sum(1).tolist()
        with torch.inference_mode():
            logits = self.model(**inputs).logits
        results = []
        for row, visual in enumerate(self._visuals(prompts)):
            before, after = (self.processor.tokenizer(text)["input_ids"] for text in (prompts[row].text, wholes[row]))
            targets = list(after[len(before) :])
            if not targets:
                added = wholes[row][len(prompts[row].text) :]
                raise ValueError(f"continuation {added!r}: it has no tokens of its own")
            if inputs["input_ids"][row, : lengths[row]].tolist()[-len(targets) :] != targets:
                kind = type(self.processor).__name__
                raise ValueError(f"continuation {continuations[row]!r}: {kind} writes something after it")
            last = lengths[row] - visual.unpruned + visual.entered - 1
            own, wanted = logits[row, last - len(targets) : last], torch.tensor(targets, device=logits.device)
            loss = torch.nn.functional.cross_entropy(own.float(), wanted)
            results.append(Likelihood(float(loss), bool((own.argmax(-1) == wanted).all()), visual))
        return results

    def _inputs(self, texts: Sequence[str], prompts: Sequence[Prompt], padding_side: str) -> Any:
        images = [list(prompt.images) for prompt in prompts]
        pixels = {"images": images} if any(images) else {}
        self.processor.tokenizer.padding_side = padding_side
        inputs = self.processor(text=list(texts), **pixels, padding=True, return_tensors="pt")
        return inputs.to(self.model.device, self.model.dtype)

    def _visuals(self, prompts: Sequence[Prompt]) -> list[VisualCount]:
        """Count the tokens that the last call kept of each prompt's images."""
        left = iter(self.handle.last if any(prompt.images for prompt in prompts) else ())
        own = [list(islice(left, len(prompt.images))) for prompt in prompts]
        counts = ([(one.placeholders, one.kept, one.entered or one.kept) for one in some] for some in own)
        return [VisualCount(*(map(sum, zip(*some, strict=True)) if some else (0, 0, 0))) for some in counts]


def read_generation(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a task's generation_kwargs into arguments of `generate` and stop strings."""
    for name, value in settings.items():
        if name not in (*PASSED_ON, *STOPS, *NO_CONCERN):
            raise ValueError(f"unknown generation_kwargs entry {name}={value!r} (accepted: {PASSED_ON})")
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
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def continued(prompt: str, continuation: str) -> str:
    """Join a prompt and its continuation: by a space, unless the prompt ends with one or with a new line."""
    return prompt + ("" if prompt[-1:].isspace() else " ") + continuation.strip()


class Tally(dict[str, list[VisualCount]]):
    """The visual tokens of the questions of each task."""

    def add(self, task: str, visual: VisualCount) -> None:
        self.setdefault(task, []).append(visual)

    def to_json(self) -> dict[str, Any]:
        """Return the means per question, by task."""
        return {
            task: {
                "questions": len(counts),
                "unpruned_tokens": sum(one.unpruned for one in counts) / len(counts),
                "visual_tokens": sum(one.kept for one in counts) / len(counts),
            }
            for task, counts in self.items()
        }
