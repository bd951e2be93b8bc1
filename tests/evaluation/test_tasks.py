"""The tasks by name, their fingerprints, the drawn scenes, and datasets of the hub."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from evaluation.task_files import line, science, vet, write_json, write_lines
from PIL import Image

from clustrs.evaluation.tasks import Item, Task, fingerprint, get_task, list_tasks, mmvet, scienceqa
from clustrs_models.scenes import KINDS, examples


def test_names() -> None:
    assert list_tasks() == [
        "custom",
        "describe",
        "mmvet",
        "photos",
        "photos-sentences",
        "scenes",
        "scenes-sentences",
        "scienceqa",
    ]


@pytest.mark.parametrize(("name", "meant"), [("mm-vet", "mmvet"), ("Scene", "scenes"), ("science_qa", "scienceqa")])
def test_unknown_names_suggest_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown task '{name}'.*did you mean '{meant}'.*custom, describe, mmvet"):
        get_task(name)


def test_unknown_options() -> None:
    with pytest.raises(ValueError, match=r"'presnt' \(did you mean 'present'\?\): it has present, hub"):
        get_task("scienceqa", presnt=True)
    with pytest.raises(ValueError, match="no option 'data_folder': it has none"):
        get_task("scenes", data_folder="x")


@pytest.mark.parametrize("limit", [0, -1, 2.0, True, "3"])
def test_bad_limits(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"limit must be an integer of at least 1"):
        get_task("scenes", limit=limit)


@pytest.mark.parametrize("data", ["~nobody-of-that-name/x", "x" * 5000, 3])
def test_impossible_paths(data: Any) -> None:
    with pytest.raises(ValueError, match=r"^data"):
        get_task("custom", data=data)


def test_import_is_light() -> None:
    code = "import sys, clustrs.evaluation.tasks; print({'transformers', 'datasets'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_fingerprint_known_value(tmp_path: Path) -> None:
    write_lines(tmp_path / "questions.jsonl", line(id="é", answer=["a", "b"]))
    # sha256sum of [["\u00e9", "a.png", "What is it?", "a<OR>b"]]
    expected = "b812a579cab5c4042d46ac92a7d03e90fd99ea1154bd485055ae790fe568fa46"
    assert fingerprint(get_task("custom", data=tmp_path)) == expected


def test_fingerprint_depends_on_questions_and_not_on_the_folder(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {},
        "c": {"answer": "x"},
        "d": {"question": "?"},
        "e": {"id": 2},
    }
    prints = []
    for folder, change in changes.items():
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "questions.jsonl", line(**({"id": 1} | change)))
        prints.append(fingerprint(get_task("custom", data=tmp_path / folder)))
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_fingerprint_depends_on_the_limit() -> None:
    assert fingerprint(get_task("scenes", limit=6)) != fingerprint(get_task("scenes", limit=5))


@pytest.fixture(scope="module")
def task() -> Task:
    return get_task("scenes")


def test_scenes_all_questions(task: Task) -> None:
    assert len(task.items) == 1490
    images = list(dict.fromkeys(item.image for item in task.items))
    assert images == [f"scene-{number:04}" for number in range(250)]
    assert {kind for item in task.items for kind in item.kinds} == set(KINDS)
    assert all(len(item.kinds) == 1 for item in task.items)
    assert len({item.id for item in task.items}) == 1490
    assert (task.max_new_tokens, task.scale, task.judged) == (4, 100.0, False)


def test_scenes_images_and_questions_belong_together(task: Task) -> None:
    for example in examples(3):
        image = f"scene-{example.number:04}"
        assert (np.asarray(task.open(image)) == example.drawing.pixels).all()
        asked = [(item.question, item.answer, *item.kinds) for item in task.items if item.image == image]
        assert asked == [(question.text, question.answer, question.kind) for question in example.questions]


@pytest.mark.parametrize("limit", [1, 6, 8])
def test_scenes_limit_keeps_the_beginning(task: Task, limit: int) -> None:
    short = get_task("scenes", limit=limit)
    assert short.items == task.items[:limit]
    for item in short.items:
        assert short.open(item.image) == task.open(item.image)


def test_scenes_score(task: Task) -> None:
    item = Item("a", "scene-0000", "What colour?", "red")
    good = ["red", "Red", " RED. ", "red .\n"]
    bad = ["", "blue", "red star", "redred", "a red", "red!", "re", "red..", "."]
    assert [task.score(item, text) for text in good] == [1.0] * len(good)
    assert [task.score(item, text) for text in bad] == [0.0] * len(bad)


def test_scenes_no_folder_and_no_other_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out"):
        get_task("scenes", data=tmp_path)
    with pytest.raises(ValueError, match="image 'scene-0001': there are 1"):
        get_task("scenes", limit=2).open("scene-0001")


class Rows:
    """As much of `datasets.Dataset` as is used; decoding an image is counted."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.decoded = 0

    def remove_columns(self, names: list[str]) -> "Rows":
        if any(name not in row for row in self.rows for name in names):
            raise ValueError(f"Column name {names} not in the dataset.\nMore lines.")
        return Rows([{key: value for key, value in row.items() if key not in names} for row in self.rows])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.decoded += any("image" in row for row in self.rows)
        return iter(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.decoded += 1
        return self.rows[number]


class FakeHub(ModuleType):
    """A `datasets` that knows one dataset, or fails."""

    def __init__(self, rows: Rows | Exception) -> None:
        super().__init__("datasets")
        self.rows = rows
        self.asked: list[tuple[str, str | None, str]] = []

    def load_dataset(self, path: str, name: str | None = None, *, split: str) -> Rows:
        self.asked.append((path, name, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def install(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception) -> FakeHub:
    hub = FakeHub(Rows(rows) if isinstance(rows, list) else rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    return hub


def test_hub_mmvet(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGBA", (3, 2), (1, 2, 3, 255))
    row = {"question_id": "v1_0", "image": image, "question": "x?", "answer": "1<OR>2", "capability": "ocr,math"}
    second = row | {"question_id": "v1_1", "capability": "rec, gen", "image": None}
    hub = install(monkeypatch, [row, second])
    task = get_task("mmvet")
    assert hub.asked == [("lmms-lab/MMVet", None, "test")]
    assert isinstance(hub.rows, Rows)
    assert hub.rows.decoded == 0
    assert task.items == [
        Item("v1_0", "v1_0", "x?", "1<OR>2", ("ocr", "math")),
        Item("v1_1", "v1_1", "x?", "1<OR>2", ("rec", "gen")),
    ]
    opened = task.open("v1_0")
    assert (opened.mode, opened.getpixel((0, 0))) == ("RGB", (1, 2, 3))
    with pytest.raises(ValueError, match="image 'v1_1': its row in the dataset has none"):
        task.open("v1_1")
    with pytest.raises(ValueError, match="no such image"):
        task.open("v1_2")


def test_hub_scienceqa_says_the_same_as_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = Image.new("L", (3, 2), 7)
    rows = [
        {"image": image, "question": "Which?", "choices": ["x", "y"], "answer": 1, "hint": "Look.\nWell."},
        {"image": image, "question": "Why?", "choices": ["x", "y", "z"], "answer": 0, "hint": ""},
    ]
    hub = install(monkeypatch, rows)
    entries = [
        science("a", "<image>\nContext: Look.\nWell.\nWhich?\nA. x\nB. y", "B"),
        science("b", "<image>\nWhy?\nA. x\nB. y\nC. z", "A"),
    ]
    write_json(tmp_path / "llava_test_CQM-A.json", entries)
    task, file = get_task("scienceqa"), get_task("scienceqa", data=tmp_path)
    assert hub.asked == [("lmms-lab/ScienceQA", "ScienceQA-IMG", "test")]
    for item, same in zip(task.items, file.items, strict=True):
        assert (item.question, item.answer, item.kinds) == (same.question, same.answer, same.kinds)
    assert [item.id for item in task.items] == ["row-0000", "row-0001"]
    assert task.open("row-0001").getpixel((0, 0)) == (7, 7, 7)
    assert len(get_task("scienceqa", limit=1).items) == 1


def test_hub_other_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, ConnectionError("no route\nto the hub"))
    with pytest.raises(ValueError, match=r"hub 'me/vet' could not be loaded \(no route\): pass data=DIR") as caught:
        get_task("mmvet", hub="me/vet")
    assert "\n" not in str(caught.value)
    assert hub.asked == [("me/vet", None, "test")]
    write_json(tmp_path / "mm-vet.json", {"q": vet()})
    with pytest.raises(ValueError, match="pass either hub or data"):
        get_task("mmvet", data=tmp_path, hub="me/vet")


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("mmvet", {"question": "x"}, "could not be loaded"),
        (
            "mmvet",
            {"image": None, "question": "x", "answer": "y", "capability": "ocr"},
            "row 0: question_id must be .* got nothing",
        ),
        (
            "mmvet",
            {"image": None, "question_id": "a", "question": "x", "answer": "y", "capability": 3},
            "capability",
        ),
        ("scienceqa", {"image": None, "question": "x", "choices": ["a", "b"], "answer": 2}, "answer must be .* got 2"),
        (
            "scienceqa",
            {"image": None, "question": "x", "choices": ["a", "b"], "answer": True},
            "answer must .* True",
        ),
        ("scienceqa", {"image": None, "question": "x", "choices": list("abcdef"), "answer": 0}, "2 to 5"),
        (
            "scienceqa",
            {"image": None, "question": None, "choices": ["a", "b"], "answer": 0},
            "question must .* None",
        ),
    ],
)
def test_hub_other_columns(monkeypatch: pytest.MonkeyPatch, task: str, row: dict[str, Any], message: str) -> None:
    install(monkeypatch, [row])
    with pytest.raises(ValueError, match=message):
        get_task(task)


@pytest.mark.parametrize("task", ["mmvet", "scienceqa"])
def test_hub_without_the_library(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pass data=DIR \(--data DIR\).*https://github.com.*install `datasets`"):
        get_task(task)


def test_addresses_in_messages_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    addresses = [
        address for advice in (mmvet.ADVICE, scienceqa.ADVICE) for address in re.findall(r"https://[^\s()]+", advice)
    ]
    assert len(addresses) == 3
    assert all(address in page for address in addresses)
