"""The task `photos`: photographs, alone and in collages of four, questions about them, and the fixed test set.

The kinds of things, and which photographs are kept for testing, were written down before any result was known. Of the
kinds that people mix up (crocodile and crocodile head, ketch and schooner, lotus and water lily, chair and windsor
chair, chandelier and menorah), at most one is in the list.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from numpy.random import Generator, SeedSequence, default_rng
from PIL import Image

from clustrs.corruptions.images import open_image
from clustrs.evaluation.tasks import Item, normalize_answer, task_info

PHOTOS = Path(__file__).parent / "photos"
"""The folder with the photographs of this package, one folder per kind."""
SEED = 2026
"""Of the split; see `is_test`."""
TEST_SHARE = 0.25
"""The share of each kind's photographs that training never sees."""


@dataclass(frozen=True)
class Question:
    """Question about a photograph or a drawn scene, with an answer of one word."""

    kind: str
    text: str
    answer: str


def by_answer(questions: Sequence[Question]) -> dict[str, dict[str, list[Question]]]:
    """Group questions by kind, then by answer."""
    table: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        table.setdefault(question.kind, {}).setdefault(question.answer, []).append(question)
    return table


def generator_for(*key: int) -> Generator:
    """A random stream of its own for each key."""
    return default_rng(SeedSequence(key))


@dataclass(frozen=True)
class Kind:
    """Kind of thing on a photograph: its name, its group, and its folder in Caltech-101."""

    name: str
    group: str
    folder: str


@dataclass(frozen=True)
class Photo:
    """A photograph in a folder of such folders."""

    kind: Kind
    path: Path


_FOLDERS = {
    "animal": {
        "leopard": "Leopards",
        "dalmatian": "dalmatian",
        "elephant": "elephant",
        "kangaroo": "kangaroo",
        "panda": "panda",
        "llama": "llama",
        "hedgehog": "hedgehog",
        "dolphin": "dolphin",
        "turtle": "hawksbill",
        "seahorse": "sea_horse",
        "starfish": "starfish",
        "flamingo": "flamingo",
        "rooster": "rooster",
        "butterfly": "butterfly",
        "dragonfly": "dragonfly",
        "scorpion": "scorpion",
    },
    "vehicle": {
        "airplane": "airplanes",
        "helicopter": "helicopter",
        "motorbike": "Motorbikes",
        "car": "car_side",
        "ferry": "ferry",
        "sailboat": "ketch",
    },
    "instrument": {
        "accordion": "accordion",
        "piano": "grand_piano",
        "guitar": "electric_guitar",
        "euphonium": "euphonium",
    },
    "plant": {"sunflower": "sunflower", "bonsai": "bonsai", "lotus": "lotus"},
    "building": {"minaret": "minaret", "pagoda": "pagoda", "pyramid": "pyramid"},
    "object": {
        "camera": "camera",
        "laptop": "laptop",
        "phone": "cellphone",
        "watch": "watch",
        "headset": "headphone",
        "chandelier": "chandelier",
        "umbrella": "umbrella",
        "chair": "chair",
        "barrel": "barrel",
        "revolver": "revolver",
        "ball": "soccer_ball",
        "sign": "stop_sign",
        "jug": "ewer",
        "banknote": "dollar_bill",
        "buddha": "buddha",
        "brain": "brain",
    },
}
KINDS = tuple(Kind(name, group, folder) for group, kinds in _FOLDERS.items() for name, folder in kinds.items())
GROUPS = ("animal", "vehicle", "instrument", "plant", "building")
"""Groups that questions ask for; any object is an object."""


def is_test(folder: str, files: Sequence[str]) -> dict[str, bool]:
    """Split the photographs of a kind: those whose names have the smallest checksums are for testing."""
    ranked = sorted(files, key=lambda file: hashlib.sha256(f"{SEED}/{folder}/{file}".encode()).digest())
    return {file: rank < TEST_SHARE * len(ranked) for rank, file in enumerate(ranked)}


def list_photos(data: Path, test: bool | None = None) -> list[Photo]:
    """The photographs in a folder that has one folder per kind, kind by kind: those for testing, those for training, or
    (without `test`) all of them."""
    photos: list[Photo] = []
    for kind in KINDS:
        folder = data / kind.folder
        files = sorted(path.name for path in folder.glob("*.jpg")) if folder.is_dir() else []
        if not files:
            raise ValueError(
                f"data must be a folder of Caltech-101, got {str(data)!r} (no photographs in {kind.folder}/)"
            )
        chosen = is_test(kind.folder, files)
        photos += [Photo(kind, folder / file) for file in files if test in (None, chosen[file])]
    return photos


SIDE = 336
PLACES = ("top left", "top right", "bottom left", "bottom right")
"""The four photographs of a collage, in this order."""


def square(photo: Image.Image, side: int, zoom: float = 1.0, x: float = 0.5, y: float = 0.5) -> Image.Image:
    """The largest square of a photograph, or the part `zoom` of its side, in RGB and resized to `side` pixels.

    `x` and `y` say where it lies, from 0 (left, top) to 1; the default is the middle.
    """
    photo = photo.convert("RGB")
    length = zoom * min(photo.size)
    left, top = x * (photo.width - length), y * (photo.height - length)
    box = (left, top, left + length, top + length)
    return photo.resize((side, side), Image.Resampling.BICUBIC, box)


