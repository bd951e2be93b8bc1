"""Ask one question about one image (prompt templates, unknown words, timing), or many with images encoded once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from clustrs import validation
from clustrs.models.adapters.base import VisualTokens, get_adapter
from clustrs.models.scoring import StageTimer, now, timing
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner
from clustrs.pruners.inputs import FURTHER
from clustrs.validation import Crops, PromptTemplate

Picture = Image.Image | Sequence[Image.Image]  # an image, or the frames of a clip
TILING = ("crop_to_patches", "do_image_splitting")  # options of image processors that divide an image into tiles


@dataclass(frozen=True)
class Seconds:
    """Wall seconds of one answer. `prefill` and `decode` (its sum over tokens) are the language model's."""

    vision: float
    scoring: float
    selection: float
    prefill: float
    decode: float
    decode_per_token: float | None  # None when a single token was made, which is the prefill's work


@dataclass(frozen=True)
class Answer:
    """Answer of a model, the visual tokens it would have read and did read, and how long it took."""

    text: str
    unpruned_tokens: int
    visual_tokens: int
    new_tokens: int
    seconds: Seconds
    image: ImageSelection
    unknown_words: tuple[str, ...] = ()
    """Words of the question that a word-level tokenizer does not have: the model was not asked them."""
    frames: tuple[ImageSelection, ...] = ()
    """Kept tokens of each frame of a video; `image` is the first."""


def as_seen(processor: Any, image: Image.Image) -> Image.Image:
    """Return the part of an image that the base crop shows: processors pad it to a square, or cut a square out."""
    how = processor.image_processor
    if getattr(how, "image_grid_pinpoints", None) or any(hasattr(how, name) for name in TILING):
        return image  # the whole image, squeezed into one tile
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
    image: Picture,
    question: str,
    method: Pruner,
    max_new_tokens: int = 64,
    *,
    prompt_template: PromptTemplate = "checkpoint",
    **options: Any,
) -> Answer:
    """Answer a question about an image, greedily, with the visual tokens that `method` keeps.

    Args:
        model: A transformers model.
        processor: Its processor.
        image: The image; or the frames of a video, which the model gets as images, with one budget for all.
        question: The question, without a placeholder for the image.
        method: The pruning method.
        max_new_tokens: Largest number of tokens of the answer.
        prompt_template: "checkpoint" has the words of the model's own chat template, "vicuna_v1" those of LLaVA-1.5.
        **options: Options of `Pruner.attach`: scope, crops, positions, attention, deepstack.

    Returns:
        The text, numbers of tokens, seconds of each stage, and the kept tokens.

    Raises:
        ValueError: For an empty question, or a model that is not supported.

    Examples:
        >>> model, processor = load_model("mini-llava")
        >>> image = open_image(image_path("sample:scene-1"))
        >>> answer = ask(model, processor, image, "How many objects are there?", ClustRS(keep=16))
        >>> answer.visual_tokens
        16
    """
    validation.integer("max_new_tokens", max_new_tokens, 1)
    frames = None if isinstance(image, Image.Image) else list(image)
    text = chat_prompt(processor, question, prompt_template, 1 if frames is None else len(frames))
    inputs = prepare(model, processor, image, text)
    if frames is not None:
        options = {**options, "scope": "video"} if options.get("scope", "image") == "image" else options
    with (
        method(model, processor=processor, **options) as handle,
        call_seconds(model.get_decoder()) as calls,
        timing(),
        torch.inference_mode(),
    ):
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new, results = output[0, inputs["input_ids"].shape[1] :], handle.last
    prefill, *steps = calls
    return Answer(
        text=processor.decode(new, skip_special_tokens=True).strip(),
        unpruned_tokens=sum(result.placeholders for result in results),
        visual_tokens=sum(result.kept for result in results),
        new_tokens=len(new),
        seconds=Seconds(
            **handle.seconds,
            prefill=prefill,
            decode=sum(steps),
            decode_per_token=sum(steps) / len(steps) if steps else None,
        ),
        image=results[0],
        unknown_words=tuple(unknown_words(processor, question)),
        frames=() if frames is None else tuple(results),
    )


def prepare(model: Any, processor: Any, image: Picture, text: str) -> Any:
    """Return the inputs of one prompt about an image, or about frames."""
    return prepare_batch(model, processor, [(image, text)])


