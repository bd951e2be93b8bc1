"""Questions about photographs, each with an answer of one word."""

from collections.abc import Sequence

from clustrs.images.photos.collage import PLACES
from clustrs.images.photos.kinds import GROUPS, KINDS, Kind
from clustrs.images.scenes.questions import Question

QUESTION_KINDS = ("single", "name", "neighbour", "which", "presence", "count", "place")
"""What a single photograph shows; what is at a place of a collage; what is next to something; which of the four is an
animal, a vehicle ...; whether something is there; how many animals; in which half something is."""
NEIGHBOURS = {
    "above": {2: 0, 3: 1},
    "below": {0: 2, 1: 3},
    "to the left of": {1: 0, 3: 2},
    "to the right of": {0: 1, 2: 3},
}
"""For each direction: which place is there, seen from which."""


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' and not word.startswith('eu') else 'a'} {word}"


def presence(kinds: Sequence[Kind]) -> list[Question]:
    """Whether something is there, for every kind there is."""
    text = "Is this {}?" if len(kinds) == 1 else "Is there {}?"
    return [
        Question("presence", text.format(with_article(kind.name)), "yes" if kind in kinds else "no") for kind in KINDS
    ]


def halves(kinds: Sequence[Kind]) -> list[Question]:
    """In which half of the collage something is."""
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
    for direction, pairs in NEIGHBOURS.items():
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
