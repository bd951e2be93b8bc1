"""Scenes: seeded, fair, and drawn as they say."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from numpy.random import default_rng

from clustrs_models.drawing import COLORS, REACH, SHAPES, Scene, Thing, draw, is_held_out, outside, sample
from clustrs_models.scenes import KINDS, SceneExample, draw_questions, every, examples, lists


@pytest.fixture(scope="module")
def tests() -> list[SceneExample]:
    return list(examples())


def scene(*things: tuple[str, str, float, float, float, int | None]) -> Scene:
    return Scene(192, tuple(Thing(c, s, x, y, area, 0.0, digit) for c, s, x, y, area, digit in things))


def test_the_test_set_is_large_enough_and_covers_all_kinds(tests: list[SceneExample]) -> None:
    kinds = Counter(question.kind for example in tests for question in example.questions)
    assert len(tests) >= 200
    assert sum(kinds.values()) >= 1000
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 100


def test_guessing_the_most_frequent_answer_gains_little(tests: list[SceneExample]) -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    forms: dict[str, str] = {}
    for example in tests:
        for question in example.questions:
            # "left or right" and "above or below" are told apart by the question's own words
            form = question.kind + (" across" if "left or" in question.text else "")
            answers[form][question.answer] += 1
            forms[form] = question.kind
    guessed = sum(max(counts.values()) for counts in answers.values())
    assert guessed / sum(sum(counts.values()) for counts in answers.values()) < 0.35
    for form, counts in answers.items():
        assert max(counts.values()) <= 1.5 * sum(counts.values()) / len(counts), form


def test_the_same_seed_gives_the_same_images(tests: list[SceneExample]) -> None:
    again = list(examples(5))
    for a, b in zip(again, tests, strict=False):
        assert (a.drawing.pixels == b.drawing.pixels).all()
        assert a.questions == b.questions
    other = next(iter(examples(1, seed=1)))
    assert (other.drawing.pixels != tests[0].drawing.pixels).any()


def test_training_never_sees_a_test_sets_objects(tests: list[SceneExample]) -> None:
    held = {frozenset(thing.name for thing in example.drawing.scene.things) for example in tests}
    generator = default_rng(0)
    for _ in range(2000):
        seen = sample(generator)
        assert frozenset(thing.name for thing in seen.things) not in held
        assert not seen.held_out
    assert all(example.drawing.scene.held_out for example in tests)


def test_what_is_held_out_does_not_depend_on_the_order() -> None:
    names = ["red star", "blue circle", "pink heart"]
    assert is_held_out(names) == is_held_out(names[::-1])
    assert not is_held_out(["red star"])


def test_area_says_nothing_about_number() -> None:
    generator = default_rng(1)
    scenes = [sample(generator) for _ in range(3000)]
    numbers = [len(s.things) for s in scenes]
    totals = [sum(thing.area for thing in s.things) for s in scenes]
    assert abs(np.corrcoef(numbers, totals)[0, 1]) < 0.05
    by_number = [np.mean([t for n, t in zip(numbers, totals, strict=True) if n == count]) for count in (2, 3, 4, 5)]
    assert max(by_number) < 1.03 * min(by_number)
    assert min(Counter(numbers).values()) > 650


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_area_one_and_stay_within_reach(shape: str) -> None:
    step = 0.005
    line = np.arange(-1.2, 1.2, step).astype(np.float32)
    u, v = np.meshgrid(line, line)
    inside = outside(shape, u, v) < 0
    assert inside.sum() * step**2 == pytest.approx(1, abs=0.02)
    assert np.hypot(u, v)[inside].max() <= REACH[shape] + step


def test_coverage_is_what_was_painted() -> None:
    one = scene(("red", "square", 60, 60, 1024, None))
    drawing = draw(one, default_rng(0))
    assert drawing.coverage.sum() * 64 == pytest.approx(1024, rel=0.01)
    red = drawing.pixels.astype(int)
    painted = (red[..., 0] - red[..., 2] > 110).reshape(24, 8, 24, 8).mean((1, 3))
    touched = drawing.coverage[0] > 0
    assert abs(painted - drawing.coverage[0])[touched].max() < 0.15  # elsewhere there may be a red speck


def test_digits_are_where_they_say() -> None:
    with_digit = draw(scene(("blue", "circle", 100, 90, 1500, 1)), default_rng(0))
    without = draw(scene(("blue", "circle", 100, 90, 1500, None)), default_rng(0))
    assert with_digit.digits.sum() > 0
    assert without.digits.sum() == 0
    changed = (with_digit.pixels.astype(int) - without.pixels).any(-1).reshape(24, 8, 24, 8).any((1, 3))
    assert changed.any()
    assert not (changed & (with_digit.digits[0] == 0)).any()


def test_objects_keep_apart_and_inside() -> None:
    generator = default_rng(2)
    for side in (48, 96, 192, 216):
        for _ in range(100):
            things = sample(generator, side).things
            assert len({thing.name for thing in things}) == len(things)
            for i, a in enumerate(things):
                assert 0 < a.x < side
                assert 0 < a.y < side
                for b in things[:i]:
                    assert np.hypot(a.x - b.x, a.y - b.y) > a.reach + b.reach


def test_answers_of_a_known_scene() -> None:
    things = scene(
        ("red", "star", 40, 50, 1000, 7),
        ("red", "circle", 120, 60, 500, None),
        ("blue", "heart", 45, 150, 600, None),
    )
    said = {question.text: question.answer for question in every(things)}
    assert said["How many objects are there?"] == "3"
    assert said["How many red objects are there?"] == "2"
    assert said["How many green objects are there?"] == "0"
    assert said["What colour is the star?"] == "red"
    assert said["What shape is the blue object?"] == "heart"
    assert "What shape is the red object?" not in said
    assert said["Which digit is on the red star?"] == "7"
    assert "Which digit is on the blue heart?" not in said
    assert said["Is there a red heart?"] == "no"
    assert said["Is there a red star?"] == "yes"
    assert "Is there a green cross?" not in said
    assert said["Is the red star left or right of the red circle?"] == "left"
    assert "Is the red star left or right of the blue heart?" not in said
    assert said["Is the blue heart above or below the red circle?"] == "below"
    assert said["Is the red star larger or smaller than the red circle?"] == "larger"
    assert "Is the red circle larger or smaller than the blue heart?" not in said
    assert [question.answer for question in lists(things)] == [
        "red star 7, blue heart, red circle",
        "red star 7, red circle, blue heart",
        "red star 7, blue heart, red circle",
    ]


def test_drawn_questions_are_of_the_scene() -> None:
    generator = default_rng(3)
    for _ in range(50):
        one = sample(generator)
        assert set(draw_questions(one, 12, generator)) <= set(every(one))


def test_a_scaled_scene_keeps_its_proportions() -> None:
    one = sample(default_rng(4))
    larger = one.scaled(216)
    a, b = draw(one, default_rng(0)), draw(larger, default_rng(0))
    assert b.pixels.shape == (216, 216, 3)
    assert b.coverage.sum() / 27**2 == pytest.approx(a.coverage.sum() / 24**2, rel=0.02)
    assert set(COLORS) >= {thing.color for thing in larger.things}