def prepare_batch(model: Any, processor: Any, prompts: Sequence[tuple[Picture, str]]) -> Any:
    """Return the inputs of prompts, each about an image, or about frames: each one tile, as in videos."""
    shown: list[Any] = [list(frames_of(image)) for image, _ in prompts]
    arranged = shown if get_adapter(model).nested_images else [image for own in shown for image in own]
    clips = not all(isinstance(image, Image.Image) for image, _ in prompts)
    one_tile = [name for name in TILING if clips and hasattr(processor.image_processor, name)]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt", **dict.fromkeys(one_tile, False)}
    return processor(images=arranged, text=[text for _, text in prompts], **options).to(model.device, model.dtype)


def frames_of(image: Picture) -> Sequence[Image.Image]:
    return [image] if isinstance(image, Image.Image) else image


@contextmanager
def call_seconds(module: nn.Module) -> Iterator[list[float]]:
    """Collect the wall seconds of every call of a module; the device is waited for before and after."""
    seconds: list[float] = []
    device = next(module.parameters()).device

    def before(*_: Any) -> None:
        seconds.append(now(device))

    def after(*_: Any) -> None:
        seconds[-1] = now(device) - seconds[-1]

    with module.register_forward_pre_hook(before), module.register_forward_hook(after):
        yield seconds


SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
PLAIN_PROMPT = "USER: {image}\n{question} ASSISTANT:"  # without a chat template: LLaVA-1.5's, without its system line
PLAIN_PROMPTS = {"PaliGemmaProcessor": "{image}{question}"}  # by processor, where these turns would be wrong
VICUNA_V1 = f"{SYSTEM} {PLAIN_PROMPT}"


def chat_prompt(processor: Any, question: str, template: PromptTemplate = "checkpoint", images: int = 1) -> str:
    """Return the question with `images` before it, in the words that the template has around them."""
    if not question.strip():
        raise ValueError("question must not be empty")
    if processor.image_token in question:
        raise ValueError(f"the question has {processor.image_token!r} in it, which stands for an image: leave it out")
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": question}]
    return messages_prompt(processor, [{"role": "user", "content": content}], template)


def messages_prompt(
    processor: Any, messages: Sequence[Mapping[str, Any]], template: PromptTemplate = "checkpoint"
) -> str:
    """Return a conversation in the words of the template; `messages` have a role, and parts of type "image" or "text".
    LLaVA-1.5's words, and those for processors without a template, are for one turn of a user, images first."""
    validation.choice("prompt_template", template, get_args(PromptTemplate))
    if template == "checkpoint" and getattr(processor, "chat_template", None):
        try:
            return str(processor.apply_chat_template(list(messages), add_generation_prompt=True))
        except Exception as error:  # a template is a program: it raises what it likes
            raise ValueError(f"the model's chat template failed: {' '.join(str(error).split())[:200]}") from error
    plain = PLAIN_PROMPTS.get(type(processor).__name__, PLAIN_PROMPT)
    words = VICUNA_V1 if template == "vicuna_v1" else plain
    roles = [message["role"] for message in messages]
    if roles != ["user"]:
        accepted = f"one turn of a user for prompt_template={template!r} without the model's chat template"
        raise ValueError(f"messages must be {accepted}, got {', '.join(roles)}")
    parts = messages[0]["content"]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    images = sum(part["type"] == "image" for part in parts)
    after = "\n" if "{image}\n" in words else ""
    if not images:
        words = words.replace(f"{{image}}{after}", "")
    return words.format(image=after.join([processor.image_token] * images), question=text)


NEAR = 0.8  # similarity of a known word that is proposed: `colour` for `color`, but not `list` for `it`


def unknown_words(processor: Any, text: str) -> list[str]:
    """Return the words of a text that a word-level tokenizer maps to its unknown token, as written there, each once."""
    from tokenizers.models import WordLevel

    core: Any = getattr(getattr(processor, "tokenizer", None), "backend_tokenizer", None)
    unknown = core.token_to_id(core.model.unk_token) if core and isinstance(core.model, WordLevel) else None
    if unknown is None:
        return []
    encoded = core.encode(text, add_special_tokens=False)
    spans: list[tuple[int, int]] = []
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token == unknown and spans and spans[-1][1] == start:  # 's is one word to a reader
            spans[-1] = (spans[-1][0], end)
        elif token == unknown:
            spans.append((start, end))
    written = (text[start:end] for start, end in spans)
    return list(dict.fromkeys(word.strip(".,;:!?") or word for word in written))


