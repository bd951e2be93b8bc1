"""Families in vLLM's Transformers backend, pruned, against the same models in transformers; Qwen3.5 in its class."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import tiny_models
import torch
from qwen_served import IMAGE, VIDEO, Engine, Output, Question, Reference, random_video
from tiny_models import gemma4, make_image, qwen, tiled
from transformers.models.smolvlm import processing_smolvlm
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.multimodal import MultiModalMixin

from clustrs import ClustRS
from clustrs.serving import plugin

pytestmark = pytest.mark.slow
KEEP = 7
CLOSE = 1e-4
FAMILIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "llava": (partial(tiny_models.build, "llava", "dinov2", heads=1), "<image>"),
    "llava_next": (partial(tiny_models.build, "llava_next", "clip", heads=1), "<image>"),
    "internvl": (partial(tiled.build, "internvl", heads=1, videos=True), "<IMG_CONTEXT>"),
    "idefics3": (partial(tiled.build, "idefics3", heads=1), "<image>"),
    "smolvlm": (partial(tiled.build, "smolvlm", heads=1, videos=True), "<image>"),
    "qwen2_vl": (partial(qwen.build_served, "qwen2_vl"), IMAGE),
    "gemma4": (partial(gemma4.build_served, "small"), "<image>"),
}
"""What saves a model of each family, and an image in its prompts. LLaVA has a tower that no class of vLLM's has;
Gemma 4 has a class."""


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Served"]:
    build, image = FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:  # SmolVLM's processor writes numbers of frames as words
        patch.setattr(processing_smolvlm, "num2words", str)
        yield from start(build, image, tmp_path_factory.mktemp(request.param), patch)


def start(build: Callable[[Path], object], image: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator["Served"]:
    build(folder)
    plugin.register()
    settings = {"keep": KEEP, "keep_range": [3, 1000]}
    for kind in (Base, MultiModalMixin):  # vLLM would wrap the language model's class in transformers for good
        patch.setattr(kind, "_decorate_for_torch_compile", lambda self: None)
    engine = Engine(folder, hf_overrides={"clustrs": settings})
    yield Served(engine, Reference(folder), image)
    engine.close()


class Served:
    """An engine, the same model in transformers, and questions to both."""

    def __init__(self, engine: Engine, reference: Reference, image: str) -> None:
        self.engine, self.reference = engine, reference
        one, other = make_image(40, 60, 1), make_image(64, 30, 2)
        self.questions = [
            Question(f"Look {image} now?", [one]),
            Question(f"first {image} then {image} ok?", [other, one]),
            Question("Only text."),
        ]

    def expected(self, question: Question, keep: int) -> Output:
        return self.reference.ask(question, ClustRS(keep=keep))


def assert_same(found: Output, expected: Output) -> None:
    assert (found.answer, found.prompt) == (expected.answer, expected.prompt)
    assert found.distance(expected) < CLOSE


def test_as_in_transformers(served: Served) -> None:
    module = type(served.engine.model).__module__
    assert (
        module == f"clustrs.serving.{'gemma4' if served.reference.model.config.model_type == 'gemma4' else 'backend'}"
    )
    for question in served.questions:
        (found,) = served.engine.ask([question])
        expected = served.expected(question, KEEP)
        assert_same(found, expected)
        if question.images:
            assert found.indices == expected.indices


def test_budgets_of_requests_in_one_batch(served: Served) -> None:
    """Each gets its own number of tokens, though the image is the same; also all of them, and again from caches."""
    keeps = [3, 7, 12, 1000]
    questions = [Question(q.text, q.images, keep) for q in served.questions[:2] for keep in keeps]
    for fresh in (True, False):
        for question, found in zip(questions, served.engine.ask(questions, fresh=fresh), strict=True):
            assert question.keep is not None
            assert_same(found, served.expected(question, question.keep))


@pytest.mark.parametrize("keep", [2, 1001, 5.0, 0.5, True, "7", None, [7], float("nan")])
def test_a_wrong_budget_fails_alone(served: Served, keep: object) -> None:
    question = served.questions[0]
    with pytest.raises(VLLMValidationError, match=r"keep must be a count from 3 to 1000, got "):
        served.engine.ask([Question(question.text, question.images, keep)])
    assert_same(served.engine.ask([question])[0], served.expected(question, KEEP))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen35_with_all_tokens_is_vllm_s_own(family: str, tmp_path: Path) -> None:
    """vLLM's linear attention on a CPU takes bfloat16 alone, too coarse to compare answers with transformers."""
    qwen.build_served(family, tmp_path)
    questions = [Question(f"Look {IMAGE} now?", [make_image(40, 60, 1)]), Question("Only text.")]
    questions.append(Question(f"Look {VIDEO} now?", videos=[random_video(4, 3, 5, 3)]))
    limits = {"limit_mm_per_prompt": {"image": 1, "video": 1}}
    plain = Engine(tmp_path, dtype="bfloat16", **limits)
    own = plain.ask(questions)
    plain.close()
    plugin.register()
    engine = Engine(tmp_path, dtype="bfloat16", hf_overrides={"clustrs": {"keep": 1000}}, **limits)
    try:
        assert [(one.answer, one.prompt) for one in engine.ask(questions)] == [(one.answer, one.prompt) for one in own]
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen35_gets_what_it_does_in_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings and positions at the language model, in float32; without its linear attention."""
    monkeypatch.setattr(QwenGatedDeltaNetAttention, "forward_cpu", lambda self, hidden: torch.zeros_like(hidden))
    qwen.build_served(family, tmp_path)
    plugin.register()
    limits = {"limit_mm_per_prompt": {"image": 1, "video": 1}}
    engine = Engine(tmp_path, hf_overrides={"clustrs": {"keep": KEEP, "keep_range": [3, 1000]}}, **limits)
    reference = Reference(tmp_path)
    try:
        for keep in (3, 12, 1000):
            text, video = f"Look {IMAGE} and {VIDEO}?", random_video(4, 4, 6, 0)
            question = Question(text, [make_image(40, 60, 1)], keep, [video])
            with first_call(engine.model.language_model.model) as served:
                (found,) = engine.ask([question])
            with first_call(reference.model.model.language_model) as wanted:
                expected = reference.ask(question, ClustRS(keep=keep))
            assert (found.prompt, sorted(found.indices or [])) == (expected.prompt, sorted(expected.indices or []))
            assert torch.equal(served["positions"][:, : found.prompt], wanted["position_ids"][-3:, 0])
            assert (served["inputs_embeds"][: found.prompt] - wanted["inputs_embeds"][0]).abs().max() < CLOSE
    finally:
        engine.close()


@contextmanager
def first_call(module: Any) -> Iterator[dict[str, Any]]:
    """What a module's forward gets first, by name."""
    forward, seen = module.forward, dict[str, Any]()

    def listening(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(forward).bind(*args, **kwargs).arguments
        if not seen:
            seen.update({name: part.clone() for name, part in given.items() if isinstance(part, torch.Tensor)})
        return forward(*args, **kwargs)

    module.forward = listening
    try:
        yield seen
    finally:
        del module.forward
