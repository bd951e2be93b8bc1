"""The models and images that come with the package."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from clustrs import ClustRS, NoPruning, Random
from clustrs.cli import main
from clustrs.corruptions.images import open_image
from clustrs.embedded import (
    DEFAULT,
    EMBEDDED,
    INSTALL,
    MODELS,
    default_model,
    default_task,
    embedded_model,
    image_path,
    list_known,
    model_and_task,
    model_folder,
    samples,
)
from clustrs.evaluation.tasks import get_task
from clustrs.models import ask as sharing
from clustrs.models.ask import ask, chat_prompt
from clustrs.models.load import load_model
from clustrs.plugins import plugin_entries
from recipes.models import tokenizer as word_level
from recipes.photo.models import vocabulary as photo_vocabulary

Run = Callable[..., tuple[int, str, str]]
QUESTION = "How many objects are there?"
CLASSES = {"llava": "LlavaForConditionalGeneration", "llava_onevision": "LlavaOnevisionForConditionalGeneration"}
STORED = {"photo-llava": torch.float16, "mini-onevision-clips": torch.float16}
"""Other models are stored in float32."""
SIZES = {"photo-llava": 40e6}
"""The largest that a folder may be, in bytes; others 20 million."""
TOWERS = {"photo-llava": ("embeddings.patch_embeddings.projection.weight", "layernorm.weight")}
TOWER = (
    "vision_model.embeddings.patch_embedding.weight",
    "vision_model.encoder.layers.0.self_attn.k_proj.weight",
    "vision_model.post_layernorm.weight",
)
"""Names of tensors of CLIP's and SigLIP's towers; photo-llava's is a DINOv2."""
TOKENS = {"photo-llava": [(24, 24)], "mini-llava": [(24, 24)], "mini-onevision": [(27, 27), (27, 27)]}


SHIPPED = tuple(model.name for model in EMBEDDED if not model.built)
"""tests/models/test_smol.py tests the one that is built."""


