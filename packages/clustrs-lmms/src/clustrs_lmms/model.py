"""The classes that lmms-eval creates: requests in, answers out. Everything else is in `engine`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from tqdm import tqdm

from clustrs.evaluation.store import identity
from clustrs_lmms.engine import Engine, Prompt, Tally, VisualCount, read_arguments, user_turn

Answering = Callable[[Sequence[Any], Sequence[Prompt]], Iterator[tuple[GenerationResult, VisualCount]]]
"""Answers prompts, each with a task's generation_kwargs or a continuation."""


class SimpleModel(lmms):
    """A pruned model for tasks of a text and a list of images, likelihoods among them: `lmms-eval --force_simple`."""

    is_simple = True
    settings_index = 1  # of a task's generation_kwargs among the arguments of a request

    def __init__(self, **model_args: Any) -> None:
        super().__init__()
        arguments = read_arguments(model_args)
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            arguments = replace(arguments, device=str(self.accelerator.device))
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self.arguments = arguments
        self.engine = Engine(arguments)
        self.device: torch.device = self.engine.model.device
        # Read now: lmms-eval asks for the settings after `clean`.
        self.chosen = {name: getattr(self.engine.handle, name) for name in ("positions", "attention")}
        self.tally = Tally()

    @property
    def batch_sizes(self) -> dict[str, Any]:
        """Return the settings for the result file; lmms-eval stores nothing else about a model."""
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "lmms_eval")}
        own = {"chosen": self.chosen, **versions, "tasks": self.tally.to_json()}
        return {"settings": {**self.arguments.to_json(), **own}}

    def clean(self) -> None:
        """Free the model: lmms-eval may start a judge on the same device when the answers are there."""
        self.engine.close()
        del self.engine
        super().clean()

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        def answer(settings: Sequence[Any], prompts: Sequence[Prompt]) -> Iterator[tuple[Any, VisualCount]]:
            for one in self.engine.generate(prompts, settings[0]):
                counts = TokenCounts(input_tokens=one.input_tokens, output_tokens=one.output_tokens)
                yield GenerationResult(text=one.text, token_counts=counts), one.visual

        return self._run(requests, [identity(request.args[self.settings_index]) for request in requests], answer)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Return for each continuation its mean negative log-likelihood, and whether greedy decoding would give it.

        lmms-eval takes the smallest. Of a bare pair version 0.7.3 makes a text; a GenerationResult is left as it is.
        """

        def fit(continuations: Sequence[Any], prompts: Sequence[Prompt]) -> Iterator[tuple[Any, VisualCount]]:
            for one in self.engine.likelihoods(prompts, continuations):
                yield GenerationResult(text=(one.loss, one.greedy)), one.visual

        return self._run(requests, [""] * len(requests), fit)

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        raise NotImplementedError("clustrs does not run tasks of output_type generate_until_multi_round")

    def _read(self, args: Any) -> tuple[str, Any, Prompt]:
        """Read a request: its task, its generation_kwargs or continuation, and its prompt."""
        if len(args) == 2:  # a text and its continuation
            return "text", args[1], self.engine.builder.build(user_turn([], args[0] or " "), {}, "text")
        text, second, third, doc_id, task, split = args
        document = self.task_dict[task][split][doc_id]
        if callable(third):  # of a task with a text and images: generation_kwargs or continuation, and doc_to_visual
            messages = user_turn(third(document), text)
            settings = str(second(document)) if callable(second) else second
        else:  # of a task in messages: doc_to_messages and generation_kwargs
            messages, settings = second(document), third
        return task, settings, self.engine.builder.build(messages, document, f"{task} {doc_id}")

    def _run(self, requests: Sequence[Instance], alike: Sequence[str], answer: Answering) -> list[Any]:
        """Return the results of all requests, asked in batches of those that are alike, with or without images."""
        results: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="clustrs", disable=self.rank != 0) as bar:
            for batch in batches(alike, self.arguments.batch_size):
                asked = [(index, *self._read(requests[index].args)) for index in batch]
                for images in (True, False):
                    part = [one for one in asked if bool(one[-1].images) == images]
                    answers = answer([one[2] for one in part], [one[3] for one in part]) if part else ()
                    for (index, task, *_), (result, visual) in zip(part, answers, strict=True):
                        results[index] = result
                        self.tally.add(task, visual)
                bar.update(len(batch))
        return results


class ChatModel(SimpleModel):
    """A pruned model for tasks in messages, which most tasks of lmms-eval can be asked in."""

    is_simple = False
    settings_index = 2


def batches(alike: Sequence[str], size: int) -> Iterator[list[int]]:
    groups: dict[str, list[int]] = {}
    for index, kind in enumerate(alike):
        groups.setdefault(kind, []).append(index)
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))
