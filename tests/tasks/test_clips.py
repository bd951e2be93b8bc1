"""Clips: seeded, fair, drawn as they say, and asked frame by frame."""

from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from clustrs import Config, expand_methods
from clustrs.evaluation.runner import Worker
from clustrs_models.clips import KINDS, LENGTHS, SIDE, ClipExample, draw, durations, every, examples, load, sample
from clustrs_models.drawing import COLORS, is_held_out


@pytest.fixture(scope="module")
def tests() -> list[ClipExample]:
    return list(examples())


def test_the_test_set_is_large_enough_and_covers_all_kinds(tests: list[ClipExample]) -> None:
    kinds = Counter(question.kind for example in tests for question in example.questions)
    assert len(tests) == 200
    assert set(kinds) == set(KINDS)
    assert min(kinds.values()) >= 140
    assert {example.clip.length for example in tests} == set(LENGTHS)
    assert min(LENGTHS) == 8
    assert max(LENGTHS) == 32


def test_guessing_the_most_frequent_answer_gains_little(tests: list[ClipExample]) -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for example in tests:
        for question in example.questions:
            form = question.kind if question.kind != "second" else question.text
            answers[form][question.answer] += 1
    for form, counts in answers.items():
        assert max(counts.values()) <= 1.5 * sum(counts.values()) / len(counts), form
    guessed = sum(max(counts.values()) for counts in answers.values())
    assert guessed / sum(sum(counts.values()) for counts in answers.values()) < 0.35


def test_the_length_of_a_clip_says_nothing_about_its_answers(tests: list[ClipExample]) -> None:
    for kind, chance in (("direction", 1 / 4), ("passing", 1 / 3), ("change", 1 / 2)):
        table: dict[int, Counter[str]] = defaultdict(Counter)
        for example in tests:
            for question in example.questions:
                if question.kind == kind:
                    table[example.clip.length][question.answer] += 1
        known = sum(max(counts.values()) for counts in table.values())
        assert known / sum(sum(counts.values()) for counts in table.values()) < chance + 0.12, kind


def test_the_same_seed_gives_the_same_clips(tests: list[ClipExample]) -> None:
    again = list(examples(3))
    for a, b in zip(again, tests, strict=False):
        assert all((x == y).all() for x, y in zip(a.frames(), b.frames(), strict=True))
        assert a.questions == b.questions
    assert [item.id for item in load(limit=7).items] == [item.id for item in load().items[:7]]


def test_training_never_sees_a_test_sets_objects(tests: list[ClipExample]) -> None:
    held = {frozenset(one.thing.name for one in example.clip.passing) for example in tests}
    generator = default_rng(0)
    for _ in range(2000):
        assert frozenset(one.thing.name for one in sample(generator, 8).passing) not in held
    assert all(is_held_out([one.thing.name for one in example.clip.passing]) for example in tests)


def test_time_says_nothing_about_number() -> None:
    generator = default_rng(1)
    for length in set(LENGTHS):
        totals = {}
        for count in (2, 3, 4):
            ranges = [durations(count, length, generator) for _ in range(1500)]
            assert all(len(one) >= 2 for own in ranges for one in own)
            assert all(own[-1].stop <= length for own in ranges)
            assert all(a.stop <= b.start for own in ranges for a, b in pairwise(own))
            totals[count] = np.mean([sum(map(len, own)) for own in ranges])
        assert max(totals.values()) < 1.03 * min(totals.values())


def test_objects_move_as_they_say() -> None:
    generator = default_rng(2)
    for _ in range(200):
        clip = sample(generator, 8)
        for one in clip.passing:
            first, last = one.at(one.frames.start), one.at(one.frames.stop - 1)
            moved = {"right": last.x - first.x, "left": first.x - last.x}
            moved |= {"down": last.y - first.y, "up": first.y - last.y}
            assert max(moved, key=lambda name: moved[name]) == one.direction
            assert moved[one.direction] >= 26
            assert 0 < first.x < SIDE
            assert 0 < last.y < SIDE


def test_frames_show_what_the_clip_says() -> None:
    """The pixel in the middle of an object has its color, in the frames in which it is there and in no others."""
    generator = default_rng(3)
    seen = 0
    for _ in range(40):
        clip = sample(generator, 16)
        frames = draw(clip, generator)
        still = frames[0].astype(int)
        for number, frame in enumerate(frames):
            there = [one.at(number) for one in clip.passing if number in one.frames]
            standing = clip.after if number >= clip.until else clip.standing
            everything = [*there, standing]
            for thing in everything:
                others = [other for other in everything if other is not thing]
                apart = all(np.hypot(thing.x - one.x, thing.y - one.y) > one.reach + 2 for one in others)
                if apart and thing.shape not in ("star", "heart"):
                    pixel = frame[int(thing.y), int(thing.x)].astype(int)
                    nearest = min(COLORS, key=lambda name: np.abs(pixel - COLORS[name]).sum())
                    assert nearest == thing.color
                    seen += 1
            if not there and number < clip.until and not any(0 in one.frames for one in clip.passing):
                assert (frame == still).all()
    assert seen > 500


def test_answers_of_a_known_clip() -> None:
    clip = sample(default_rng(5), 8)
    said = {question.text: question.answer for question in every(clip)}
    assert said["How many objects pass?"] == str(len(clip.passing))
    assert said["Is the scene changed at the end?"] == ("yes" if clip.standing.name != clip.after.name else "no")
    for one in clip.passing:
        assert said[f"Which direction does the {one.thing.name} move?"] == one.direction
    first, second = (one.thing for one in clip.passing[:2])
    assert said.get("What colour passes second?") == (second.color if second.color != first.color else None)
    assert said.get("What shape passes second?") == (second.shape if second.shape != first.shape else None)


def test_the_task() -> None:
    task = load(limit=4)
    assert len(task.items) == 4
    assert task.open("clip-0000").size == (8 * SIDE, SIDE)
    assert [frame.size for frame in task.frames("clip-0001")] == [(SIDE, SIDE)] * 16
    item: Any = task.items[0]
    assert task.score(item, f" {item.answer.upper()}.") == 1.0
    assert task.score(item, f"{item.answer} {item.answer}") == 0.0
    with pytest.raises(ValueError, match="from 'clip-0000' on"):
        task.frames("clip-9999")
    with pytest.raises(ValueError, match="leave it out"):
        load(data="somewhere")  # type: ignore[arg-type]


def test_noise_is_fresh_in_each_frame_and_seeded() -> None:
    worker: Any = Worker(Config(task="clips", model="mini-onevision", methods=expand_methods(["none"], [16]), limit=1))
    clean, noisy, again, other = (
        [np.asarray(frame).astype(int) for frame in worker.show("clip-0000", corruption, seed)]
        for corruption, seed in (("clean", 0), ("gaussian:0.1", 0), ("gaussian:0.1", 0), ("gaussian:0.1", 1))
    )
    assert len(clean) == len(noisy) == 8
    noise = [a - b for a, b in zip(noisy, clean, strict=True)]
    assert all((a == b).all() for a, b in zip(noisy, again, strict=True))
    assert not any((a == b).all() for a, b in zip(noisy, other, strict=True))
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.1
