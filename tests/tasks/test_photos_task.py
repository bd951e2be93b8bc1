"""The task `photos`: photographs that come with the package, or a folder of Caltech-101."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from clustrs.evaluation.tasks import fingerprint, get_task
from clustrs_models.photographs import KINDS, PHOTOS, SIDE, Photos, is_test


@pytest.fixture(scope="module")
def task() -> Photos:
    task = get_task("photos")
    assert isinstance(task, Photos)
    return task


def test_it_has_images_and_questions(task: Photos) -> None:
    assert len(task.photos) >= 250
    assert len(task.items) >= 1200
    assert {item.image for item in task.items} == set(task.photos)
    assert len({item.id for item in task.items}) == len(task.items)


def test_answers_are_single_words(task: Photos) -> None:
    assert all(item.answer.isalnum() for item in task.items)


def test_images_are_as_the_model_sees_them(task: Photos) -> None:
    for image in ("collage-0000", "single-0000"):
        opened = task.open(image)
        assert (opened.size, opened.mode) == ((SIDE, SIDE), "RGB")
    first, second = (np.asarray(task.open(f"collage-{n:04}")) for n in (0, 1))
    assert not np.array_equal(first, second)
    with pytest.raises(ValueError, match="image 'scene-0001': there are 360, from 'collage-0000' on"):
        task.open("scene-0001")


def test_one_word_is_right_and_nothing_else(task: Photos) -> None:
    item = next(item for item in task.items if item.kinds == ("single",))
    assert task.score(item, f" {item.answer.capitalize()}.") == 1
    assert task.score(item, f"{item.answer} {item.answer}") == 0
    assert task.score(item, "") == 0


def test_a_limit_keeps_the_first_questions(task: Photos) -> None:
    short = get_task("photos", limit=7)
    assert list(short.items) == list(task.items)[:7]
    assert fingerprint(short) == fingerprint(get_task("photos", limit=7))


def test_of_a_folder_only_photographs_for_testing_are_shown(tmp_path: Path) -> None:
    for kind in KINDS:
        source = sorted((PHOTOS / kind.folder).iterdir())[0]
        (tmp_path / kind.folder).mkdir()
        for n in range(8):
            shutil.copyfile(source, tmp_path / kind.folder / f"{n}.jpg")
    task = get_task("photos", data=tmp_path)
    assert isinstance(task, Photos)
    shown = {photo.path for photos in task.photos.values() for photo in photos}
    files = [f"{n}.jpg" for n in range(8)]
    assert shown == {
        tmp_path / kind.folder / file for kind in KINDS for file, test in is_test(kind.folder, files).items() if test
    }


def test_the_photographs_are_attributed_and_small() -> None:
    notice = (PHOTOS / "NOTICE").read_text()
    assert "Caltech" in notice
    assert "CC BY 4.0" in notice
    files = list(PHOTOS.glob("*/*.jpg"))
    assert 48 <= len(files) <= 150
    assert sum(file.stat().st_size for file in files) < 4_000_000
