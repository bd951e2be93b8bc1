"""A loaded and pruned model that answers prompts with any number of images, several at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clustrs.integrations.lmms_eval.arguments import ModelArguments
from clustrs.integrations.lmms_eval.requests import Prompt, PromptBuilder
from clustrs.models.load import load_model
from clustrs.models.protocol import apply_image_padding

MAX_NEW_TOKENS = 1024
"""Where a task does not say: as LLaVA-1.5 is evaluated."""
PASSED_ON = ("max_new_tokens", "temperature", "do_sample", "top_p", "top_k", "num_beams", "repetition_penalty")
"""What `generate` is given of a task's generation_kwargs."""
SAMPLING = ("temperature", "top_p", "top_k")
NO_CONCERN = ("image_aspect_ratio",)
"""Settings of other models that stand in tasks' generation_kwargs and change nothing here."""
STOPS = ("until", "stop_sequences")
PARAGRAPH = "\n\n"
"""What lmms-eval adds to `until` when a task has none. Its own models do not cut answers there, nor does this one."""


@dataclass(frozen=True)
class VisualCount:
    """How many visual tokens the language model would have read of a prompt's images, and how many it did."""

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
    """How well a continuation fits: its mean negative log-likelihood per token; whether greedy decoding gives it."""

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
        """How well each continuation fits its prompt. The prompts all have images, or all have none."""
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
        """What the last call kept of the images of each prompt."""
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
    """What `generate` is given of a task's generation_kwargs, and the texts at which an answer ends."""
    unknown = [name for name in settings if name not in (*PASSED_ON, *STOPS, *NO_CONCERN)]
    if unknown:
        raise ValueError(f"generation_kwargs: {unknown[0]}={settings[unknown[0]]!r} is not known: give {PASSED_ON}")
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