@pytest.fixture(scope="module", params=SHIPPED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> tuple[Any, Any]:
    return load_model(name)


def test_folder_is_small_and_safe(name: str) -> None:
    files = list(model_folder(name).iterdir())
    assert sum(file.stat().st_size for file in files) <= SIZES.get(name, 20e6)
    assert {file.suffix for file in files} <= {".json", ".jinja", ".safetensors"}


def test_tensors_have_the_published_names(name: str) -> None:
    with safe_open(model_folder(name) / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert {stored.get_tensor(key).dtype for key in names} == {STORED.get(name, torch.float32)}
    expected = [
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "language_model.lm_head.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.linear_2.bias",
        *(f"vision_tower.{key}" for key in TOWERS.get(name, TOWER)),
    ]
    assert set(expected) <= names
    parts = r"(language_model|multi_modal_projector|vision_tower|image_newline)\b"
    assert all(re.match(parts, key) for key in names)


def test_loads_as_any_checkpoint_does(name: str) -> None:
    import transformers as tf

    model = tf.AutoModelForImageTextToText.from_pretrained(model_folder(name))
    assert type(model).__name__ == CLASSES[model.config.model_type]
    assert model.dtype == torch.float32
    if model.config.model_type == "llava":
        processor = tf.AutoProcessor.from_pretrained(model_folder(name))
        assert type(processor).__name__ == "LlavaProcessor"
    stored = json.loads((model_folder(name) / "processor_config.json").read_text())
    assert stored["processor_class"] in ("LlavaProcessor", "LlavaOnevisionProcessor")


def test_tokens_a_crop(name: str, loaded: tuple[Any, Any]) -> None:
    if default_task(name) == "clips":
        task: Any = get_task("clips", limit=1)
        answer = ask(*loaded, task.frames("clip-0000"), task.items[0].question, NoPruning(), 2)
        assert answer.unknown_words == ()
        assert [frame.grids for frame in answer.frames] == [[(7, 7)]] * 8
        assert answer.visual_tokens == 8 * 50
        return
    sample = samples(default_task(name))[0]
    answer = ask(*loaded, open_image(sample.path), sample.questions[0][0], NoPruning(), 2)
    assert answer.unknown_words == ()
    assert answer.image.grids == TOKENS[name]


def right(loaded: tuple[Any, Any], methods: Sequence[Any], task: Any) -> list[float]:
    """The share of right answers with each method; an image is encoded once for all."""
    good: list[list[float]] = [[] for _ in methods]
    for image, group in groupby(task.items, key=lambda item: item.image):
        items = list(group)
        shown = task.frames(image) if hasattr(task, "frames") else [task.open(image)]
        prompts = [(0, chat_prompt(loaded[1], item.question, images=len(shown))) for item in items]
        encoded = sharing.encode(*loaded, [shown if len(shown) > 1 else shown[0]], prompts)
        for scores, method in zip(good, methods, strict=True):
            replies = sharing.reply(*loaded, encoded, method, 3)
            scores += [task.score(item, reply.text) or 0.0 for item, reply in zip(items, replies, strict=True)]
    return [sum(scores) / len(scores) for scores in good]


@pytest.mark.slow
def test_answers_mean_something(name: str, loaded: tuple[Any, Any]) -> None:
    """On 36 questions; the whole measurements are `recipes.measure` and `recipes.photo.measure`."""
    task = get_task(default_task(name), limit=36)
    everything, random = right(loaded, [NoPruning(), Random(keep=16)], task)
    assert everything >= {"scenes": 0.85, "photos": 0.7, "clips": 0.55}[task.name]  # guessing gives 0.3
    assert random <= everything - 0.08


def test_samples_of_a_task_have_questions_that_its_models_know() -> None:
    tasks = {sample.task for sample in samples()}
    assert tasks == {"", "scenes", "photos"}
    for task in tasks - {""}:
        assert len(samples(task)) >= 4
        assert all(sample.questions for sample in samples(task))
    assert samples()[0].task == default_task(DEFAULT)
    assert [sample.name for sample in samples()][-3:] == ["cat", "coffee", "rocket"]
    for sample in samples("photos"):
        assert "CC BY 4.0" in sample.licence
        assert open_image(sample.path).size == (336, 336)
    words = word_level(photo_vocabulary())
    asked = " ".join(f"{question} {answer}" for sample in samples("photos") for question, answer in sample.questions)
    assert words.unk_token_id not in words(asked).input_ids


@pytest.mark.usefixtures("no_weights")
def test_without_the_weights_there_are_the_drawn_samples() -> None:
    assert {sample.task for sample in samples()} == {"", "scenes"}


def test_samples_are_there_and_open() -> None:
    listed = samples()
    assert sum(bool(sample.questions) for sample in listed) >= 4
    assert sum(not sample.questions for sample in listed) >= 2
    for sample in listed:
        assert min(open_image(sample.path).size) >= 192
        assert sample.licence
        assert image_path(f"sample:{sample.name}") == sample.path
    assert image_path("a/b.png") == Path("a/b.png")
    with pytest.raises(ValueError, match=f"the samples are {samples()[0].name}"):
        image_path("sample:dog")


def test_command_line_says_which_model_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "sample:photo-1", "What is at the bottom left?", "--keep", "64"]) == 0
    out = capsys.readouterr().out
    assert "kept 64 of 576 visual tokens" in out
    assert f"model: {DEFAULT}, embedded" in out
    assert main(["compare", "sample:photo-1", "What is at the bottom left?", "--methods", "none,clustrs"]) == 0
    assert f"model: {DEFAULT}, embedded" in capsys.readouterr().out
    assert main(["samples"]) == 0
    assert "sample:scene-1" in capsys.readouterr().out


def test_unknown_words_do_no_harm(loaded: tuple[Any, Any]) -> None:
    image = open_image(image_path("sample:cat"))
    answer = ask(*loaded, image, "Qué es esto, 你好?", ClustRS(keep=16), 4)
    assert isinstance(answer.text, str)
    assert answer.unknown_words == ("Qué", "es", "esto", "你好")


def test_unknown_words_are_named_on_the_command_line(run: Run) -> None:
    question, options = "What color is the star, please?", ("--max-new-tokens", 2, "--model", "mini-llava")
    words = "'color' (did you mean 'colour'?), 'please'"
    line = f"clustrs: not in the model's vocabulary: {words}: read as unknown, so the answer may mean nothing\n"
    code, out, err = run("ask", "sample:scene-1", question, *options)
    assert (code, err) == (0, line)
    assert "kept 16 of 576 visual tokens" in out
    code, out, err = run("ask", "sample:scene-1", question, *options, "--json")
    assert (code, err) == (0, line)
    assert json.loads(out)["unknown_words"] == ["color", "please"]
    code, out, err = run("compare", "sample:scene-1", question, *options, "--methods", "none,random", "--json")
    assert (code, err) == (0, line)
    assert [result["unknown_words"] for result in json.loads(out)["results"]] == [["color", "please"]] * 2
    assert run("ask", "sample:scene-1", QUESTION, *options)[2] == ""


