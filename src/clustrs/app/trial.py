"""The model behind the page, the images that it is asked about, and its answers with several methods, streamed."""

import base64
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from clustrs import embedded
from clustrs.corruptions import Corruption, corruption_rule
from clustrs.corruptions.images import first_sentence, open_image
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.tasks import normalize_answer
from clustrs.models import shared_encoding
from clustrs.models.ask import call_seconds, chat_prompt
from clustrs.models.attach import Handle
from clustrs.models.load import load_model, quiet_transformers
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner, get_method
from clustrs.validation import LoadOptions

WARM_UP_QUESTION = "What is in the image?"


@dataclass(frozen=True)
class LoadedModel:
    """A model, its processor, and how many visual tokens the first sample image has without pruning.

    A method is attached to the whole model, so whoever uses it holds `lock`.
    """

    name: str
    model: Any
    processor: Any
    visual_tokens: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def embedded(self) -> embedded.EmbeddedModel | None:
        """Facts on the model if it is an embedded one."""
        return embedded.embedded_model(self.name)


def load_warm(name: str = embedded.DEFAULT, options: LoadOptions | None = None) -> LoadedModel:
    """Load whatever `clustrs ask` takes, and let it answer once: the first call pays for what is set up once."""
    quiet_transformers()
    model, processor = load_model(name, options or LoadOptions())
    image = open_image(embedded.samples()[0].path)
    known = embedded.embedded_model(name)
    prompt = chat_prompt(processor, known.question if known else WARM_UP_QUESTION)
    batch = shared_encoding.encode(model, processor, [image], [(0, prompt)])
    reply = shared_encoding.reply(model, processor, batch, get_method("none"), max_new_tokens=2)[0]
    return LoadedModel(name, model, processor, reply.image.placeholders)


PREVIEW = 480
"""Longest side in pixels of the images that the page shows."""


@dataclass(frozen=True)
class Source:
    """An image file, its name (which seeds corruptions), and the questions about it whose answers are known."""

    path: Path
    name: str
    questions: tuple[tuple[str, str], ...] = ()

    def open(self) -> Image.Image:
        return open_image(self.path)

    def expected(self, question: str) -> str | None:
        """Return the known answer to a question, or None."""
        return dict(self.questions).get(question.strip())


@dataclass(frozen=True)
class LevelRange:
    """Levels that a slider offers for a corruption, and its first value."""

    minimum: float
    maximum: float
    step: float
    value: float


def sample_sources(task: str | None = None) -> list[Source]:
    """Return the sample images, those of a task first, by default of the default model's."""
    first = task or embedded.default_task(embedded.DEFAULT)
    listed = sorted(embedded.samples(), key=lambda sample: sample.task != first)
    return [Source(sample.path, sample.path.name, sample.questions) for sample in listed]


def uploaded(path: Path) -> Source:
    """Return a visitor's file as a source; raise ValueError if it is not an image or too large."""
    try:
        open_image(path)
    except ValueError as error:
        raise ValueError(str(error).replace(repr(str(path)), repr(path.name))) from None
    return Source(path, path.name)


def level_range(name: str) -> LevelRange:
    """Return the levels that the corruption is usually measured at, and those below them.

    A slider starts at the first one, as a rule the mildest. A corruption that grows weaker with its level, as
    JPEG's quality does, is offered up to what it accepts.
    """
    rule = corruption_rule(name)
    descending = rule.levels[0] > rule.levels[-1]
    top = rule.high if descending else max(rule.levels)
    steps = {"any": 0.01 if top - rule.low <= 1 else 0.05, "integer": 1, "odd": 2}
    return LevelRange(rule.low, top, steps[rule.kind], rule.levels[0])


def nearest_level(name: str, level: float) -> float:
    """Return the level that a slider shows, without the rounding of its steps and within what is accepted."""
    span = level_range(name)
    steps = round((level - span.minimum) / span.step)
    return min(span.maximum, max(span.minimum, round(span.minimum + steps * span.step, 4)))


def corrupted(source: Source, corruption: str, level: float, seed: int) -> Image.Image:
    """Return the image as the model gets it: the pixels of `clustrs ask --corrupt NAME:LEVEL --seed SEED`."""
    image = source.open()
    if corruption == CLEAN:
        return image
    return Corruption(corruption, nearest_level(corruption, level)).apply(image, source.name, seed)


def data_uri(image: Image.Image, longest: int = PREVIEW) -> str:
    """Encode an image as a data URI, so that no file of it is left on the disk."""
    shown = image.convert("RGB")
    if max(shown.size) > longest:
        shown.thumbnail((longest, longest))
    content = io.BytesIO()
    shown.save(content, "WEBP", quality=88)
    return "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()


