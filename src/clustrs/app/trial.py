"""One question about one image, answered by several methods: the image is encoded once, the answers are streamed."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from clustrs.app.loaded_model import LoadedModel
from clustrs.corruptions.images import first_sentence
from clustrs.evaluation.tasks import normalize_answer
from clustrs.models import shared_encoding
from clustrs.models.ask import call_seconds, chat_prompt
from clustrs.models.attach import Handle
from clustrs.models.select import ImageSelection
from clustrs.pruners import Pruner, get_method

NO_PRUNING = "none"


@dataclass(frozen=True)
class Trial:
    """What a visitor asks for. The unpruned model always answers too, first."""

    image: Image.Image
    question: str
    methods: tuple[str, ...]
    keep: int
    max_new_tokens: int = 32

    def pruners(self) -> list[Pruner]:
        """The methods with their budget; a ValueError names one that does not exist."""
        pruning = [get_method(name, keep=self.keep) for name in dict.fromkeys(self.methods) if name != NO_PRUNING]
        return [get_method(NO_PRUNING), *pruning]


@dataclass(frozen=True)
class TrialAnswer:
    """What one method has said so far, and what it cost. `error` is set instead when it could not answer.

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
    """Whether an answer is the expected one, word for word; None where nothing is expected."""
    return None if expected is None else normalize_answer(text) == normalize_answer(expected)


def saved_share(answers: Sequence[TrialAnswer], answer: TrialAnswer) -> float | None:
    """The share of the unpruned model's KV cache that a method does without."""
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
    """Ends a generation when the visitor has gone."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


def _generate(loaded: LoadedModel, handle: Handle, batch: shared_encoding.Batch, max_new_tokens: int) -> Iterator[str]:
    """Pieces of the answer. The model works in a thread of its own, which has ended when this has."""
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
    """Collects the bytes of keys and values after each call of a decoder; the first call is the prefill."""
    found: list[int] = []

    def after(_module: Any, _arguments: Any, output: Any) -> None:
        found.append(cache_bytes(output.past_key_values))

    hook = decoder.register_forward_hook(after)
    try:
        yield found
    finally:
        hook.remove()


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a cache of transformers holds in all its layers."""
    parts = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))
