"""Answers of pruned models to prompts with any number of images, for every family."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image

from clustrs.evaluation.tasks import get_task
from clustrs.models.ask import SYSTEM
from clustrs.models.load import load_model
from clustrs.pruners import Pruner, get_method
from clustrs.pruners.registry import list_methods
from clustrs_lmms.engine import (
    Engine,
    Generated,
    Prompt,
    Tally,
    continued,
    cut,
    read_arguments,
    read_generation,
    user_turn,
)

FAMILIES = [family for family in tiny_models.BUILDERS if family not in tiny_models.SAME_ADAPTER]
LIKELIHOODS = [family for family in FAMILIES if family != "paligemma"]
"""PaliGemma's processor ends every text with a new line: no continuation is the end of one."""
METHODS = {name: f"{name} inner=divprune" if name == "denoise" else name for name in list_methods("encoder")}
METHODS["fastv"] = "fastv layer=1"
"""All methods, as model_args name them."""
KEEP = 3
GREEDY = {"max_new_tokens": 4, "until": ["\n\n"]}


def image(seed: int, size: tuple[int, int] = (40, 28)) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8))


def engine_of(folder: Path, method: str = "fastervlm", **more: Any) -> Engine:
    keep = {} if method == "none" else {"keep": KEEP}
    return Engine(read_arguments({"pretrained": str(folder), "method": method, **keep, "device": "cpu", **more}))


def ask(engine: Engine, text: str, *images: Image.Image) -> Prompt:
    return engine.builder.build(user_turn(images, text), {}, "test")


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_several_images(family: str, tmp_path: Path) -> None:
    tiny_models.BUILDERS[family](tmp_path)
    engine = engine_of(tmp_path)
    prompts = [
        ask(engine, "What is this?", image(1)),
        ask(engine, "And these?", image(2), image(3, (28, 56))),
        ask(engine, "A longer question about one image?", image(4)),
    ]
    together = engine.generate(prompts, GREEDY)
    assert [one.visual.kept for one in together] == [KEEP * len(prompt.images) for prompt in prompts]
    for prompt, one in zip(prompts, together, strict=True):
        assert engine.generate([prompt], GREEDY) == [one]
    engine.close()
    check_alone(tmp_path, get_method("fastervlm", keep=KEEP), prompts, together)


