"""Pruned models in vLLM against the same models in transformers: placeholders, indices, answers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm_engine
from method_cases import as_served
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.multimodal import MultiModalMixin
from vllm_engine import EMBEDDED, RANDOM, Engine, Output, Reference

from clustrs import ClustRS
from clustrs.corruptions.images import open_image
from clustrs.embedded import model_folder, samples
from clustrs.pruners.registry import get_method
from clustrs.serving.embeddings import encode_image

pytestmark = pytest.mark.slow
SCENES = samples("scenes")
SIZES = [(400, 200), (300, 500), (90, 260)]
ORIGINAL = {"keep": 64, "positions": "original"}
MANY: dict[str, Any] = {"max_model_len": 2048, "limit_mm_per_prompt": {"image": 150}, "enable_mm_embeds": True}
SERVED: dict[str, dict[str, Any]] = {
    "clustermeans": {},
    "divprune": {},
    "random": {},
    "fastervlm": {},
    "tome": {},
    "denoise": {"inner": "divprune"},
    "mmr": {},
    "scope": {},
    "holov": {},
    "downsample": {},
    "clustrs": {"tau": 2.0},
}


@pytest.fixture(scope="module", params=[*EMBEDDED, *RANDOM])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param in EMBEDDED:
        return model_folder(request.param)
    return vllm_engine.build_random(request.param, tmp_path_factory.mktemp("random") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Any) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def start(folder: Any) -> Iterator[Callable[..., Engine]]:
    """An engine with some settings; the one before is closed."""
    running: list[tuple[str, Engine]] = []

    def engine(settings: Any = None, **options: Any) -> Engine:
        key = repr((settings, options))
        if not running or running[0][0] != key:
            while running:
                running.pop()[1].close()
            overrides = {} if settings is None else {"hf_overrides": {"clustrs": settings}}
            running.append((key, Engine(folder, **overrides, **options)))
        return running[0][1]

    yield engine
    while running:
        running.pop()[1].close()


def open_scene(scene: Any, folder: Any) -> Any:
    """A scene; for models with several crops one that is not square, or the crops would be the same twice, all ties."""
    image = open_image(scene.path)
    return image.resize((400, 200)) if "onevision" in str(folder) else image


def ask_scenes(ask: Callable[..., Output], folder: Any) -> list[Output]:
    """Two questions about every scene."""
    return [ask(text, [open_scene(scene, folder)]) for scene in SCENES for text, _ in scene.questions[::3]]


@pytest.fixture(scope="module")
def plain(start: Callable[..., Engine], folder: Any) -> list[Output]:
    """What vLLM says without our key; its model is its own class."""
    engine = start(enable_mm_embeds=True)
    assert type(engine.model).__module__.startswith("vllm.model_executor.models.")
    return ask_scenes(engine.ask, folder)


def test_without_the_key_it_is_vllm_s_own_model(plain: list[Output], reference: Reference, folder: Any) -> None:
    assert not any(output.indices for output in plain)
    expected = ask_scenes(lambda text, images: reference.ask(text, images, None), folder)
    assert plain == expected


def test_embeddings_are_served_without_the_key(start: Callable[..., Engine], reference: Reference, folder: Any) -> None:
    engine, method = start(enable_mm_embeds=True), ClustRS(keep=16)
    for scene in SCENES[:3]:
        image, text = open_scene(scene, folder), scene.questions[0][0]
        embeddings, before = encode_image(reference.model, reference.processor, image, method)
        expected = reference.ask(text, [image], method, "compact")
        output = engine.ask(text, embeddings)
        assert embeddings.shape[:2] == (1, 16)
        assert before > 16
        assert (output.answer, output.prompt) == (expected.answer, expected.prompt)


@pytest.mark.parametrize(("keep", "positions"), [(16, "compact"), (64, "original")])
def test_as_in_transformers(
    start: Callable[..., Engine], reference: Reference, folder: Any, keep: int, positions: str
) -> None:
    engine, method = start({"keep": keep, "positions": positions}), ClustRS(keep=keep)
    outputs = ask_scenes(engine.ask, folder)
    expected = ask_scenes(lambda text, images: reference.ask(text, images, method, positions), folder)
    assert type(engine.model).__module__ == "clustrs.serving.llava"
    assert_same(outputs, expected, keep, 0.02 if "onevision" in str(folder) else 0)


def assert_same(outputs: list[Output], expected: list[Output], keep: int, moved: float) -> None:
    """Check answers, lengths of prompts and indices, of which a share may be others.

    vLLM's tokens differ from transformers' in the last bits; of 60 such pairs of images with 2,187 tokens, in three a
    label at the edge of a cluster decided another survivor, by passes and by all distances alike.
    """
    assert [(one.answer, one.prompt) for one in outputs] == [(one.answer, one.prompt) for one in expected]
    pairs = [(set(one.indices[0]), set(other.indices[0])) for one, other in zip(outputs, expected, strict=True)]
    assert {len(one) for one, _ in pairs} == {keep}
    assert sum(len(one - other) for one, other in pairs) <= moved * keep * len(pairs)


@pytest.mark.parametrize("name", [*EMBEDDED, "photo-llava"])
def test_embedded_models_in_the_transformers_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Base, MultiModalMixin):  # vLLM would wrap the language model's class in transformers for good
        monkeypatch.setattr(kind, "_decorate_for_torch_compile", lambda self: None)
    folder, method = model_folder(name), ClustRS(keep=16)
    reference = Reference(folder)
    engine = Engine(folder, model_impl="transformers", hf_overrides={"clustrs": {"keep": 16}})
    try:
        assert type(engine.model).__module__ == "clustrs.serving.backend"
        expected = ask_scenes(lambda text, images: reference.ask(text, images, method, "auto"), folder)
        assert_same(ask_scenes(engine.ask, folder), expected, 16, 0.02 if "onevision" in name else 0)
    finally:
        engine.close()


def ask_about_three(ask: Callable[..., Output]) -> Output:
    images = [open_image(scene.path).resize(size) for scene, size in zip(SCENES[:3], SIZES, strict=True)]
    return ask("How many objects are there?", images)


def test_several_images(start: Callable[..., Engine], reference: Reference) -> None:
    engine, method = start(ORIGINAL), ClustRS(keep=64)
    output = ask_about_three(engine.ask)
    assert len(output.indices) == 3
    assert output == ask_about_three(lambda text, images: reference.ask(text, images, method))


def test_images_that_are_cached_have_their_positions(start: Callable[..., Engine], reference: Reference) -> None:
    """The KV cache has the prompt up to its last tokens, so vLLM does not pass on the images' pixels."""
    engine, method, cached = start(ORIGINAL), ClustRS(keep=64), list[int]()
    expected = ask_about_three(lambda text, images: reference.ask(text, images, method))
    first = ask_about_three(engine.ask)
    again = ask_about_three(lambda text, images: engine.ask(text, images, fresh=False, cached=cached))
    assert first.answer == again.answer == expected.answer
    assert again.indices == ()
    assert cached[0] >= 64