def name_unknown_words(processor: Any, text: str) -> str:
    """Return one line that names the words of a question that a model does not know; "" if it knows them all."""
    named = []
    for word in unknown_words(processor, text):
        known = [known for known in processor.tokenizer.get_vocab() if known.isalpha()]
        close = get_close_matches(word.lower(), known, n=1, cutoff=NEAR)
        named.append(f"{word!r}" + "".join(f" (did you mean {one!r}?)" for one in close))
    return f"not in the model's vocabulary: {', '.join(named)}" if named else ""


PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Batch:
    """Prompts with one image each, as per-token `inputs`; prompts about the same image share its `VisualTokens`."""

    inputs: dict[str, Tensor]
    images: list[VisualTokens]
    frames: tuple[int, ...] = ()
    """Number of images of each prompt where they are about clips, whose frames stand in `images` one after another."""

    @property
    def input_ids(self) -> Tensor:
        return self.inputs["input_ids"]


@dataclass(frozen=True)
class Reply:
    """Answer to one prompt, and the tokens kept of its image, or of each frame of its clip (`image` is the first)."""

    text: str
    image: ImageSelection
    frames: tuple[ImageSelection, ...] = ()


def encode(
    model: Any,
    processor: Any,
    images: Sequence[Picture],
    prompts: Sequence[tuple[int, str]],
    crops: Crops = "all",
    records: Collection[str] = FURTHER,
) -> Batch:
    """Run the vision tower over `images`, or over clips: the frames of each. A prompt is the index of its image and the
    text, with a placeholder for each. Of `FURTHER` inputs those in `records` are there: the `requirements` of the
    methods that will prune."""
    adapter = get_adapter(model)
    adapter.records = records
    shown = [(images[index], text) for index, text in prompts]
    inputs = dict(prepare_batch(model, processor, shown))
    first = {index: row for row, (index, _) in reversed(list(enumerate(prompts)))}
    rows, clips = sorted(first.values()), not all(isinstance(image, Image.Image) for image in images)
    counts = {row: len(frames_of(shown[row][0])) for row in rows}
    with torch.inference_mode():
        alone = [shown[row] for row in rows]
        own = dict(prepare_batch(model, processor, alone)) if clips else adapter.take_images(inputs, rows)
        encoded = iter(adapter.encode(own, StageTimer(model.device), crops))
    by_row = {row: [next(encoded) for _ in range(counts[row])] for row in rows}
    shared = [image for index, _ in prompts for image in by_row[first[index]]]
    frames = tuple(counts[first[index]] for index, _ in prompts) if clips else ()
    return Batch({name: inputs[name] for name in PER_TOKEN if name in inputs}, shared, frames)


def questions(model: Any, processor: Any, batch: Batch, method: Pruner) -> list[Tensor] | None:
    """Return the embeddings [T, D] of each prompt's question; None for a method that does not read them."""
    if "question" not in method.requirements():
        return None
    from clustrs.models.question import QuestionReader

    adapter = get_adapter(model)
    reader = QuestionReader(model, processor, None, adapter.written_text)
    return reader.read(adapter, batch.input_ids, batch.inputs["attention_mask"], batch.images)


def reply(model: Any, processor: Any, batch: Batch, method: Pruner, max_new_tokens: int, **options: Any) -> list[Reply]:
    """Greedy answers to all prompts of a batch, with the tokens that `method` leaves. Options are those of `attach`;
    frames of a clip share a budget, unless the scope is another than "image"."""
    if batch.frames and options.get("scope", "image") == "image":
        options["scope"] = "video"
    with method(model, processor=processor, **options) as handle, torch.inference_mode():
        output = handle.generate(batch.images, **batch.inputs, max_new_tokens=max_new_tokens, do_sample=False)
        selections = handle.last
    new = output[:, batch.input_ids.shape[1] :]
    texts = processor.batch_decode(new, skip_special_tokens=True)
    if not batch.frames:
        return [Reply(text.strip(), image) for text, image in zip(texts, selections, strict=True)]
    taken = iter(selections)
    frames = [tuple(next(taken) for _ in range(count)) for count in batch.frames]
    return [Reply(text.strip(), own[0], own) for text, own in zip(texts, frames, strict=True)]


def part(batch: Batch, row: int) -> Batch:
    """One prompt of a batch alone, without its padding."""
    real = batch.inputs["attention_mask"][row].bool()
    counts = batch.frames or (1,) * len(batch.images)
    start, frames = sum(counts[:row]), batch.frames[row : row + 1]
    images = batch.images[start : start + counts[row]]
    return Batch({name: part[row][real][None] for name, part in batch.inputs.items()}, images, frames)
