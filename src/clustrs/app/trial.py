"""The model behind the page, the images and clips that it is asked about, and its answers with several methods."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteriaList, TextIteratorStreamer

from clustrs import embedded
from clustrs.corruptions import Corruption, corruption_rule
from clustrs.corruptions.images import first_sentence, open_image
from clustrs.corruptions.videos import is_video, open_video
from clustrs.evaluation.config import CLEAN
from clustrs.evaluation.tasks import get_task, normalize_answer
from clustrs.models import ask as asking
from clustrs.models.adapters.base import VisualTokens
from clustrs.models.configuration import PruningConfig
from clustrs.models.costs import cache_bytes
from clustrs.models.load import load_model, quiet_transformers
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner, get_method
from clustrs.validation import LoadOptions

QUESTION = "What is in the image?"  # where a visitor has not asked anything
NO_PRUNING = "none"
FRAMES = 8  # of a clip
CLIPS = 33  # questions of the task `clips`, of which those about clips of so many frames are samples
DRAWS, AT_ONCE = 20, 5  # draws of noise that are counted, and how many of them the model gets at once


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

    @property
    def one_image(self) -> str:
        """Why the model cannot be asked about clips; "" if it can."""
        if self.embedded is None or self.embedded.family != "llava":
            return ""
        return "One image per prompt; for clips: clustrs app --model mini-onevision-clips"

    def encode(self, images: Sequence[Image.Image], question: str, methods: Sequence[Pruner] = ()) -> asking.Batch:
        """Encode images for methods that will prune them; each has a prompt of its own with the question."""
        records = {need for method in methods for need in method.requirements()}
        prompt = asking.chat_prompt(self.processor, question)
        crops = self.pruning.crops if self.pruning else "all"
        return asking.encode(
            self.model, self.processor, images, [(i, prompt) for i in range(len(images))], crops, records
        )

    def options(self, method: Pruner) -> dict[str, Any]:
        """Return the options of `attach` that the configuration has for its own method."""
        own = self.pruning is not None and self.pruning.method.name == method.name
        return self.pruning.options() if self.pruning and own else {}

    def method(self, name: str, keep: int) -> Pruner:
        """Return a method at a budget; raise ValueError for an unknown one."""
        if self.pruning and self.pruning.method.name == name:
            return replace(self.pruning.method, keep=keep)
        return get_method(name, keep=keep)


def load_warm(name: str = embedded.DEFAULT, options: LoadOptions | None = None) -> LoadedModel:
    """Load whatever `clustrs ask` takes, and let it answer once: the first call pays for what is set up once."""
    quiet_transformers()
    cold = LoadedModel(name, *load_model(name, options or LoadOptions()), visual_tokens=0)
    *_, answer = run_trial(cold, sample_sources(cold)[0].frames(), cold.question, [get_method(NO_PRUNING)], longest=2)
    if answer.error:
        raise ValueError(f"model {name!r} cannot be asked about an image: {answer.error}")
    return replace(cold, visual_tokens=answer.placeholders)


@dataclass(frozen=True)
class Source:
    """An image or video file, its name (which seeds corruptions), and questions about it whose answers are known."""

    path: Path
    name: str
    questions: tuple[tuple[str, str], ...] = ()
    drawn: bool = False  # a clip of the task `clips`, which has no file

    @property
    def clip(self) -> bool:
        return self.drawn or is_video(self.path)

    def open(self) -> Image.Image:
        return self.frames()[0]

    def frames(self) -> list[Image.Image]:
        """Return the frames of a clip, or the image."""
        if self.drawn:
            return _clips().frames(self.name)
        return open_video(self.path, FRAMES) if self.clip else [open_image(self.path)]

    def expected(self, question: str) -> str | None:
        return dict(self.questions).get(question.strip())


@cache
def _clips() -> Any:
    return get_task("clips", None, CLIPS)


def sample_sources(loaded: LoadedModel) -> list[Source]:
    """Return the samples of the model's task; for a model that is not embedded, all images."""
    task = loaded.embedded.task.partition("-")[0] if loaded.embedded else None
    if task != "clips":
        return [Source(sample.path, sample.path.name, sample.questions) for sample in embedded.samples(task)]
    found: dict[str, list[tuple[str, str]]] = {}
    for item in _clips().items:
        found.setdefault(item.image, []).append((item.question, item.answer))
    clips = [Source(Path(name), name, tuple(questions), drawn=True) for name, questions in found.items()]
    return [clip for clip in clips if len(clip.frames()) == FRAMES]


