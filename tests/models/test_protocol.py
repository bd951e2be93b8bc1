"""What a model is sent under LLaVA-1.5's own protocol, against recorded prompts and pixels."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers as tf
from evaluation.task_files import real
from goldens.record_llava_protocol import FILE, MEAN, STD, drawn, square
from PIL import Image

from clustrs.evaluation.config import Config
from clustrs.evaluation.runner import Unit, Worker
from clustrs.evaluation.tasks import get_task
from clustrs.models.ask import as_seen, chat_prompt
from clustrs.models.load import apply_image_padding, load_processor

GOLDEN = json.loads(FILE.read_text())
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def processor() -> Any:
    """LLaVA-1.5's: the image half has the hub's settings."""
    crop = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    return tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessorPil(**crop),
        tokenizer=tiny_models.tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.TEMPLATE,
    )


def pixels_of(processor: Any, image: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return processor(images=[image], text=["<image>"], return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)


def in_bytes(values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """The pixels from 0 to 255 before they were normalised."""
    return np.rint((values * np.array(STD) + np.array(MEAN)) * 255).astype(np.uint8).tobytes()


@pytest.mark.parametrize("entry", GOLDEN["prompts"])
def test_prompts(processor: Any, entry: dict[str, str]) -> None:
    assert chat_prompt(processor, entry["question"], "vicuna_v1") == entry["prompt"]
    own = chat_prompt(processor, entry["question"])
    assert own == f"user: <image> {entry['question']} assistant:"
    assert chat_prompt(processor, entry["question"], "checkpoint") == own


@pytest.mark.parametrize(("task", "folder"), [("mmvet", "mm-vet"), ("scienceqa", "scienceqa")])
def test_all_official_prompts(processor: Any, task: str, folder: str) -> None:
    texts = [chat_prompt(processor, item.question, "vicuna_v1") for item in get_task(task, real(folder)).items]
    expected = GOLDEN["official"][task]
    assert len(texts) == expected["count"]
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("entry", GOLDEN["images"], ids=lambda entry: "x".join(map(str, entry["size"])))
def test_pixels(processor: Any, entry: dict[str, Any]) -> None:
    image = drawn(*entry["size"])
    values = pixels_of(apply_image_padding(processor, "square"), image)
    assert values.shape == (336, 336, 3)
    assert hashlib.sha256(in_bytes(values)).hexdigest() == entry["sha256"]
    for y, x, *expected in entry["values"]:
        assert values[y, x].tolist() == pytest.approx(expected, abs=2e-6)
    cropped = hashlib.sha256(in_bytes(pixels_of(processor, image))).hexdigest()
    assert (cropped == entry["sha256"]) == (image.width == image.height)


def test_pixels_of_official_images(processor: Any) -> None:
    padded = apply_image_padding(processor, "square")
    task = get_task("mmvet", real("mm-vet"), limit=12)
    for item in task.items:
        image = task.open(item.image)
        assert in_bytes(pixels_of(padded, image)) == square(image).tobytes()


def test_the_given_processor_stays_as_it_is(processor: Any) -> None:
    before = pixels_of(processor, drawn(90, 30))
    assert apply_image_padding(processor, "checkpoint") is processor
    padded = apply_image_padding(processor, "square")
    assert padded.tokenizer is processor.tokenizer
    assert isinstance(processor.image_processor, tf.CLIPImageProcessorPil)
    assert np.array_equal(pixels_of(processor, drawn(90, 30)), before)
    again = apply_image_padding(padded, "square")
    assert np.array_equal(pixels_of(again, drawn(90, 30)), pixels_of(padded, drawn(90, 30)))


@pytest.mark.parametrize("size", [(80, 35), (35, 80), (80, 34), (50, 50)])
def test_drawings_show_the_padded_image(processor: Any, size: tuple[int, int]) -> None:
    """Kept tokens are drawn over what the tower saw, not a pixel beside it."""
    image, side = drawn(*size), max(size)
    seen = as_seen(apply_image_padding(processor, "square"), image)
    assert seen.size == (side, side)
    left, top = (side - size[0]) // 2, (side - size[1]) // 2
    assert seen.crop((left, top, left + size[0], top + size[1])).tobytes() == image.tobytes()


def test_settings_of_the_checkpoint_are_kept() -> None:
    images = tf.SiglipImageProcessorPil(size={"height": 28, "width": 28}, resample=2)
    own = tf.LlavaProcessor(
        image_processor=images,
        tokenizer=tiny_models.tokenizer(),
        patch_size=7,
        vision_feature_select_strategy="full",
    )
    padded = apply_image_padding(own, "square")
    values = pixels_of(padded, drawn(60, 20))
    assert values.shape == (28, 28, 3)
    assert padded.image_processor.image_mean == images.image_mean
    assert padded.image_processor.resample == images.resample
    assert np.abs(values[0]).max() < 0.02  # the padding has the mean colour, which normalises to nearly 0


def test_mistakes(processor: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^prompt_template must be one of 'checkpoint', 'vicuna_v1', got 'llava'$"):
        chat_prompt(processor, "What?", "llava")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^image_padding must be one of 'checkpoint', 'square', got 'pad'$"):
        apply_image_padding(processor, "pad")  # type: ignore[arg-type]
    tiny_models.build("llava_onevision", "siglip", tmp_path)
    other = load_processor(str(tmp_path))
    with pytest.raises(ValueError, match="image_padding must be 'checkpoint' for LlavaOnevisionProcessor"):
        apply_image_padding(other, "square")
    for name, value in (("prompt_template", "vicuna"), ("image_padding", "squares")):
        with pytest.raises(ValueError, match=f"{name} must be one of 'checkpoint', .*, got '{value}' .did you mean"):
            Config(task="scenes", model="m", methods=({"name": "none"},), **{name: value})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("protocol")
    tiny_models.build("llava", "clip", root / "model")
    drawn(80, 30).save(root / "a.png")
    (root / "questions.jsonl").write_text(json.dumps({"image": "a.png", "question": "Why?", "answer": "x"}) + "\n")
    return root


@pytest.mark.parametrize("padding", ["checkpoint", "square"])
@pytest.mark.parametrize("template", ["checkpoint", "vicuna_v1"])
def test_a_run_sends_what_its_configuration_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: Any, padding: Any
) -> None:
    sent: list[tuple[Any, ...]] = []

    def encode(model: Any, processor: Any, images: Any, prompts: Any, *_: Any) -> None:
        sent.append((processor, images, prompts))
        raise ValueError("enough")

    monkeypatch.setattr("clustrs.models.ask.encode", encode)
    config = Config(
        task="custom",
        model=str(folder / "model"),
        data=str(folder),
        methods=({"name": "none"},),
        prompt_template=template,
        image_padding=padding,
    )
    worker = Worker(config)
    list(worker.run(Unit("clean", 0, (0,), (0,))))
    processor, (image,), ((_, text),) = sent[0]
    assert (
        text
        == {
            "checkpoint": "user: <image> Why? assistant:",
            "vicuna_v1": GOLDEN["prompts"][0]["prompt"].replace("What is x?", "Why?"),
        }[template]
    )
    values = pixels_of(processor, image)
    assert (np.abs(values[0]).max() < 0.02) == (padding == "square")


def test_a_strip_fails_alone(folder: Path, run: Run, tmp_path: Path) -> None:
    """Padded, 20,000 x 250 pixels would be 400 million: its question fails with a reason, the others are answered."""
    Image.new("RGB", (20_000, 250)).save(tmp_path / "strip.png")
    drawn(30, 20).save(tmp_path / "a.png")
    records = [{"image": name, "question": "Why?", "answer": "x"} for name in ("strip.png", "a.png")]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ("--task", "custom", "--data", tmp_path, "--methods", "none", "--max-new-tokens", 2, "--quiet")
    run("eval", *words, "--image-padding", "square", "--model", folder / "model", "-o", tmp_path / "run")
    strip, other = map(json.loads, (tmp_path / "run" / "answers.jsonl").read_text().splitlines())
    assert strip["error"].startswith(
        "image must have sides of at most 10000 pixels to be padded to a square, got 20000 x 250"
    )
    assert (other["image"], other["error"]) == ("a.png", None)


def test_commands(folder: Path, run: Run, tmp_path: Path) -> None:
    """`eval` records both options, `ask` takes them and says so."""
    options = ("--prompt-template", "vicuna_v1", "--image-padding", "square", "--model", folder / "model")
    words = ("--task", "custom", "--data", folder, "--methods", "none", "--max-new-tokens", 2, "--quiet")
    code, _, _ = run("eval", *words, *options, "-o", tmp_path / "run")
    assert code == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stored["prompt_template"], stored["image_padding"]) == ("vicuna_v1", "square")
    code, _, err = run("eval", *words, *options[4:], "-o", tmp_path / "run")
    assert code == 2
    assert 'image_padding: was "square", now "checkpoint"; prompt_template: was "vicuna_v1", now "checkpoint"' in err
    ask = ("ask", folder / "a.png", "Why?", "--keep", 4, "--max-new-tokens", 2, "--json")
    code, out, _ = run(*ask, *options)
    assert code == 0
    shown = json.loads(out)
    assert (shown["prompt_template"], shown["image_padding"]) == ("vicuna_v1", "square")
    plain = json.loads(run(*ask, *options[4:])[1])
    assert (plain["prompt_template"], plain["image_padding"]) == ("checkpoint", "checkpoint")
    assert shown["kept"] != plain["kept"]
    code, _, err = run(*ask, "--prompt-template", "vicuna")
    assert code == 2
    assert "--prompt-template must be one of checkpoint, vicuna_v1 (did you mean 'vicuna_v1'?), got 'vicuna'" in err
