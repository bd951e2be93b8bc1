"""The fixed test set: photographs that training has not seen, and questions whose answers are balanced."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clustrs.images.photos.collage import PLACES
from clustrs.images.photos.kinds import KINDS, Kind, Photo
from clustrs.images.photos.questions import QUESTION_KINDS, every
from clustrs.images.photos.sampling import draw_kinds
from clustrs.images.scenes.questions import Question, by_answer
from clustrs.images.scenes.testset import generator_for

TEST_SEED = 20261
ROUNDS = 72
"""Of each round, three images are collages and two are single photographs: 360 images."""
ALWAYS = ("name", "neighbour")
"""What is asked of every collage; of the other kinds of questions, the three that were asked least so far."""
OTHERS = 3


@dataclass(frozen=True)
class Example:
    """An image by name, its photographs (one, or four in the order of `PLACES`), and the questions about it."""

    name: str
    photos: tuple[Photo, ...]
    questions: tuple[Question, ...]


class Balance:
    """Chooses questions so that all kinds, and within a kind all answers, are asked for about equally often."""

    def __init__(self, seed: int) -> None:
        self.generator = generator_for(seed, 4)
        self.kinds: Counter[str] = Counter()
        self.answers: Counter[tuple[str, str]] = Counter()

    def choose(self, kinds: Sequence[Kind], wanted: Sequence[str]) -> list[Question]:
        """One question of each of the wanted kinds, with the answer that was asked for least so far; of several such,
        a random one, or else the first place would be asked for most. Where there is another answer, no two questions
        about an image have the same."""
        table = by_answer(every(kinds))
        chosen: list[Question] = []
        for kind in wanted:
            answers = [list(table[kind])[i] for i in self.generator.permutation(len(table[kind]))]
            given = {question.answer for question in chosen}
            answers = [answer for answer in answers if answer not in given] or answers
            answer = min(answers, key=lambda answer: self.answers[kind, answer])
            group = table[kind][answer]
            chosen.append(group[self.generator.integers(len(group))])
            self.kinds[kind] += 1
            self.answers[kind, answer] += 1
        return chosen

    def least(self, kinds: Sequence[Kind], count: int) -> list[str]:
        """The kinds of questions about a collage that were asked least, without those that are always asked."""
        possible = {question.kind for question in every(kinds)} - set(ALWAYS)
        return sorted(possible, key=lambda kind: (self.kinds[kind], QUESTION_KINDS.index(kind)))[:count]


class Deck:
    """Photographs of each kind in a random order, dealt in turn, so that all are used about equally often."""

    def __init__(self, photos: Sequence[Photo], seed: int) -> None:
        generator = generator_for(seed, 1)
        self.by_kind = {kind: [photo for photo in photos if photo.kind == kind] for kind in KINDS}
        for pile in self.by_kind.values():
            generator.shuffle(pile)
        self.dealt: Counter[Kind] = Counter()

    def deal(self, kind: Kind) -> Photo:
        pile = self.by_kind[kind]
        self.dealt[kind] += 1
        return pile[(self.dealt[kind] - 1) % len(pile)]


def examples(photos: Sequence[Photo], rounds: int = ROUNDS, seed: int = TEST_SEED) -> Iterator[Example]:
    """The test set of some photographs, image by image. The same seed and photographs give the same set; a shorter set
    is the beginning of a longer one."""
    balance, deck = Balance(seed), Deck(photos, seed)
    order = generator_for(seed, 2).permutation(len(KINDS))
    for number in range(5 * rounds):
        turn, position = divmod(number, 5)
        if position % 2 == 0:  # the first, third and fifth of a round
            index = 3 * turn + position // 2
            kinds = draw_kinds(generator_for(seed, 3, index), animals=index % (len(PLACES) + 1))
            wanted, name = [*ALWAYS, *balance.least(kinds, OTHERS)], f"collage-{index:04}"
        else:
            index = 2 * turn + position // 2
            kinds, name = [KINDS[order[index % len(KINDS)]]], f"single-{index:04}"
            wanted = ["single", "presence"] if index % 2 == 0 else ["single"]
        yield Example(name, tuple(deck.deal(kind) for kind in kinds), tuple(balance.choose(kinds, wanted)))