def uploaded(path: Path) -> Source:
    """Return a visitor's file as a source; raise ValueError if it is no image or video, or too large."""
    source = Source(path, path.name)
    try:
        source.frames()
    except ValueError as error:
        raise ValueError(str(error).replace(repr(str(path)), repr(path.name))) from None
    return source


def level_range(name: str, model: str = "") -> dict[str, float]:
    """Return minimum, maximum, step and first value of a slider for the levels of a corruption.

    For an embedded model the first value costs it 10 % of its score unpruned, and the maximum half, where that was
    measured. Else the maximum is the highest level by default, or what is accepted, where weaker ones are higher.
    """
    rule = corruption_rule(name)
    top = rule.high if rule.levels[0] > rule.levels[-1] else max(rule.levels)
    first, top = embedded.BEARS.get(model, {}).get(name, (rule.levels[0], top))
    steps = {"any": 0.001 if top < 0.2 else 0.01 if top - rule.low <= 1 else 0.05, "integer": 1, "odd": 2}
    return {"minimum": rule.low, "maximum": top, "step": steps[rule.kind], "value": first}


def nearest_level(name: str, level: float) -> float:
    """Return the level that a slider shows, without the rounding of its steps and within what is accepted."""
    rule = corruption_rule(name)
    level = min(rule.high, max(rule.low, float(level)))
    if rule.kind == "any":
        return round(level, 4)
    return float(round(level)) if rule.kind == "integer" else 2.0 * round((level - 1) / 2) + 1


def corrupted(source: Source, corruption: str, level: float, seed: int) -> list[Image.Image]:
    """Return the image, or the frames, as the model gets them: those of `clustrs ask --corrupt --seed`."""
    images = source.frames()
    if corruption == CLEAN:
        return images
    effect, name = Corruption(corruption, nearest_level(corruption, level)), source.name
    return [effect.apply(image, f"{name}#{i}" if i else name, seed) for i, image in enumerate(images)]


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
    images: tuple[ImageSelection, ...] = ()  # of a clip one per frame
    encode_seconds: float | None = None
    selection_seconds: float | None = None
    prefill_seconds: float | None = None
    kv_bytes: int | None = None  # what keys and values of the prompt take after prefill
    error: str = ""

    @property
    def tokens(self) -> float:
        """Visual tokens that the language model read, as a mean over its layers."""
        return sum(one.kept if one.average is None else one.average for one in self.images)

    @property
    def placeholders(self) -> int:
        return sum(one.placeholders for one in self.images)

    @property
    def seconds(self) -> float | None:
        """Time to the first token."""
        if self.encode_seconds is None or self.prefill_seconds is None:
            return None
        selection = 0.0 if self.method == NO_PRUNING else self.selection_seconds or 0.0
        return self.encode_seconds + selection + self.prefill_seconds


def run_trial(
    loaded: LoadedModel, images: Sequence[Image.Image], question: str, methods: Sequence[Pruner], longest: int = 32
) -> Iterator[TrialAnswer]:
    """Yield the answer of each method again and again as it grows; the last of each has `done` set. Several images are
    the frames of a clip; a single one is encoded once for all methods."""
    with loaded.lock:
        start = perf_counter()
        batch = loaded.encode(images, question, methods) if len(images) == 1 else None
        seconds = perf_counter() - start
        for method in methods:
            try:
                if batch is None:
                    yield from _stream(loaded, method, longest, clip_inputs(loaded, images, question))
                else:
                    for answer in _stream(loaded, method, longest, batch.inputs, batch.images):
                        yield replace(answer, encode_seconds=seconds)
            except Exception as error:  # methods of other packages raise what they like
                yield TrialAnswer(method.name, done=True, error=first_sentence(error))