def test_list_of_models_is_that_of_the_package() -> None:
    folder = model_folder(MODELS[0]).parent
    assert {path.parent.name for path in folder.glob("*/config.json")} == set(SHIPPED)
    for model in EMBEDDED:
        if model.name in SHIPPED:
            config = json.loads((model_folder(model.name) / "config.json").read_text())
            assert config["model_type"] == model.family
    assert DEFAULT in SHIPPED


def test_models_and_tasks_find_each_other() -> None:
    for model in EMBEDDED:
        assert embedded_model(model.name) == model
        assert default_task(model.name) == model.task
        found = embedded_model(default_model(model.task))
        assert found is not None
        assert found.task == model.task
    assert embedded_model("llava-hf/llava-1.5-7b-hf") is None
    assert default_task("llava-hf/llava-1.5-7b-hf") == default_task(DEFAULT)
    assert default_model(default_task(DEFAULT)) == DEFAULT
    assert default_model("mmvet") == DEFAULT
    assert model_and_task(None, None) == (DEFAULT, default_task(DEFAULT))
    assert model_and_task("mini-llava", None) == ("mini-llava", "scenes")
    assert model_and_task(None, "scenes") == ("mini-llava", "scenes")
    assert model_and_task("org/model", "mmvet") == ("org/model", "mmvet")
    assert all(model.name in list_known() and model.knows in list_known() for model in EMBEDDED)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if clustrs-models were not installed."""
    monkeypatch.setitem(sys.modules, "clustrs_models", None)

    def others(group: str) -> tuple[EntryPoint, ...]:
        return tuple(entry for entry in plugin_entries(group) if not entry.value.startswith("clustrs_models"))

    monkeypatch.setattr("clustrs.evaluation.tasks.plugin_entries", others)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("command", ["ask", "compare"])
def test_without_the_weights_the_command_line_says_what_to_install(run: Run, command: str) -> None:
    for words in (["--model", "mini-onevision"], []):
        name = words[-1] if words else DEFAULT
        expected = f"clustrs: model '{name}': the package clustrs-models has this and is not installed: "
        code, out, err = run(command, "sample:scene-1", QUESTION, *words)
        assert (code, out, err) == (2, "", f"{expected}{INSTALL}\n")


@pytest.mark.usefixtures("no_weights")
def test_without_the_weights_evaluation_says_what_to_install(run: Run, tmp_path: Path) -> None:
    code, out, err = run("eval", "--model", "mini-llava", "--limit", 2, "--output", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("clustrs: model 'mini-llava': the package clustrs-models has this")
    code, out, err = run("eval", "--limit", 2, "--output", tmp_path / "photos")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("clustrs: task 'photos' is in the package clustrs-models, which is not ins")
    assert err.endswith(f"{INSTALL}\n")


@pytest.mark.usefixtures("no_weights")
def test_without_the_weights_the_library_says_what_to_install() -> None:
    for call in (lambda: load_model("mini-llava"), lambda: model_folder("mini-llava")):
        with pytest.raises(ValueError, match=r"clustrs-models has this and is not installed: pip install './packages"):
            call()
    for task in ("photos", "scenes"):
        with pytest.raises(
            ValueError, match=f"^task '{task}' is in the package clustrs-models, which is not installed"
        ):
            get_task(task)


@pytest.mark.usefixtures("no_weights")
def test_without_the_weights_the_rest_works(run: Run, load: Callable[..., tuple[Any, Any]], tmp_path: Path) -> None:
    assert f"their weights are not installed: {INSTALL}" in run("models")[1]
    assert all(model.name in run("models")[1] for model in EMBEDDED)
    assert "sample:scene-1" in run("samples")[1]
    shown = "".join(run("ask", "--help")[1].split())  # a name may be broken at a hyphen
    assert all(name in shown for name in MODELS)
    corrupted = ("corrupt", "sample:cat", "--corrupt", "gaussian:0.2", "--output", tmp_path / "cat.png")
    assert run(*corrupted)[0] == 0
    assert ask(*load(), open_image(image_path("sample:cat")), "What is this?", ClustRS(keep=4), 2).visual_tokens == 4


def test_older_data_is_told_to_be_upgraded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "clustrs_models").mkdir()
    (tmp_path / "clustrs_models" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clustrs_models", raising=False)
    with pytest.raises(ValueError, match=r"^model 'mini-llava': the installed clustrs-models does not have this: "):
        model_folder("mini-llava")
