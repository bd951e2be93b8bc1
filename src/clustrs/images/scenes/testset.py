"""The fixed test set: held-out scenes, and questions whose answers are balanced within each kind."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from numpy.random import Generator, SeedSequence, default_rng

from clustrs.images.scenes.questions import Question, by_answer, every
from clustrs.images.scenes.rendering import Drawing, draw
from clustrs.images.scenes.scene import Scene, sample

IMAGES, EACH = 250, 6
TEST_SEED = 20251


@dataclass(frozen=True)
class Example:
    """An image (by number) and the questions about it."""

    number: int
    drawing: Drawing
    questions: tuple[Question, ...]


def generator_for(*key: int) -> Generator:
    """A random stream of its own for each key."""
    return default_rng(SeedSequence(key))


def choose(scene: Scene, count: int, kinds: Counter[str], answers: Counter[tuple[str, str]]) -> list[Question]:
    """The kinds and the answers that have been asked for least so far, each kind once. Updates the counts."""
    table = by_answer(every(scene))
    chosen = []
    for kind in sorted(table, key=lambda kind: kinds[kind])[:count]:
        answer = min(table[kind], key=lambda answer: answers[kind, answer])
        group = table[kind][answer]
        chosen.append(group[kinds[kind] * 7919 % len(group)])
        kinds[kind] += 1
        answers[kind, answer] += 1
    return chosen


def examples(images: int = IMAGES, each: int = EACH, side: int = 192, seed: int = TEST_SEED) -> Iterator[Example]:
    """The test set, image by image. The same seed gives the same set; a shorter one is its beginning."""
    kinds: Counter[str] = Counter()
    answers: Counter[tuple[str, str]] = Counter()
    for number in range(images):
        generator = generator_for(seed, side, number)
        scene = sample(generator, side, held_out=True)
        yield Example(number, draw(scene, generator), tuple(choose(scene, each, kinds, answers)))
