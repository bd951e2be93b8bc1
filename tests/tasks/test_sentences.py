"""The tasks for models that answer in sentences."""

import pytest

from clustrs_models import photographs, scenes
from clustrs_models.sentences import NAMES, Describe, load_describe, load_photos, load_scenes, names, words


@pytest.mark.parametrize(
    ("text", "word", "right"),
    [
        ("A pyramid at the bottom left, next to a stop sign.", "sign", True),
        ("A Sea Turtle.", "turtle", True),
        ("Seaturtle", "turtle", False),
        ("Two.", "2", True),
        ("There are 2 animals.", "2", True),
        ("12", "2", False),
        ("Two or three.", "2", False),
        ("Yes.", "yes", True),
        ("Yes, no.", "yes", False),
        ("Nothing", "no", False),
        ("At the top.", "top", True),
        ("top bottom", "top", False),
        ("", "car", False),
        ("\x00\u202e{}", "car", False),
    ],
)
def test_an_answer_is_right_when_it_has_the_word_and_no_alternative(text: str, word: str, right: bool) -> None:
    assert names(text, word) is right


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert words("  A Panda,a 3! ") == " a panda a three "


@pytest.mark.parametrize(("load", "plain"), [(load_photos, photographs.load), (load_scenes, scenes.load)])
def test_items_are_those_of_the_plain_task_in_other_words(load, plain) -> None:  # type: ignore[no-untyped-def]
    task, other = load(limit=60), plain(limit=60)
    assert [(item.id, item.image, item.answer) for item in task.items] == [
        (item.id, item.image, item.answer) for item in other.items
    ]
    assert not any("colour" in item.question for item in task.items)
    assert all(task.score(item, f"It is {item.answer}.") == 1 for item in task.items)
    image = task.items[0].image
    assert task.open(image).tobytes() == other.open(image).tobytes()


def test_questions_use_full_names() -> None:
    items = load_photos().items
    assert len(items) == 1296
    for short, full in NAMES.items():
        asked = [item.question for item in items if f" {short}" in item.question]
        assert asked
        assert all(full in question for question in asked)


def test_a_description_is_scored_by_what_it_names() -> None:
    task = load_describe(limit=5)
    assert isinstance(task, Describe)
    item = next(item for item in task.items if item.answer.count(", ") == 3)
    first, second, *_ = item.answer.split(", ")
    assert task.score(item, f"I see a {first} and a {second}.") == 0.5
    assert task.score(item, item.answer) == 1
    assert task.score(item, "") == 0
    assert len(load_describe().items) == 360
