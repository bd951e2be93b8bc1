"""smol-llava's recipe: conversion of the pretrained parts, questions, packing, and the assembled model."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import nn
from transformers import CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from clustrs import Config, expand_methods
from clustrs.evaluation.runner import Unit, Worker
from clustrs.evaluation.store import encode_record, new_record, read_answers
from clustrs.evaluation.tasks import Item, get_task
from clustrs_models import smol_build
from clustrs_models.photographs import KINDS, is_test
from clustrs_models.sentences import names
from clustrs_paper.evidence.page import SMOL_PAGE, filled
from clustrs_paper.evidence.place_and_weight import PUBLISHED
from recipes.smol import grid, measure, probe, stability, tower
from recipes.smol.data import choose, generator_for, kind_of
from recipes.smol.model import Lora, Packing, Projector, add_lora, answer_logits, answer_loss, exactly_right
from recipes.smol.names import Kind, caltech_kinds, split, with_article
from recipes.smol.questions import PLACES, Question, about_collage, about_single

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


def test_features_are_the_hidden_states_that_llava_reads(tmp_path: Path) -> None:
    model = CLIPVisionModel(smol_build.tower_config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 32, 32)
    states = model(pixels, output_hidden_states=True).hidden_states
    torch.testing.assert_close(tower.features(tower.load_tower(tmp_path), pixels), states[tower.LAYER][:, 1:])


@pytest.mark.parametrize("side", [4, 5])
def test_quarters_of_a_probe_meet_in_no_token(side: int) -> None:
    tokens = torch.zeros(1, side * side, 3)
    tokens[0, 0, 0] = tokens[0, side - 1, 1] = tokens[0, -1, 2] = 8.0  # top left, top right, bottom right
    found = probe.pooled(tokens)[0]
    expected = torch.zeros(4, 6)
    for quarter, feature in ((0, 0), (1, 1), (3, 2)):
        expected[quarter, feature], expected[quarter, 3 + feature] = 2.0, 8.0  # mean of 2 x 2 tokens, maximum
    assert torch.equal(found, expected)


def test_cls_attention_is_the_eager_attention_of_that_layer(tmp_path: Path) -> None:
    model = CLIPVisionModel(smol_build.tower_config(**SIZES)).eval()
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
    assert all(names(question.answer, question.word) for question in questions)
    chosen = choose(about_collage(four, kinds, generator_for(1)), [kind.name for kind in four], generator_for(3))
    assert [sum(kind_of(question) == kind for question in chosen) for kind in ("name", "across", "place")] == [5, 1, 1]
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
    vision = CLIPVisionModel(smol_build.tower_config(**SIZES)).eval()
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

    smol_build.merge_lora(plain, weights)
    model = smol_build.assemble(vision, plain, smol_build.projector_weights(weights), 96)
    ids = torch.tensor([*packing.before, *[96] * 4, *packed["ids"].tolist()])[None]
    logits = model(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits[
        0, -len(packed["ids"]) :
    ]
    torch.testing.assert_close(logits[packed["targets"] >= 0][:, :96], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("positions", "attention"), [("compact", "plain"), ("original", "proportional")])
def test_answers_of_shared_prefixes_are_those_of_eval(
    positions: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "GROUP", 4)
    methods = expand_methods(["none", "clustrs", "visionzip", "tome", "cdpruner", "fastv"], [16])
    settings: dict[str, Any] = {"positions": positions, "attention": attention}
    config = Config(task="scenes", model="mini-llava", methods=methods, limit=10, **settings)
    unit = Unit("gaussian:0.2", 0, tuple(range(10)), tuple(range(len(methods))))
    shared = grid.SharedWorker(config)
    grid.use_onednn(shared.loaded[0])
    found, expected = (
        [[(r.item, r.text, r.kept, r.score) for r in records] for records in worker.run(unit)]
        for worker in (shared, Worker(config))
    )
    assert found == expected
    assert len({text for records in found for _, text, *_ in records}) > 4


def test_the_page_has_what_was_measured() -> None:
    measured = json.loads(measure.RESULT.read_text())
    page = SMOL_PAGE.read_text(encoding="utf-8")
    assert page == filled(page, measure.accuracy_table(measured), "accuracy")
    clean = measured["clean"]
    row = re.search(r"\| clean \| ([\d,]+) \| ([\d.]+) \| ([\d.]+)", page)
    assert row is not None
    counted = [f"{clean['questions']:,}", f"{clean['right']:.1f}", f"{clean['by kind']['count']:.1f}"]
    assert list(row.groups()) == counted


def test_a_guesser_gives_the_most_frequent_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        ("count", "How many dogs?", "1"),
        ("count", "How many dogs?", "0"),
        ("count", "How many dogs?", "1"),
        ("count", "How many cats?", "3"),
        ("place", "At the top or at the bottom?", "top"),
        ("place", "On the left or on the right?", "right"),
        ("single", "What is this?", "cat"),
    ]
    items = tuple(Item(str(i), "", question, answer, (kind,)) for i, (kind, question, answer) in enumerate(asked))
    monkeypatch.setattr(measure, "get_task", lambda *_: SimpleNamespace(items=items))
    found = measure.guessing(None)
    assert found == {"questions": 7, "right": 600 / 7, "by kind": {"count": 75.0, "place": 100.0, "single": 100.0}}


def test_a_stage_asks_for_its_methods_and_questions_alone() -> None:
    config = Config(task="scenes", model="mini-llava", methods=expand_methods(["none", "random"], [8, 16]), limit=6)
    units = [Unit("clean", 0, items, (0, 1, 2)) for items in ((0, 1, 2), (3, 4, 5))]
    engine = grid.SharedEngine(stage=grid.Stage(("clean",), ("random",), (16,), 3))
    ((records),) = engine.run(config, units)
    assert [record.item for record in records] == [item.id for item in get_task("scenes", None, 3).items]
    assert {(record.method["name"], record.method["keep"]) for record in records} == {("random", 16)}


def test_what_another_process_answers_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TASK": "scenes", "NAME": "mini-llava", "QUESTIONS": 2, "levels": lambda *_: {}}.items():
        monkeypatch.setattr(grid, name, value)
    run_of_clean = grid.folder_of(tmp_path, PUBLISHED, "clean")
    run_of_clean.mkdir(parents=True)
    lock = FileLock(run_of_clean / "taken")
    lock.acquire()
    monkeypatch.setattr(time, "sleep", lambda _: lock.release())
    grid.answer(tmp_path, [grid.Stage(("clean", "jpeg:30"), ("random",), (8,), 2, (PUBLISHED,))])
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["jpeg:30", "clean"]
    assert len(list(read_answers(run_of_clean))) == 2


def test_stored_cells_are_whole_batches_of_first_questions(tmp_path: Path) -> None:
    items = get_task(grid.TASK, None, grid.QUESTIONS).items
    (method,) = expand_methods(["clustrs"], [16])
    asked = [i for i in range(2 * grid.BATCH + 5) if i != grid.BATCH + 3]
    records = [new_record(items[i], method, "gaussian:0.2", 0, text="", score=float(i % 2)) for i in reversed(asked)]
    records.append(new_record(items[grid.BATCH + 3], method, "gaussian:0.2", 0, error="failed"))
    (tmp_path / "answers.jsonl").write_bytes(b"".join(map(encode_record, records)))
    (row,) = grid.cells(tmp_path)
    assert (row["method"], row["keep"], row["corruption"], row["level"]) == ("clustrs", 16, "gaussian", "0.2")
    assert (row["questions"], row["mean"]) == (grid.BATCH, "50.000")
    assert row["right"] == np.packbits(np.arange(grid.BATCH) % 2).tobytes().hex()
