"""Videos of pruned Qwen models in vLLM against the same models in transformers: indices, positions, answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from prometheus_client import REGISTRY
from qwen_served import CLOSE, IMAGE, VIDEO, Engine, Question, Reference, check_method, random_image, random_video
from tiny_models.qwen import build_served
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.multimodal import MultiModalMixin

from clustrs import ClustRS
from clustrs.pruners.registry import get_method
from clustrs.serving import plugin

KEEP, STEP = 7, 64
QUESTIONS = {
    "one": Question(f"Look {VIDEO} now?", videos=[random_video(6, 4, 6, 0)]),
    "odd frames, first": Question(f"{VIDEO}z", videos=[random_video(5, 7, 3, 1)]),
    "two and an image": Question(
        f"a {VIDEO} b {IMAGE} c {VIDEO} d",
        [random_image(5, 7, 2)],
        videos=[random_video(4, 3, 5, 3), random_video(4, 5, 4, 4)],
    ),
    "across steps": Question(f"{'a' * (STEP - 3)}{VIDEO} b", videos=[random_video(4, 6, 6, 5)]),
    "smaller than keep": Question(f"s {VIDEO}?", videos=[random_video(2, 2, 2, 6)]),
    "longer than a step": Question(f"l {VIDEO}?", videos=[random_video(6, 6, 6, 7)]),
    "another budget": Question(f"Look {VIDEO} now?", videos=[random_video(6, 4, 6, 0)], keep=3),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_served(request.param, tmp_path_factory.mktemp("qwen") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    plugin.register()
    settings = {"keep": KEEP, "keep_range": [1, 1000]}
    options = {"limit_mm_per_prompt": {"image": 2, "video": 2}, "max_num_batched_tokens": STEP, "block_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Base, MultiModalMixin):  # vLLM would wrap the language model's class in transformers for good
            patch.setattr(kind, "_decorate_for_torch_compile", lambda self: None)
        running = Engine(folder, hf_overrides={"clustrs": settings}, **options)
    yield running
    running.close()


def test_as_in_transformers(engine: Engine, reference: Reference, folder: Path) -> None:
    """All at once, in steps that cut prompts and videos apart, then one at a time."""
    expected = {
        name: reference.ask(one, ClustRS(keep=one.keep if isinstance(one.keep, int) else KEEP))
        for name, one in QUESTIONS.items()
    }
    module = "backend" if folder.name == "qwen2_vl" else "qwen_vl"
    assert type(engine.model).__module__ == f"clustrs.serving.{module}"
    for name, output in zip(QUESTIONS, engine.ask(list(QUESTIONS.values())), strict=True):
        assert output == expected[name], name
        assert output.distance(expected[name]) < CLOSE, name
    for name in ("one", "two and an image"):
        (output,) = engine.ask([QUESTIONS[name]])
        assert output == expected[name], name
        assert sorted(output.indices or []) == sorted(expected[name].indices or []), name


@pytest.mark.parametrize("text", [f"long {VIDEO} xy", f"long {VIDEO}"])
def test_more_frames_than_tokens_to_a_side(engine: Engine, reference: Reference, folder: Path, text: str) -> None:
    if folder.name == "qwen2_5_vl":
        pytest.skip("vLLM and transformers count the text after such a video differently, also unpruned")
    question = Question(text, videos=[random_video(12, 2, 3, 9)])
    (output,), expected = engine.ask([question]), reference.ask(question, ClustRS(keep=KEEP))
    assert output == expected
    assert output.distance(expected) < CLOSE


def test_metrics(engine: Engine) -> None:
    """Tokens before and after, also of a video that the processor's cache has."""
    question = Question(f"{VIDEO} {VIDEO}", videos=[random_video(4, 3, 5, 10), random_video(2, 2, 2, 11)], keep=6)
    names = [("visual_tokens_before", {}), ("visual_tokens_after", {}), ("requests", {"keep": "6"})]
    for fresh in (True, False):
        before = [REGISTRY.get_sample_value(f"clustrs:{name}_total", labels) or 0 for name, labels in names]
        engine.ask([question], fresh=fresh)
        after = [REGISTRY.get_sample_value(f"clustrs:{name}_total", labels) or 0 for name, labels in names]
        assert [new - old for new, old in zip(after, before, strict=True)] == [2 * 15 + 4, 6 + 4, 1]


def test_keep_all(engine: Engine, reference: Reference) -> None:
    """With every token, answers are those of the unpruned model."""
    for name in ("one", "odd frames, first"):
        question = QUESTIONS[name]
        (output,) = engine.ask([Question(question.text, videos=question.videos, keep=1000)])
        expected = reference.ask(question, None)
        assert output == expected, name
        assert output.distance(expected) < CLOSE, name


@pytest.mark.parametrize("name", ["tome", "divprune"])
def test_other_methods(engine: Engine, reference: Reference, name: str) -> None:
    check_method(engine, reference, QUESTIONS["one"], get_method(name, keep=KEEP))


def test_the_same_video_again(engine: Engine) -> None:
    question = QUESTIONS["across steps"]
    (first,) = engine.ask([question])
    (again,) = engine.ask([question], fresh=False)
    assert (first.cached, again.indices) == (0, [])
    assert again == first


def test_positions_that_outrun_the_table(engine: Engine) -> None:
    question = Question(f"{VIDEO * 2}", videos=[random_video(1000, 2, 2, 8)] * 2)
    with pytest.raises(VLLMValidationError, match=r"span \d+ positions: at most \d+"):
        engine.ask([question])
    engine.ask([QUESTIONS["one"]])
