"""The models and images that come with the package."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from clustrs import ClustRS, NoPruning, Random
from clustrs.cli import main
from clustrs.embedded import MODELS, image_path, model_folder, samples
from clustrs.images.open import open_image
from clustrs.images.scenes import examples
from clustrs.models import shared_encoding as sharing
from clustrs.models.ask import ask
from clustrs.models.load import load_model
from clustrs.models.prompts import chat_prompt

CLASSES = {"mini-llava": "LlavaForConditionalGeneration", "mini-onevision": "LlavaOnevisionForConditionalGeneration"}
TOKENS = {"mini-llava": [(24, 24)], "mini-onevision": [(27, 27), (27, 27)]}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> tuple[Any, Any]:
    return load_model(name)


def test_folder_is_small_and_safe(name: str) -> None:
    files = list(model_folder(name).iterdir())
    assert sum(file.stat().st_size for file in files) <= 20e6
    assert {file.suffix for file in files} <= {".json", ".jinja", ".safetensors"}


def test_tensors_have_the_published_names(name: str) -> None:
    with safe_open(model_folder(name) / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert {stored.get_tensor(key).dtype for key in names} == {torch.float32}
    expected = [
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "language_model.lm_head.weight",
        "multi_modal_projector.linear_1.weight",
        "multi_modal_projector.linear_2.bias",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight",
        "vision_tower.vision_model.post_layernorm.weight",
    ]
    assert set(expected) <= names
    parts = r"(language_model|multi_modal_projector|vision_tower\.vision_model|image_newline)"
    assert all(re.match(parts, key) for key in names)


def test_loads_as_any_checkpoint_does(name: str) -> None:
    import transformers as tf

    model = tf.AutoModelForImageTextToText.from_pretrained(model_folder(name))
    assert type(model).__name__ == CLASSES[name]
    if name == "mini-llava":
        processor = tf.AutoProcessor.from_pretrained(model_folder(name))
        assert type(processor).__name__ == "LlavaProcessor"
    stored = json.loads((model_folder(name) / "processor_config.json").read_text())
    assert stored["processor_class"] in ("LlavaProcessor", "LlavaOnevisionProcessor")


def test_tokens_a_crop(name: str, loaded: tuple[Any, Any]) -> None:
    image = open_image(image_path("sample:scene-1"))
    answer = ask(*loaded, image, "How many objects are there?", NoPruning(), 2)
    assert answer.image.grids == TOKENS[name]


def right(loaded: tuple[Any, Any], method: Any, images: int) -> float:
    """The share of right answers to the first questions of the test set."""
    good = []
    for example in examples(images):
        shown = [Image.fromarray(example.drawing.pixels)]
        prompts = [(0, chat_prompt(loaded[1], question.text)) for question in example.questions]
        replies = sharing.reply(*loaded, sharing.encode(*loaded, shown, prompts), method, 3)
        good += [reply.text == q.answer for reply, q in zip(replies, example.questions, strict=True)]
    return sum(good) / len(good)


@pytest.mark.slow
def test_answers_mean_something(loaded: tuple[Any, Any]) -> None:
    """On twenty images; the whole measurement is `python -m recipes.measure`."""
    everything = right(loaded, NoPruning(), 20)
    assert everything >= 0.85  # guessing gives 0.3
    assert right(loaded, Random(keep=16), 20) <= everything - 0.15


def test_samples_are_there_and_open() -> None:
    listed = samples()
    assert sum(bool(sample.questions) for sample in listed) >= 4
    assert sum(not sample.questions for sample in listed) >= 2
    for sample in listed:
        assert min(open_image(sample.path).size) >= 192
        assert sample.licence
        assert image_path(f"sample:{sample.name}") == sample.path
    assert image_path("a/b.png") == Path("a/b.png")
    with pytest.raises(ValueError, match="the samples are scene-1"):
        image_path("sample:dog")


def test_command_line_says_which_model_it_uses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "sample:scene-1", "How many objects are there?", "--keep", "64"]) == 0
    out = capsys.readouterr().out
    assert "64 of 576 visual tokens went in" in out
    assert "model: mini-llava, embedded" in out
    assert main(["compare", "sample:scene-1", "How many objects are there?", "--methods", "none,clustrs"]) == 0
    assert "model: mini-llava, embedded" in capsys.readouterr().out
    assert main(["samples"]) == 0
    assert "sample:scene-1" in capsys.readouterr().out


def test_unknown_words_do_no_harm(loaded: tuple[Any, Any]) -> None:
    image = open_image(image_path("sample:cat"))
    assert isinstance(ask(*loaded, image, "Qué es esto, 你好?", ClustRS(keep=16), 4).text, str)