NO_PRUNING = "none"


@dataclass(frozen=True)
class Trial:
    """A visitor's question. The unpruned model always answers it first."""

    image: Image.Image
    question: str
    methods: tuple[str, ...]
    keep: int
    max_new_tokens: int = 32

    def pruners(self) -> list[Pruner]:
        """Return the methods with their budget; raise ValueError for an unknown one."""
        pruning = [get_method(name, keep=self.keep) for name in dict.fromkeys(self.methods) if name != NO_PRUNING]
        return [get_method(NO_PRUNING), *pruning]


@dataclass(frozen=True)
class TrialAnswer:
    """The answer of one method so far, and its cost. `error` is set instead if it could not answer.

    Times are wall seconds; `kv_bytes` is what keys and values of the prompt take after prefill.
    """

    method: str
    text: str = ""
    done: bool = False
    image: ImageSelection | None = None
    selection_seconds: float | None = None
    prefill_seconds: float | None = None
    kv_bytes: int | None = None
    error: str = ""


def run_trial(loaded: LoadedModel, trial: Trial) -> Iterator[TrialAnswer]:
    """Yield the answer of each method again and again as it grows; the last of each has `done` set.

    A method that cannot answer, because this model lacks what it needs, does not keep the others from it.
    """
    pruners = trial.pruners()
    prompt = chat_prompt(loaded.processor, trial.question)
    with loaded.lock:
        batch = shared_encoding.encode(loaded.model, loaded.processor, [trial.image], [(0, prompt)])
        for pruner in pruners:
            try:
                yield from _stream(loaded, batch, pruner, trial.max_new_tokens)
            except Exception as error:  # methods of other packages raise what they like
                yield TrialAnswer(pruner.name, done=True, error=first_sentence(error))


def verdict(text: str, expected: str | None) -> bool | None:
    """Return whether an answer is the expected one, word for word; None if no answer is known."""
    return None if expected is None else normalize_answer(text) == normalize_answer(expected)


def saved_share(answers: Sequence[TrialAnswer], answer: TrialAnswer) -> float | None:
    """Return the share of the unpruned model's KV cache that a method saves."""
    whole = next((one.kv_bytes for one in answers if one.method == NO_PRUNING), None)
    return None if not whole or answer.kv_bytes is None else 1 - answer.kv_bytes / whole


def _stream(
    loaded: LoadedModel, batch: shared_encoding.Batch, pruner: Pruner, max_new_tokens: int
) -> Iterator[TrialAnswer]:
    with (
        pruner(loaded.model) as handle,
        call_seconds(loaded.model.get_decoder()) as calls,
        prefill_cache_bytes(loaded.model.get_decoder()) as kv_bytes,
    ):
        answer = TrialAnswer(pruner.name)
        for text in _generate(loaded, handle, batch, max_new_tokens):
            answer = replace(answer, text=answer.text + text)
            if answer.image is None:
                image, seconds = handle.last[0], handle.seconds["selection"]
                answer = replace(
                    answer, image=image, selection_seconds=seconds, prefill_seconds=calls[0], kv_bytes=kv_bytes[0]
                )
            yield answer
        yield replace(answer, text=answer.text.strip(), done=True)


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Stopping criterion that ends the generation when the visitor has left."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


def _generate(loaded: LoadedModel, handle: Handle, batch: shared_encoding.Batch, max_new_tokens: int) -> Iterator[str]:
    """Yield pieces of the answer; the model runs in a thread that ends with this generator."""
    tokenizer = getattr(loaded.processor, "tokenizer", loaded.processor)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    stop, errors = _Stop(), []

    def work() -> None:
        try:
            with torch.inference_mode():
                handle.generate(
                    batch.images,
                    input_ids=batch.input_ids,
                    attention_mask=batch.attention_mask,
                    **batch.along,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([stop]),
                )
        except Exception as error:  # raised again in the visitor's thread
            errors.append(error)
            streamer.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for text in streamer:
            if errors:
                raise errors[0]
            yield text
    finally:
        stop.event.set()
        thread.join()


@contextmanager
def prefill_cache_bytes(decoder: nn.Module) -> Iterator[list[int]]:
    """Record the bytes of keys and values after each call of a decoder; the first call is the prefill."""
    found: list[int] = []

    def after(_module: Any, _arguments: Any, output: Any) -> None:
        found.append(cache_bytes(output.past_key_values))

    hook = decoder.register_forward_hook(after)
    try:
        yield found
    finally:
        hook.remove()


def cache_bytes(cache: Any) -> int:
    """Return the bytes of keys and values that a cache of transformers holds in all its layers."""
    parts = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))
