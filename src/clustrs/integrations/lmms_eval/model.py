"""The classes that lmms-eval creates: requests in, answers out. Everything else is in `engine` and `requests`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from tqdm import tqdm

from clustrs.evaluation.store import identity
from clustrs.integrations.lmms_eval.arguments import read_arguments
from clustrs.integrations.lmms_eval.engine import Engine, Messages, Prompt, Tally, VisualCount, user_turn


@dataclass(frozen=True)
class Ask:
    """One request: where its document is, its messages, and a task's generation_kwargs or the continuation."""

    task: str
    document: Any
    where: str
    messages: Messages
    settings: Any


class SimpleModel(lmms):
    """A pruned model for tasks that have a text and a list of images: `lmms-eval --force_simple`.

    These are the tasks of `output_type: loglikelihood` and `multiple_choice`; `ChatModel` has the others.
    """

    is_simple = True
    settings_index = 1
    """Of a task's generation_kwargs among the arguments of a request."""

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
        self.tally = Tally()

    @property
    def batch_sizes(self) -> dict[str, Any]:
        """Return the settings for the result file; lmms-eval stores nothing else about a model."""
        return {"settings": {**self.arguments.to_json(), **versions(), "tasks": self.tally.to_json()}}

    def clean(self) -> None:
        """Free the model: lmms-eval may start a judge on the same device when the answers are there."""
        self.engine.close()
        del self.engine
        super().clean()

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """The answers, in the order of the requests."""

        def answer(asks: Sequence[Ask], prompts: Sequence[Prompt]) -> Iterator[tuple[GenerationResult, VisualCount]]:
            for one in self.engine.generate(prompts, asks[0].settings):
                counts = TokenCounts(input_tokens=one.input_tokens, output_tokens=one.output_tokens)
                yield GenerationResult(text=one.text, token_counts=counts), one.visual

        alike = [identity(request.args[self.settings_index]) for request in requests]
        return self._run(requests, alike, self.read_generation, answer)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """For each continuation its mean negative log-likelihood, and whether greedy decoding would give it.

        lmms-eval takes the choice with the smallest number, and its own models return this loss. A bare pair would not
        arrive: version 0.7.3 makes a text of it. What stands in a GenerationResult is left as it is.
        """

        def fit(asks: Sequence[Ask], prompts: Sequence[Prompt]) -> Iterator[tuple[GenerationResult, VisualCount]]:
            for one in self.engine.likelihoods(prompts, [ask.settings for ask in asks]):
                yield GenerationResult(text=(one.loss, one.greedy)), one.visual

        return self._run(requests, [""] * len(requests), self.read_continuation, fit)

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Not supported: the next question of such a task depends on the last answer."""
        raise NotImplementedError("clustrs does not run tasks of output_type generate_until_multi_round")

    def read_generation(self, args: Any) -> Ask:
        """A request of a task that has a text and images."""
        text, settings, doc_to_visual, doc_id, task, split = args
        document = self.task_dict[task][split][doc_id]
        return Ask(task, document, f"{task} {doc_id}", user_turn(doc_to_visual(document), text), settings)

    def read_continuation(self, args: Any) -> Ask:
        """A request for the likelihood of a continuation; without a document, its text alone."""
        if len(args) == 2:
            return Ask("text", {}, "text", user_turn([], args[0] or " "), args[1])
        text, target, doc_to_visual, doc_id, task, split = args
        document = self.task_dict[task][split][doc_id]
        continuation = target if isinstance(target, str) else str(target(document))
        return Ask(task, document, f"{task} {doc_id}", user_turn(doc_to_visual(document), text), continuation)

    def _run(
        self,
        requests: Sequence[Instance],
        alike: Sequence[str],
        read: Callable[[Any], Ask],
        answer: Callable[[Sequence[Ask], Sequence[Prompt]], Iterator[tuple[Any, VisualCount]]],
    ) -> list[Any]:
        """The results of all requests, in batches of those that are alike. Images are opened as they are needed."""
        results: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="clustrs", disable=self.rank != 0) as bar:
            for batch in batches(alike, self.arguments.batch_size):
                asks = [read(requests[index].args) for index in batch]
                prompts = [self.engine.builder.build(ask.messages, ask.document, ask.where) for ask in asks]
                for part in parts(prompts):
                    answers = answer([asks[i] for i in part], [prompts[i] for i in part])
                    for i, (result, visual) in zip(part, answers, strict=True):
                        results[batch[i]] = result
                        self.tally.add(asks[i].task, visual)
                bar.update(len(batch))
        return results


class ChatModel(SimpleModel):
    """A pruned model for tasks in messages, which most tasks of lmms-eval can be asked in."""

    is_simple = False
    settings_index = 2

    def read_generation(self, args: Any) -> Ask:
        """A request of a task in messages."""
        _, doc_to_messages, settings, doc_id, task, split = args
        document = self.task_dict[task][split][doc_id]
        return Ask(task, document, f"{task} {doc_id}", doc_to_messages(document), settings)


def batches(alike: Sequence[str], size: int) -> Iterator[list[int]]:
    """The indices of requests that may be answered together, in groups of a given size."""
    groups: dict[str, list[int]] = {}
    for index, kind in enumerate(alike):
        groups.setdefault(kind, []).append(index)
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))


def parts(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The indices of the prompts with images, and of those without: a processor takes no mixture."""
    both = [[i for i, prompt in enumerate(prompts) if bool(prompt.images) == images] for images in (True, False)]
    return [part for part in both if part]


def versions() -> dict[str, str]:
    """The versions that decide answers."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lmms_eval": metadata.version("lmms_eval"),
    }