def check_alone(folder: Path, method: Pruner, prompts: Sequence[Prompt], answers: Sequence[Generated]) -> None:
    """Each answer is that of the prompt alone, given to the model's own `generate` with the method attached."""
    model, processor = load_model(str(folder))
    for prompt, one in zip(prompts, answers, strict=True):
        inputs = processor(images=[list(prompt.images)], text=[prompt.text], return_tensors="pt")
        with method(model), torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        assert one.text == processor.decode(new, skip_special_tokens=True).strip()
        assert one.output_tokens == len(new)
        assert one.input_tokens == inputs["input_ids"].shape[1] - one.visual.unpruned + one.visual.entered


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    tiny_models.BUILDERS["llava"](folder)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_methods(llava: Path, name: str) -> None:
    engine = engine_of(llava, METHODS[name])
    prompts = [ask(engine, "What is this?", image(1)), ask(engine, "And these?", image(2), image(3, (28, 56)))]
    together = engine.generate(prompts, GREEDY)
    method = engine.handle.method
    assert method.name == name
    kept = [method.count(one.visual.unpruned // images) * images for one, images in zip(together, (1, 2), strict=True)]
    assert [one.visual.kept for one in together] == kept
    engine.close()
    check_alone(llava, method, prompts, together)


def test_words_and_padding_of_llava_s_evaluation(llava: Path) -> None:
    """A wide image is what the checkpoint's processor makes of the same image in a square of the mean colour."""
    asked = {"prompt_template": "vicuna_v1", "image_padding": "square"}
    wide, engine, plain = image(1, (20, 40)), engine_of(llava, **asked), engine_of(llava)
    prompt = ask(engine, "What?", wide)
    assert prompt.text == f"{SYSTEM} USER: <image>\nWhat? ASSISTANT:"
    colour = tuple(int(255 * mean) for mean in plain.processor.image_processor.image_mean)
    square = Image.new("RGB", (40, 40), colour)
    square.paste(wide, (0, 10))
    (one,) = engine.likelihoods([prompt], ["no"])
    (padded,) = plain.likelihoods([Prompt(prompt.text, (square,))], ["no"])
    (cropped,) = plain.likelihoods([prompt], ["no"])
    assert one.loss == pytest.approx(padded.loss, rel=1e-5)
    assert one.loss != pytest.approx(cropped.loss, rel=1e-4)


@pytest.mark.parametrize(("family", "name"), [*((one, "fastervlm") for one in LIKELIHOODS), ("llava", "fastv")])
def test_likelihoods_are_the_loss_of_the_model(family: str, name: str, tmp_path: Path) -> None:
    tiny_models.BUILDERS[family](tmp_path)
    engine = engine_of(tmp_path, METHODS[name])
    prompts = [
        ask(engine, "What is this?", image(1)),
        ask(engine, "A longer question?", image(2)),
        ask(engine, "Two?", image(1), image(3)),
    ]
    continuations = ["no", "a rather long one", "yes"]
    results = engine.likelihoods(prompts, continuations)
    for prompt, text, one in zip(prompts, continuations, results, strict=True):
        assert one.loss == pytest.approx(own_loss(engine, prompt, text), rel=1e-4)
        assert engine.likelihoods([prompt], [text])[0].loss == pytest.approx(one.loss, rel=1e-4)
        assert one.visual.kept == KEEP * len(prompt.images)
    assert len({round(one.loss, 3) for one in results}) == 3


def own_loss(engine: Engine, prompt: Prompt, continuation: str) -> float:
    """What the model says of a continuation when it is given labels."""
    whole, before = (
        engine.processor(images=[list(prompt.images)], text=[text], return_tensors="pt")
        for text in (continued(prompt.text, continuation), prompt.text)
    )
    labels = whole["input_ids"].clone()
    labels[:, : before["input_ids"].shape[1]] = -100
    with torch.inference_mode():
        return float(engine.model(**whole, labels=labels).loss)


def test_greedy_continuations_are_recognised() -> None:
    """The answer that the model gives fits greedily, another one does not."""
    engine = Engine(read_arguments({"pretrained": "mini-llava", "keep": 16, "device": "cpu"}))
    task = get_task("scenes", None, 4)
    prompts = [ask(engine, item.question, task.open(item.image)) for item in task.items]
    said = [one.text for one in engine.generate(prompts, {"max_new_tokens": 4})]
    assert all(said)
    assert all(one.greedy for one in engine.likelihoods(prompts, said))
    others = ["green" if text != "green" else "red" for text in said]
    assert not any(one.greedy for one in engine.likelihoods(prompts, others))


def test_prompts_without_images(llava: Path) -> None:
    engine = engine_of(llava)
    prompts = [ask(engine, "2 + 2?"), ask(engine, "A longer question?")]
    together = engine.generate(prompts, GREEDY)
    assert [engine.generate([prompt], GREEDY)[0] for prompt in prompts] == together
    assert [one.visual.unpruned for one in together] == [0, 0]
    losses = engine.likelihoods(prompts, ["4", "no"])
    assert losses[0].loss == pytest.approx(engine.likelihoods(prompts[:1], ["4"])[0].loss, rel=1e-4)


def test_a_model_is_put_back(llava: Path) -> None:
    engine = engine_of(llava)
    engine.close()
    assert "generate" not in engine.model.__dict__


def test_a_continuation_needs_tokens(llava: Path) -> None:
    engine = engine_of(llava)
    spaced = Prompt(ask(engine, "What?", image(1)).text + " ", (image(1),))
    with pytest.raises(ValueError, match="it has no tokens of its own"):
        engine.likelihoods([spaced], [""])


def test_a_processor_that_writes_after_the_continuation_is_refused(tmp_path: Path) -> None:
    tiny_models.BUILDERS["paligemma"](tmp_path)
    engine = engine_of(tmp_path)
    with pytest.raises(ValueError, match="continuation 'no': PaliGemmaProcessor writes something after it"):
        engine.likelihoods([ask(engine, "What?", image(1))], ["no"])


@pytest.mark.parametrize(
    ("settings", "options", "stops"),
    [
        ({}, {"max_new_tokens": 1024, "do_sample": False}, []),
        ({"until": ["\n\n"]}, {"max_new_tokens": 1024, "do_sample": False}, []),
        ({"until": "###", "max_new_tokens": 8}, {"max_new_tokens": 8, "do_sample": False}, ["###"]),
        (
            {"temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False, "image_aspect_ratio": "original"},
            {"max_new_tokens": 1024, "num_beams": 1, "do_sample": False},
            [],
        ),
        ({"temperature": 0.7}, {"max_new_tokens": 1024, "temperature": 0.7, "do_sample": True}, []),
        ({"temperature": 0, "do_sample": True}, {"max_new_tokens": 1024, "do_sample": False}, []),
        ({"do_sample": True, "top_p": None}, {"max_new_tokens": 1024, "do_sample": True}, []),
    ],
)
def test_generation_settings(settings: dict[str, Any], options: dict[str, Any], stops: list[str]) -> None:
    assert read_generation(settings) == (options, stops)


def test_unknown_generation_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown generation_kwargs entry max_tokens=8"):
        read_generation({"max_tokens": 8})


def test_answers_end_at_a_stop() -> None:
    assert cut("yes ### no", ["###", "no"]) == "yes "
    assert cut("yes", ["###"]) == "yes"


def test_the_tally_has_means_per_task(llava: Path) -> None:
    engine, tally = engine_of(llava), Tally()
    for images in (1, 2):
        prompt = ask(engine, "What?", *(image(number) for number in range(images)))
        tally.add("pope", engine.generate([prompt], GREEDY)[0].visual)
    (whole,) = {one.placeholders for one in engine.handle.last}
    assert tally.to_json() == {"pope": {"questions": 2, "unpruned_tokens": 1.5 * whole, "visual_tokens": 1.5 * KEEP}}
