"""Pruned Qwen models in vLLM against the same models in transformers: placeholders, indices, positions, answers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from qwen_served import CLOSE, IMAGE, Engine, Output, Question, Reference, check_method, random_image
from tiny_models.qwen import build_served
from vllm.exceptions import VLLMValidationError

from clustrs import ClustRS
from clustrs.pruners.registry import get_method
from clustrs.serving import llava, plugin, qwen_vl

KEEP = 5
CHUNK = 64
"""Tokens per step of the pruned engine: long prompts come in several, and images go to the tower in several batches."""
QUESTIONS = {
    "one image": Question(f"Look {IMAGE} now?", [random_image(5, 7, 0)]),
    "tall": Question(f"Tall {IMAGE} x", [random_image(20, 3, 1)]),
    "wide": Question(f"Wide {IMAGE} x", [random_image(3, 20, 2)]),
    "image first": Question(f"{IMAGE}z", [random_image(7, 7, 3)]),
    "two with a long prefix": Question(
        f"{'long prefix ' * 8}{IMAGE} and {IMAGE} ok", [random_image(12, 3, 4), random_image(2, 9, 5)]
    ),
    "image across steps": Question(f"{'a' * (CHUNK - 3)}{IMAGE} b", [random_image(6, 6, 6)]),
    "three": Question(IMAGE * 3 + "z", [random_image(2, 20, 7), random_image(20, 2, 8), random_image(7, 7, 9)]),
    "smaller than keep": Question(f"s {IMAGE}?", [random_image(2, 2, 10)]),
    "no image": Question("Only text."),
}
TOO_LONG = {
    "positions beyond the model's": Question(
        f"{'b' * 150}{IMAGE * 4} b", [random_image(1, 100, seed) for seed in range(11, 15)]
    ),
}
"""A prompt that fits into the model only when it is pruned."""
ALL = QUESTIONS | TOO_LONG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_served(request.param, tmp_path_factory.mktemp("qwen") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., Engine]]:
    """An engine with some settings; the one before is closed."""
    running: list[tuple[str, Engine]] = []
    plugin.register()

    def engine(settings: Any = None) -> Engine:
        if not running or running[0][0] != repr(settings):
            while running:
                running.pop()[1].close()
            options: dict[str, Any] = {} if settings is None else {"hf_overrides": {"clustrs": settings}}
            if settings == {"keep": KEEP}:
                options |= {"max_num_batched_tokens": CHUNK, "block_size": 32}
            running.append((repr(settings), Engine(folder, **options)))
        return running[0][1]

    yield engine
    while running:
        running.pop()[1].close()


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine]) -> list[Output]:
    """What vLLM says without our key; its model is its own class."""
    engine = start()
    assert type(engine.model).__module__.startswith("vllm.model_executor.models.")
    return engine.ask(list(QUESTIONS.values()))


def assert_equal(outputs: list[Output], expected: list[Output]) -> None:
    for name, output, other in zip(list(ALL)[: len(outputs)], outputs, expected, strict=True):
        assert output == other, name
        assert output.distance(other) < CLOSE, name


def test_without_the_key_it_is_vllm_s_own_model(plain: list[Output], reference: Reference) -> None:
    assert_equal(plain, [reference.ask(question, None) for question in QUESTIONS.values()])


def test_keep_at_least_all_changes_nothing(start: Callable[..., Engine], plain: list[Output]) -> None:
    engine = start({"keep": 1000})
    assert_equal(engine.ask(list(QUESTIONS.values())), plain)
    assert type(engine.model).__module__ == "clustrs.serving.qwen_vl"


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Output]:
    return [reference.ask(question, ClustRS(keep=KEEP)) for question in ALL.values()]


def test_as_in_transformers(start: Callable[..., Engine], expected: list[Output], reference: Reference) -> None:
    """All questions at once, in steps that cut prompts and images apart."""
    engine = start({"keep": KEEP})
    outputs = engine.ask(list(ALL.values()))
    assert type(engine.model).__module__ == "clustrs.serving.qwen_vl"
    assert_equal(outputs, expected)
    for question, output in zip(ALL.values(), outputs, strict=True):
        text = len(reference.processor.tokenizer(question.text)["input_ids"]) - len(question.images)
        sizes = [image.width * image.height // 64 for image in question.images]
        assert output.prompt == text + sum(min(KEEP, size) for size in sizes)


def test_one_at_a_time(start: Callable[..., Engine], expected: list[Output]) -> None:
    engine = start({"keep": KEEP})
    outputs = [engine.ask([question])[0] for question in ALL.values()]
    assert_equal(outputs, expected)
    assert [output.indices for output in outputs] == [output.indices for output in expected]


def test_more_images_than_the_encoder_cache_holds(start: Callable[..., Engine], reference: Reference) -> None:
    """The cache holds the tokens of one step: of some 20 images here."""
    engine = start({"keep": KEEP})
    questions = [Question(f"{i} {IMAGE}?", [random_image(4, 5, 100 + i)]) for i in range(40)]
    assert engine.llm.llm_engine.vllm_config.scheduler_config.encoder_cache_size < 40 * KEEP
    for question, output in zip(questions, engine.ask(questions), strict=True):
        expected = reference.ask(question, ClustRS(keep=KEEP))
        assert output == expected
        assert output.distance(expected) < CLOSE


def test_the_same_image_again(start: Callable[..., Engine], expected: list[Output]) -> None:
    engine, name = start({"keep": KEEP}), "two with a long prefix"
    index = list(QUESTIONS).index(name)
    (first,) = engine.ask([QUESTIONS[name]])
    (again,) = engine.ask([QUESTIONS[name]], fresh=False)
    assert first.cached == 0
    assert again.cached is not None
    assert again.cached >= 96  # with survivors among them: the first image follows 96 letters and a token
    assert again.indices == []
    assert first == again == expected[index]
    assert again.distance(expected[index]) < CLOSE


def test_the_same_image_after_another_text(start: Callable[..., Engine], reference: Reference) -> None:
    """The survivors come from the encoder's cache, and their positions depend on the text before."""
    engine, image = start({"keep": KEEP}), random_image(6, 9, 20)
    engine.ask([Question(f"x {IMAGE}?", [image])])
    question = Question(f"What does this show? {IMAGE}", [image])
    (output,) = engine.ask([question], fresh=False)
    wanted = reference.ask(question, ClustRS(keep=KEEP))
    assert output.indices == []
    assert output == wanted
    assert output.distance(wanted) < CLOSE


