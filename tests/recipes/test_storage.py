"""Weights in float16: what is stored, and that it is loaded as float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clustrs import ClustRS, NoPruning
from clustrs.embedded import MODELS, model_folder
from clustrs.evaluation.tasks import get_task
from clustrs.models.load import load_model
from recipes import storage
from recipes.train import NAMES, SHIPPED

FolderOf = Callable[[str, str], Path]


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in load_file(folder / storage.WEIGHTS).items()}


def test_half_the_bytes_and_still_float32_when_loaded(folder_of: FolderOf, tmp_path: Path) -> None:
    source = folder_of("llava", "clip")
    storage.store(source, tmp_path)
    assert set(dtypes(tmp_path).values()) == {torch.float16}
    assert (tmp_path / "config.json").read_bytes() == (source / "config.json").read_bytes()
    sizes = [(folder / storage.WEIGHTS).stat().st_size for folder in (source, tmp_path)]
    assert sizes[1] < 0.6 * sizes[0]
    before, after = load_model(str(source))[0].state_dict(), load_model(str(tmp_path))[0].state_dict()
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, before[name].half().float(), rtol=0, atol=0)
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_parts_can_keep_their_type(folder_of: FolderOf, tmp_path: Path) -> None:
    storage.store(folder_of("llava", "clip"), tmp_path, ["vision_tower"])
    for name, dtype in dtypes(tmp_path).items():
        assert dtype == (torch.float32 if name.startswith("vision_tower") else torch.float16)


def test_what_float16_cannot_hold_keeps_its_type(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    large, small = torch.tensor([7e4, 1.0]), torch.tensor([6e4, 1.0])
    save_file({"large": large, "small": small}, tmp_path / "source" / storage.WEIGHTS)
    storage.store(tmp_path / "source", tmp_path / "target")
    stored = load_file(tmp_path / "target" / storage.WEIGHTS)
    assert torch.equal(stored["large"], large)
    assert stored["small"].dtype == torch.float16


def test_differing_answers_are_counted() -> None:
    task = get_task("scenes", limit=3)
    right = [(item.answer, [1, 2]) for item in task.items]
    wrong: list[storage.Said] = [("nothing", [1, 2]), ("nothing", [1, 3]), right[2]]
    found = storage.compare(task, ClustRS(keep=2), right, wrong)
    assert (found["questions"], found["answers that differ"], found["selections that differ"]) == (3, 2, 1)
    assert found["right"] == [3, 1]
    json.dumps(found)


def test_answers_are_those_of_the_model() -> None:
    task: Any = get_task("scenes", limit=4)
    found = storage.answers(model_folder("mini-llava"), task, [NoPruning(), ClustRS(keep=4)], None)
    assert [len(said) for said in found] == [4, 4]
    assert sum(text == item.answer for (text, _), item in zip(found[0], task.items, strict=True)) >= 3
    assert [len(kept) for _, kept in found[0]] == [576] * 4
    assert [len(kept) for _, kept in found[1]] == [4] * 4


@pytest.mark.parametrize("name", NAMES.values())
def test_training_writes_where_the_package_is_built(name: str) -> None:
    assert name in MODELS
    assert SHIPPED / name == model_folder(name)
