"""The model behind the page, the images that it is asked about, and its answers with several methods, streamed."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteriaList, TextIteratorStreamer

from clustrs import embedded
from clustrs.corruptions import Corruption, corruption_rule
from clustrs.corruptions.images import first_sentence, open_image
from clustrs.evaluation.config import CLEAN
from clustrs.models import ask as asking
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import cache_bytes
from clustrs.models.load import load_model, quiet_transformers
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner, get_method
from clustrs.validation import LoadOptions

QUESTION = "What is in the image?"  # where a visitor has not asked anything
NO_PRUNING = "none"


@dataclass(frozen=True)
class LoadedModel:
    """A model, its processor, and how many visual tokens the first sample image has without pruning."""

    name: str
    model: Any
    processor: Any
    visual_tokens: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # a method is attached to the whole model
    pruning: PruningConfig | None = None  # its method has these parameters and options wherever it is chosen

    @property
    def embedded(self) -> embedded.EmbeddedModel | None:
        return embedded.embedded_model(self.name)

    @property
    def question(self) -> str:
        return self.embedded.question if self.embedded else QUESTION

    def encode(self, image: Image.Image, question: str, methods: Sequence[Pruner] = ()) -> asking.Batch:
        """Encode an image for methods that will prune it."""
        records = {need for method in methods for need in method.requirements()}
        prompt = asking.chat_prompt(self.processor, question)
        crops = self.pruning.crops if self.pruning else "all"
        return asking.encode(self.model, self.processor, [image], [(0, prompt)], crops, records)

    def method(self, name: str, keep: int) -> Pruner:
        """Return a method at a budget; raise ValueError for an unknown one."""
        if self.pruning and self.pruning.method.name == name:
            return replace(self.pruning.method, keep=keep)
        return get_method(name, keep=keep)


def load_warm(name: str = embedded.DEFAULT, options: LoadOptions | None = None) -> LoadedModel:
    """Load whatever `clustrs ask` takes, and let it answer once: the first call pays for what is set up once."""
    quiet_transformers()
    cold = LoadedModel(name, *load_model(name, options or LoadOptions()), visual_tokens=0)
    batch = cold.encode(open_image(embedded.samples()[0].path), cold.question)
    reply = asking.reply(cold.model, cold.processor, batch, get_method(NO_PRUNING), max_new_tokens=2)[0]
    return replace(cold, visual_tokens=reply.image.placeholders)


@dataclass(frozen=True)
class Source:
    """An image file, its name (which seeds corruptions), and the questions about it whose answers are known."""

    path: Path
    name: str
    questions: tuple[tuple[str, str], ...] = ()

    def open(self) -> Image.Image:
        return open_image(self.path)

    def expected(self, question: str) -> str | None:
        return dict(self.questions).get(question.strip())


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


def level_range(name: str) -> dict[str, float]:
    """Return minimum, maximum, step and first value of a slider for the levels of a corruption.

    The maximum is the highest level it is measured at, or accepts where it grows weaker, as JPEG's quality does.
    """
    rule = corruption_rule(name)
    top = rule.high if rule.levels[0] > rule.levels[-1] else max(rule.levels)
    steps = {"any": 0.01 if top - rule.low <= 1 else 0.05, "integer": 1, "odd": 2}
    return {"minimum": rule.low, "maximum": top, "step": steps[rule.kind], "value": rule.levels[0]}


def nearest_level(name: str, level: float) -> float:
    """Return the level that a slider shows, without the rounding of its steps and within what is accepted."""
    span = level_range(name)
    steps = round((level - span["minimum"]) / span["step"])
    return min(span["maximum"], max(span["minimum"], round(span["minimum"] + steps * span["step"], 4)))


def corrupted(source: Source, corruption: str, level: float, seed: int) -> Image.Image:
    """Return the image as the model gets it: the pixels of `clustrs ask --corrupt NAME:LEVEL --seed SEED`."""
    image = source.open()
    if corruption == CLEAN:
        return image
    return Corruption(corruption, nearest_level(corruption, level)).apply(image, source.name, seed)


def trial_methods(loaded: LoadedModel, names: Sequence[str], keep: int) -> list[Pruner]:
    """Return the unpruned model, which always answers first, and methods; raise ValueError for an unknown one."""
    pruning = [loaded.method(name, keep) for name in dict.fromkeys(names) if name != NO_PRUNING]
    return [get_method(NO_PRUNING), *pruning]


@dataclass(frozen=True)
class TrialAnswer:
    """The answer of one method so far, and its cost in wall seconds; `error` is set instead if it could not answer."""

    method: str
    text: str = ""
    done: bool = False
    image: ImageSelection | None = None
    selection_seconds: float | None = None
    prefill_seconds: float | None = None
    kv_bytes: int | None = None  # what keys and values of the prompt take after prefill
    error: str = ""


def run_trial(
    loaded: LoadedModel, image: Image.Image, question: str, methods: Sequence[Pruner], max_new_tokens: int = 32
) -> Iterator[TrialAnswer]:
    """Yield the answer of each method again and again as it grows; the last of each has `done` set."""
    with loaded.lock:
        batch = loaded.encode(image, question, methods)
        for method in methods:
            try:
                yield from _stream(loaded, batch, method, max_new_tokens)
            except Exception as error:  # methods of other packages raise what they like
                yield TrialAnswer(method.name, done=True, error=first_sentence(error))


def _stream(loaded: LoadedModel, batch: asking.Batch, method: Pruner, max_new_tokens: int) -> Iterator[TrialAnswer]:
    """Yield the answer as it grows; the model runs in a thread that ends with this generator."""
    tokenizer, decoder = getattr(loaded.processor, "tokenizer", loaded.processor), loaded.model.get_decoder()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    left, errors, kv_bytes = threading.Event(), list[Exception](), list[int]()

    def stop(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), left.is_set(), device=input_ids.device)

    def count_bytes(_module: Any, _arguments: Any, output: Any) -> None:
        kv_bytes.append(cache_bytes(output.past_key_values.layers))

    def work() -> None:
        try:
            with torch.inference_mode():
                handle.generate(
                    batch.images,
                    **batch.inputs,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([stop]),
                )
        except Exception as error:  # raised again in the visitor's thread
            errors.append(error)
            streamer.end()

    answer, thread = TrialAnswer(method.name), threading.Thread(target=work, daemon=True)
    own = loaded.pruning if loaded.pruning and loaded.pruning.method.name == method.name else None
    with (
        method(loaded.model, processor=loaded.processor, **(own.options() if own else {})) as handle,
        asking.call_seconds(decoder) as calls,
        decoder.register_forward_hook(count_bytes),  # of which the first call is the prefill
    ):
        thread.start()
        try:
            for text in streamer:
                if errors:
                    raise errors[0]
                answer = replace(answer, text=answer.text + text)
                if answer.image is None:
                    answer = replace(answer, image=handle.last[0], selection_seconds=handle.seconds["selection"])
                    answer = replace(answer, prefill_seconds=calls[0], kv_bytes=kv_bytes[0])
                yield answer
        finally:
            left.set()
            thread.join()
        yield replace(answer, text=answer.text.strip(), done=True)