@pytest.mark.parametrize("name", ["divprune", "random", "fastervlm", "tome", "mmr", "scope", "holov", "downsample"])
def test_other_methods(start: Callable[..., Engine], reference: Reference, name: str) -> None:
    question = QUESTIONS["two with a long prefix"]
    check_method(start({"keep": KEEP}), reference, question, get_method(name, keep=KEEP))


def test_what_a_request_may_not_have(start: Callable[..., Engine]) -> None:
    engine = start({"keep": KEEP})
    about = {"fps": 2.0, "duration": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
    video = (np.zeros((4, 16, 16, 3), np.uint8), {**about, "video_backend": "opencv", "do_sample_frames": False})
    request = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>", "multi_modal_data": {"video": [video]}}
    with pytest.raises(VLLMValidationError, match="At most 0 video"):
        engine.llm.generate([request], use_tqdm=False)
    strips = [random_image(1, 100, seed) for seed in range(16)]
    with pytest.raises(VLLMValidationError, match="span 1600 positions: at most 1536 with 512 tokens"):
        engine.ask([Question(IMAGE * 16, strips)])
    assert engine.ask([QUESTIONS["one image"]])[0].prompt == 12 + KEEP


def vllm_config(**changes: Any) -> Any:
    """The part of vLLM's config that is looked at."""
    given = {
        "pipeline_parallel_size": 1,
        "speculative_config": None,
        "enable_dbo": False,
        "mm_encoder_tp_mode": "weights",
        "enable_mm_embeds": False,
        "video_pruning_rate": None,
        "compile_mm_encoder": False,
        "cudagraph_mm_encoder": False,
        **changes,
    }
    images = SimpleNamespace(**given, is_multimodal_pruning_enabled=lambda: bool(given["video_pruning_rate"]))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**given),
        compilation_config=SimpleNamespace(**given),
        model_config=SimpleNamespace(multimodal_config=images),
        speculative_config=given["speculative_config"],
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("speculative_config", object()),
        ("enable_dbo", True),
        ("mm_encoder_tp_mode", "data"),
        ("enable_mm_embeds", True),
        ("video_pruning_rate", 0.5),
        ("compile_mm_encoder", True),
        ("cudagraph_mm_encoder", True),
    ],
)
def test_options_that_stop_at_start(option: str, value: Any) -> None:
    qwen_vl.PrunedQwen.check_options(vllm_config())
    given = vllm_config(**{option: value})
    with pytest.raises(ValueError, match=f"^{option} can't be combined with pruning at original positions"):
        qwen_vl.PrunedQwen.check_options(given)
    if option in ("pipeline_parallel_size", "speculative_config", "enable_dbo"):
        with pytest.raises(ValueError, match=f"^{option} can't be combined with pruning at original positions"):
            llava.PrunedTower.check_options(given)
    else:
        llava.PrunedTower.check_options(given)


def test_a_tower_without_full_attention_stops_at_start() -> None:
    vision = SimpleNamespace(fullatt_block_indexes=[7])
    model: Any = SimpleNamespace(
        visual=SimpleNamespace(blocks=[None] * 3), config=SimpleNamespace(vision_config=vision)
    )
    with pytest.raises(ValueError, match="fullatt_block_indexes names no block"):
        qwen_vl.PrunedQwen25VL.scoring_attention(model)


def test_batches_for_the_tower() -> None:
    model: Any = SimpleNamespace(visual=SimpleNamespace(spatial_merge_unit=4), most_tokens=10)
    grids = [[1, 4, 4], [1, 4, 4], [1, 4, 4], [1, 2, 100], [1, 4, 6], [1, 4, 4]]
    assert list(qwen_vl.PrunedQwen._batches(model, grids)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
