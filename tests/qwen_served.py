"""Small random Qwen models as vLLM loads them, an engine in this process, and the same questions to transformers.

A patch has 4 x 4 pixels and a token 2 x 2 patches, so an image of 40 x 56 pixels has 5 x 7 tokens. Needs vLLM.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as tf
from method_cases import as_served
from PIL import Image
from tiny_models.qwen import TOKEN
from torch import Tensor
from vllm_engine import InProcess, recorded

from clustrs.pruners.base import Pruner

NEW_TOKENS = 8
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
FPS = 2.0
CLOSE = 1e-4
"""Log-probabilities differ by less; with one survivor's position or features wrong, by more than 0.01."""


def random_image(height: int, width: int, seed: int) -> Image.Image:
    """An image of so many tokens, which no processor has to resize."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height * TOKEN, width * TOKEN, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


MISSING = object()
"""A request without a budget; None is a wrong one."""


@dataclass(frozen=True)
class Question:
    text: str
    images: Sequence[Image.Image] = ()
    keep: Any = MISSING
    videos: Sequence[np.ndarray] = ()

    def clips(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """The videos as vLLM takes frames that are sampled already."""
        return [(video, {**about(video), "do_sample_frames": False}) for video in self.videos]


def about(video: np.ndarray) -> dict[str, Any]:
    count = len(video)
    times = {"fps": FPS, "duration": count / FPS, "total_num_frames": count, "frames_indices": list(range(count))}
    return {**times, "video_backend": "opencv"}


def random_video(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    """Frames of so many tokens, two to a token."""
    shape = (frames, height * TOKEN, width * TOKEN, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@dataclass(frozen=True)
class Output:
    """An answer's token ids, log-probabilities by step and token, the length of the prompt, how much of it was cached,
    and the indices that were kept of each image."""

    answer: list[int]
    logprobs: list[dict[int, float]] = field(compare=False)
    prompt: int
    cached: int | None = field(default=None, compare=False)
    indices: list[list[int]] | None = field(default=None, compare=False)

    def distance(self, other: "Output") -> float:
        """The largest difference of log-probabilities that both have."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(mine[token] - theirs[token]) for mine, theirs in pairs for token in mine.keys() & theirs.keys())


class Engine(InProcess):
    """A vLLM engine that is asked several questions at once."""

    def __init__(self, folder: Path, **options: Any) -> None:
        shared = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0}
        super().__init__(folder, **{"limit_mm_per_prompt": {"image": 20, "video": 0}} | shared | options)

    def ask(self, questions: Sequence[Question], fresh: bool = True) -> list[Output]:
        """Ask all at once; with empty caches if `fresh`. Indices are known of a question that is asked alone."""
        from vllm import SamplingParams

        if fresh:
            self.empty_caches()
        requests: list[dict[str, Any]] = [
            {
                "prompt": q.text,
                "multi_modal_data": {"image": list(q.images)} | ({"video": q.clips()} if q.videos else {}),
            }
            for q in questions
        ]
        for request, question in zip(requests, questions, strict=True):
            if question.keep is not MISSING:
                request["mm_processor_kwargs"] = {"keep": question.keep}
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        with recorded() as seen:
            outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [
            Output(
                list(out.outputs[0].token_ids),
                [{token: float(entry.logprob) for token, entry in step.items()} for step in out.outputs[0].logprobs],
                len(out.prompt_token_ids),
                out.num_cached_tokens,
                [list(image) for image in seen] if len(questions) == 1 else None,
            )
            for out in outputs
        ]


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = tf.AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.processor = tf.AutoProcessor.from_pretrained(folder)

    def ask(self, question: Question, method: Pruner | None) -> Output:
        images = list(question.images) or None
        given: dict[str, Any] = {}
        if question.videos:
            given = {"videos": list(question.videos), "video_metadata": list(map(about, question.videos))}
            given["do_sample_frames"] = False
        inputs = self.processor(text=[question.text], images=images, return_tensors="pt", **given)
        length = inputs["input_ids"].shape[1]
        if method is None:
            return self.output(self.generate(self.model, inputs), length, length)
        with method(self.model, attention="plain") as handle:
            out = self.generate(handle.model, inputs)
            last = handle.last if images or question.videos else []
        dropped = sum(image.placeholders - image.kept for image in last)
        indices = [image.selection.indices.tolist() for image in last]
        return self.output(out, length, length - dropped, indices)

    def generate(self, model: Any, inputs: Any) -> Any:
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "eos_token_id": None}
        with torch.no_grad():
            return model.generate(**inputs, **length, do_sample=False, output_logits=True, return_dict_in_generate=True)

    def output(self, out: Any, start: int, prompt: int, indices: list[list[int]] | None = None) -> Output:
        steps: list[Tensor] = [logits[0].float().log_softmax(-1) for logits in out.logits]
        logprobs = [dict(enumerate(step.tolist())) for step in steps]
        return Output(out.sequences[0, start:].tolist(), logprobs, prompt, indices=indices)


def check_method(engine: Engine, reference: Reference, question: Question, method: Pruner) -> None:
    """Ask an engine with another method in place of its own: answer and kept tokens are those of the reference."""
    model = engine.model
    before, model.method = model.method, method
    try:
        (output,) = engine.ask([question])
    finally:
        model.method = before
    expected = reference.ask(question, as_served(method))
    assert output == expected
    assert output.indices == expected.indices
    assert output.distance(expected) < CLOSE
