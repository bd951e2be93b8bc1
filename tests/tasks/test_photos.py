"""Photographs: kinds, the split, collages, questions, and the balance of the fixed test set."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clustrs_models.photographs import (
    GROUPS,
    KINDS,
    PHOTOS,
    PLACES,
    QUESTION_KINDS,
    SIDE,
    Kind,
    PhotoExample,
    collage,
    draw_kinds,
    every,
    examples,
    generator_for,
    is_test,
    list_photos,
    square,
    with_article,
)

BY_NAME = {kind.name: kind for kind in KINDS}


def kinds(*names: str) -> list[Kind]:
    return [BY_NAME[name] for name in names]


@pytest.fixture(scope="module")
def test_set() -> list[PhotoExample]:
    return list(examples(list_photos(PHOTOS)))


def test_a_kind_has_one_word_and_a_folder_of_its_own() -> None:
    assert 40 <= len(KINDS) <= 60
    assert len({kind.name for kind in KINDS}) == len({kind.folder for kind in KINDS}) == len(KINDS)
    assert all(kind.name.isalpha() and kind.name.islower() for kind in KINDS)
    for group in GROUPS:
        assert sum(kind.group == group for kind in KINDS) >= 3


def test_the_split_depends_on_names_alone() -> None:
    files = [f"{n:04}.jpg" for n in range(40)]
    chosen = is_test("panda", files)
    assert sum(chosen.values()) == 10
    assert is_test("panda", files[::-1]) == chosen
    assert is_test("llama", files) != chosen


def test_halves_of_the_split_are_disjoint_and_complete(tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind.folder).mkdir()
        for n in range(9):
            (tmp_path / kind.folder / f"{n}.jpg").touch()
    train, test, both = (list_photos(tmp_path, half) for half in (False, True, None))
    assert not {photo.path for photo in train} & {photo.path for photo in test}
    assert {photo.path for photo in both} == {photo.path for photo in train + test}
    assert Counter(photo.kind for photo in test) == dict.fromkeys(KINDS, 3)


def test_a_folder_without_photographs_of_a_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data must be a folder of Caltech-101, got '.*' \(no photographs in Leopards/\)"
    ):
        list_photos(tmp_path)


def test_a_collage_has_its_photographs_in_their_places() -> None:
    colors = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]
    image = collage([square(Image.new("RGB", (90, 60), color), SIDE // 2) for color in colors])
    assert image.size == (SIDE, SIDE)
    for place, color in zip(PLACES, colors, strict=True):
        x, y = SIDE // 4 + SIDE // 2 * ("right" in place), SIDE // 4 + SIDE // 2 * ("bottom" in place)
        assert image.getpixel((x, y)) == color
    with pytest.raises(ValueError, match="squares must be 1 or 4 photographs, got 3"):
        collage([image] * 3)


def test_a_square_is_the_middle_unless_said_otherwise() -> None:
    ramp = np.broadcast_to(np.arange(0, 240, 2, dtype=np.uint8)[None, :, None], (40, 120, 3))
    photo = Image.fromarray(np.ascontiguousarray(ramp))
    means = {x: np.asarray(square(photo, 20, x=x)).mean() for x in (0.0, 0.5, 1.0)}
    assert means == {0.0: pytest.approx(39, abs=2), 0.5: pytest.approx(119, abs=2), 1.0: pytest.approx(199, abs=2)}
    zoomed = np.asarray(square(photo, 20, zoom=0.5)).astype(int)
    assert np.ptp(zoomed) == pytest.approx(40, abs=4)


def test_questions_about_a_known_collage() -> None:
    asked = every(kinds("panda", "car", "guitar", "rooster"))
    answers = {question.text: question.answer for question in asked}
    assert len(answers) == len(asked)
    assert answers["What is at the top right?"] == "car"
    assert answers["What is below the panda?"] == "guitar"
    assert answers["What is above the rooster?"] == "car"
    assert answers["What is to the left of the rooster?"] == "guitar"
    assert answers["What is to the right of the panda?"] == "car"
    assert "What is above the panda?" not in answers
    assert answers["Which of these is an instrument?"] == "guitar"
    assert "Which of these is an animal?" not in answers  # there are two
    assert answers["How many animals are there?"] == "2"
    assert answers["Is there a panda?"] == "yes"
    assert answers["Is there an airplane?"] == "no"
    assert answers["Is the guitar at the top or at the bottom?"] == "bottom"
    assert answers["Is the guitar on the left or on the right?"] == "left"
    assert {question.kind for question in asked} == set(QUESTION_KINDS) - {"single"}


def test_questions_about_a_single_photograph() -> None:
    answers = {question.text: question.answer for question in every(kinds("euphonium"))}
    assert answers["What is this?"] == "euphonium"
    assert answers["Is this a euphonium?"] == "yes"
    assert answers["Is this an accordion?"] == "no"
    assert with_article("umbrella") == "an umbrella"


def test_kinds_of_a_collage_differ() -> None:
    generator = generator_for(2)
    counts: Counter[int] = Counter()
    for _ in range(500):
        drawn = draw_kinds(generator)
        assert len(set(drawn)) == len(PLACES)
        counts[sum(kind.group == "animal" for kind in drawn)] += 1
    assert set(counts) == set(range(5))
    assert sum(kind.group == "animal" for kind in draw_kinds(generator, animals=3)) == 3


def test_the_test_set_is_large_and_fixed(test_set: list[PhotoExample]) -> None:
    assert len(test_set) >= 250
    assert sum(len(example.questions) for example in test_set) >= 1200
    assert len({example.name for example in test_set}) == len(test_set)
    again = list(examples(list_photos(PHOTOS), rounds=4))
    assert again == test_set[:20]
    assert list(examples(list_photos(PHOTOS), rounds=4, seed=1)) != again


def test_every_photograph_is_used_about_equally(test_set: list[PhotoExample]) -> None:
    used = Counter(photo.path for example in test_set for photo in example.photos)
    assert len(used) == len(list_photos(PHOTOS))
    for kind in KINDS:
        own = [count for path, count in used.items() if path.parent.name == kind.folder]
        assert max(own) - min(own) <= 1


def test_answers_are_balanced(test_set: list[PhotoExample]) -> None:
    """Within each kind of question, no answer and no place is much more frequent than the others."""
    asked = [question for example in test_set for question in example.questions]
    by_kind = {kind: Counter(q.answer for q in asked if q.kind == kind) for kind in QUESTION_KINDS}
    for kind in ("single", "name", "neighbour"):
        assert len(by_kind[kind]) == len(KINDS)
        assert max(by_kind[kind].values()) <= 0.035 * by_kind[kind].total()
    assert abs(by_kind["presence"]["yes"] - by_kind["presence"]["no"]) <= 1
    for kind in ("count", "place"):
        expected = by_kind[kind].total() / len(by_kind[kind])
        assert all(count == pytest.approx(expected, rel=0.2) for count in by_kind[kind].values())
    places = Counter(question.text for question in asked if question.kind == "name")
    assert all(places[f"What is at the {place}?"] == pytest.approx(54, abs=15) for place in PLACES)


def test_questions_about_a_collage_ask_for_different_things(test_set: list[PhotoExample]) -> None:
    for example in test_set:
        named = [question.answer for question in example.questions if question.kind in ("name", "neighbour")]
        assert len(set(named)) == len(named)


def test_guessing_gains_little(test_set: list[PhotoExample]) -> None:
    """Always the most frequent answer to the same question (or, where questions name things, to the same kind)."""
    asked = [question for example in test_set for question in example.questions]
    right = 0
    for kind in QUESTION_KINDS:
        own = [question for question in asked if question.kind == kind]
        groups: dict[str, Counter[str]] = {}
        for q in own:
            key = q.text if kind in ("which", "name", "count", "single") else kind
            groups.setdefault(key, Counter())[q.answer] += 1
        right += sum(max(answers.values()) for answers in groups.values())
    assert right / len(asked) < 0.25