def test_other_methods(start: Callable[..., Engine], reference: Reference, folder: Any) -> None:
    engine = start(ORIGINAL)
    image = open_scene(SCENES[0], folder)
    method = engine.model.method
    try:
        for name, parameters in SERVED.items():
            engine.model.method = get_method(name, keep=64, **parameters)
            output = engine.ask("How many objects are there?", [image])
            expected = reference.ask("How many objects are there?", [image], as_served(engine.model.method))
            assert output == expected, name
    finally:
        engine.model.method = method


def test_embeddings_take_consecutive_positions(start: Callable[..., Engine], reference: Reference, folder: Any) -> None:
    """Nothing says where their tokens were: as with compact positions."""
    engine, method = start(ORIGINAL, **MANY), ClustRS(keep=16)
    image, text = open_scene(SCENES[0], folder), SCENES[0].questions[0][0]
    embeddings, _ = encode_image(reference.model, reference.processor, image, method)
    expected = reference.ask(text, [image], method, "compact")
    for fresh in (True, False):
        output = engine.ask(text, embeddings, fresh=fresh)
        assert (output.answer, output.prompt) == (expected.answer, expected.prompt)


def test_prompts_that_span_too_many_positions(start: Callable[..., Engine]) -> None:
    engine = start(ORIGINAL, **MANY)
    longest = engine.llm.model_config.hf_config.get_text_config().max_position_embeddings
    image = open_image(SCENES[0].path).resize((400, 200))
    assert len(engine.model.language_model.model.layers[0].self_attn.rotary_emb.cos_sin_cache) >= 4 * longest
    with pytest.raises(VLLMValidationError, match=r"the images of a prompt span \d+ positions: at most \d+ with 2048"):
        engine.ask("?", [image] * MANY["limit_mm_per_prompt"]["image"])


@pytest.mark.parametrize("more", [0, 100_000])
def test_keep_at_least_all_changes_nothing(
    start: Callable[..., Engine], plain: list[Output], reference: Reference, folder: Any, more: int
) -> None:
    """As many as there are to choose from, and more; LLaVA-OneVision's newlines are not among them."""
    (everything,) = reference.ask("?", [open_scene(SCENES[0], folder)], ClustRS(keep=1.0)).indices
    engine = start({"method": "clustrs", "keep": len(everything) + more, "positions": "original"})
    outputs = ask_scenes(engine.ask, folder)
    assert type(engine.model).__module__ == "clustrs.serving.llava"
    assert [(o.answer, o.prompt) for o in outputs] == [(o.answer, o.prompt) for o in plain]