def clip_inputs(loaded: LoadedModel, frames: Sequence[Image.Image], question: str) -> Any:
    if loaded.one_image:
        raise ValueError(loaded.one_image)
    text = asking.chat_prompt(loaded.processor, question, images=len(frames))
    return asking.prepare(loaded.model, loaded.processor, list(frames), text)


def _stream(
    loaded: LoadedModel, method: Pruner, longest: int, inputs: Any, encoded: Sequence[VisualTokens] = ()
) -> Iterator[TrialAnswer]:
    """Yield the answer as it grows; the model runs in a thread that ends with this generator."""
    tokenizer, decoder = getattr(loaded.processor, "tokenizer", loaded.processor), loaded.model.get_decoder()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    left, errors, kv_bytes = threading.Event(), list[Exception](), list[int]()

    def stop(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), left.is_set(), device=input_ids.device)

    def count_bytes(_module: Any, _arguments: Any, output: Any) -> None:
        kv_bytes.append(cache_bytes(output.past_key_values.layers))

    def work() -> None:
        how = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([stop])}
        try:
            with torch.inference_mode():
                generate = partial(handle.generate, list(encoded)) if encoded else loaded.model.generate
                generate(**inputs, max_new_tokens=longest, do_sample=False, **how)
        except Exception as error:  # raised again in the visitor's thread
            errors.append(error)
            streamer.end()

    answer, thread = TrialAnswer(method.name), threading.Thread(target=work, daemon=True)
    options = loaded.options(method) if encoded else {**loaded.options(method), "scope": "video"}
    with (
        method(loaded.model, processor=loaded.processor, **options) as handle,
        asking.call_seconds(decoder) as calls,
        decoder.register_forward_hook(count_bytes),  # of which the first call is the prefill
    ):
        thread.start()
        try:
            for text in streamer:
                if errors:
                    raise errors[0]
                answer = replace(answer, text=answer.text + text)
                if not answer.images:
                    spent, kept = handle.seconds, tuple(handle.last)
                    answer = replace(answer, images=kept, encode_seconds=spent["vision"] + spent["scoring"])
                    answer = replace(answer, selection_seconds=spent["selection"])
                    answer = replace(answer, prefill_seconds=calls[0], kv_bytes=kv_bytes[0])
                yield answer
        finally:
            left.set()
            thread.join()
        # A method inside the language model has kept fewer since the first piece.
        yield replace(answer, text=answer.text.strip(), images=tuple(handle.last), done=True)


def count_right(
    loaded: LoadedModel, source: Source, corruption: Corruption, question: str, methods: Sequence[Pruner], longest: int
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield how many draws of a corruption were seen, and how many of them each method answered as expected."""
    expected, image, right = source.expected(question), source.open(), dict.fromkeys((m.name for m in methods), 0)
    if source.clip:
        raise ValueError("draws of the noise are counted for images, not for clips")
    if expected is None:
        raise ValueError("no answer is known for this question, so right ones cannot be counted")
    for first in range(0, DRAWS, AT_ONCE):
        seeds = range(first, min(DRAWS, first + AT_ONCE))
        with loaded.lock:
            batch = loaded.encode([corruption.apply(image, source.name, seed) for seed in seeds], question, methods)
            for method in methods:
                own = loaded.options(method)
                replies = asking.reply(loaded.model, loaded.processor, batch, method, longest, **own)
                right[method.name] += sum(normalize_answer(one.text) == normalize_answer(expected) for one in replies)
        yield seeds[-1] + 1, dict(right)