def collage(squares: Sequence[Image.Image]) -> Image.Image:
    """Put four square photographs into two rows, or one alone, without a border."""
    if len(squares) == 1:
        return squares[0]
    if len(squares) != len(PLACES):
        raise ValueError(f"squares must be 1 or {len(PLACES)} photographs, got {len(squares)}")
    half = SIDE // 2
    image = Image.new("RGB", (SIDE, SIDE))
    for i, photo in enumerate(squares):
        image.paste(photo, (i % 2 * half, i // 2 * half))
    return image


QUESTION_KINDS = ("single", "name", "neighbour", "which", "presence", "count", "place")
"""Questions ask what a single photograph shows; what is at a place of a collage; what is next to something; which of
the four is an animal, a vehicle ...; whether something is there; how many animals; in which half something is."""
NEIGHBORS = {
    "above": {2: 0, 3: 1},
    "below": {0: 2, 1: 3},
    "to the left of": {1: 0, 3: 2},
    "to the right of": {0: 1, 2: 3},
}
"""For each direction: which place is there, seen from which."""


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' and not word.startswith('eu') else 'a'} {word}"


def presence(kinds: Sequence[Kind]) -> list[Question]:
    """Ask for every kind whether it is in the image."""
    text = "Is this {}?" if len(kinds) == 1 else "Is there {}?"
    return [
        Question("presence", text.format(with_article(kind.name)), "yes" if kind in kinds else "no") for kind in KINDS
    ]


def halves(kinds: Sequence[Kind]) -> list[Question]:
    """Ask in which half of the collage something is."""
    questions = []
    for i, kind in enumerate(kinds):
        vertical, horizontal = PLACES[i].split()
        questions += [
            Question("place", f"Is the {kind.name} at the top or at the bottom?", vertical),
            Question("place", f"Is the {kind.name} on the left or on the right?", horizontal),
        ]
    return questions


def every(kinds: Sequence[Kind]) -> list[Question]:
    """All questions about an image that shows these kinds, one or four in the order of `PLACES`, in a fixed order."""
    if len(kinds) == 1:
        return [Question("single", "What is this?", kinds[0].name), *presence(kinds)]
    questions = [
        Question("name", f"What is at the {place}?", kind.name) for place, kind in zip(PLACES, kinds, strict=True)
    ]
    for direction, pairs in NEIGHBORS.items():
        questions += [
            Question("neighbour", f"What is {direction} the {kinds[seen].name}?", kinds[there].name)
            for seen, there in pairs.items()
        ]
    for group in GROUPS:
        members = [kind for kind in kinds if kind.group == group]
        if len(members) == 1:
            questions.append(Question("which", f"Which of these is {with_article(group)}?", members[0].name))
    animals = sum(kind.group == "animal" for kind in kinds)
    questions.append(Question("count", "How many animals are there?", str(animals)))
    return questions + presence(kinds) + halves(kinds)


ANIMALS = (0.3, 0.3, 0.2, 0.12, 0.08)
"""Probability of 0 to 4 animals in a collage: every number occurs, and animals are hardly more frequent than others."""


def draw_kinds(generator: Generator, animals: int | None = None) -> list[Kind]:
    """Four different kinds in random order, with a random number of animals or the given one."""
    count = int(generator.choice(len(ANIMALS), p=ANIMALS)) if animals is None else animals
    inside = [kind for kind in KINDS if kind.group == "animal"]
    outside = [kind for kind in KINDS if kind.group != "animal"]
    chosen = [inside[i] for i in generator.choice(len(inside), count, replace=False)]
    chosen += [outside[i] for i in generator.choice(len(outside), len(PLACES) - count, replace=False)]
    return [chosen[i] for i in generator.permutation(len(chosen))]


TEST_SEED = 20261
ROUNDS = 72
"""Of each round, three images are collages and two are single photographs: 360 images."""
ALWAYS = ("name", "neighbour")
"""Kinds of questions on every collage; of the other kinds, the three that were asked least so far."""
OTHERS = 3


@dataclass(frozen=True)
class PhotoExample:
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


def examples(photos: Sequence[Photo], rounds: int = ROUNDS, seed: int = TEST_SEED) -> Iterator[PhotoExample]:
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
        yield PhotoExample(name, tuple(deck.deal(kind) for kind in kinds), tuple(balance.choose(kinds, wanted)))


class Photos:
    """Fixed test set of photographs; kinds are the kinds of its questions."""

    name = "photos"
    max_new_tokens = 4
    judged = False
    scale = 100.0

    def __init__(self, items: Sequence[Item], photos: Mapping[str, tuple[Photo, ...]]) -> None:
        self.items = items
        self.photos = photos

    def open(self, image: str) -> Image.Image:
        """The image as the model sees it, 336 pixels a side."""
        if image not in self.photos:
            raise ValueError(f"image {image!r}: there are {len(self.photos)}, from {next(iter(self.photos))!r} on")
        shown = self.photos[image]
        side = SIDE if len(shown) == 1 else SIDE // 2
        return collage([square(open_image(photo.path), side) for photo in shown])

    def score(self, item: Item, text: str) -> float | None:
        """1 for the expected word and nothing else."""
        return float(normalize_answer(text) == normalize_answer(item.answer))


@task_info(
    measures="1296 about 360 photographs and collages of four, in 7 kinds",
    scoring="the expected word",
    data="none (144 photographs come with clustrs-models), or --data FOLDER of Caltech-101",
)
def load(data: Path | None = None, limit: int | None = None) -> Photos:
    """Load the task from a folder of Caltech-101 (its photographs that are kept for testing), or from the photographs
    of this package, which are some of them."""
    photos = list_photos(PHOTOS) if data is None else list_photos(data, test=True)
    items: list[Item] = []
    images = {}
    for example in examples(photos):
        images[example.name] = example.photos
        for number, question in enumerate(example.questions):
            items.append(
                Item(f"{example.name}-{number}", example.name, question.text, question.answer, (question.kind,))
            )
        if limit is not None and len(items) >= limit:
            break
    return Photos(items[:limit], images)
