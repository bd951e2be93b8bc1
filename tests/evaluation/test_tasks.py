"""The tasks by name, their fingerprints and the drawn scenes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation.task_files import line, write_lines

from clustrs.evaluation.tasks import Item, Task, fingerprint, get_task, list_tasks
from clustrs_models.scenes import KINDS, examples


def test_names() -> None:
    assert list_tasks() == [
        "clips",
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
