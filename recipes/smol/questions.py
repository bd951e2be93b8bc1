"""Questions about photographs, collages and drawn scenes in varied wording, with answers from a word to a sentence.

The wording of a question decides the form of its answer, so that greedy decoding has one right text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.random import Generator

from recipes.smol.names import GROUPS, Kind, with_article

PLACES = ("top left", "top right", "bottom left", "bottom right")
NEIGHBORS = {
    "above": {2: 0, 3: 1},
    "below": {0: 2, 1: 3},
    "to the left of": {1: 0, 3: 2},
    "to the right of": {0: 1, 2: 3},
}
"""For each direction: which place is there, seen from which."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True)
class Question:
    """A question, its whole answer, and the word by which a reply is scored."""

    kind: str
    text: str
    answer: str
    word: str


def pick(generator: Generator, options: Sequence[str]) -> str:
    """Return one of some wordings."""
    return options[int(generator.integers(len(options)))]


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[0].upper() + text[1:]


def short(kind: Kind) -> str:
    """Return the name asked for in collages: of a pet, the animal."""
    return kind.species or kind.name


def about_single(kind: Kind, others: Sequence[Kind], generator: Generator) -> list[Question]:
    """Ask about one photograph. `others` are the kinds that yes/no questions may name."""
    name, a_name = short(kind), with_article(short(kind))
    asked = [
        Question("single", pick(generator, ("What is this?", "What do you see?", "What is in the photo?")),
                 f"{capital(a_name)}.", name),
        Question("single", pick(generator, ("What is this? Answer in a word or two.", "Name what you see.",
                                            "What is shown here? Be brief.")), capital(name), name),
        Question("single", pick(generator, ("Describe the image.", "Describe this picture in a sentence.",
                                            "What does the photo show?")), f"The photo shows {a_name}.", name),
    ]  # fmt: skip
    wrong = others[int(generator.integers(len(others)))]
    while short(wrong) == name:
        wrong = others[int(generator.integers(len(others)))]
    a_wrong = with_article(short(wrong))
    asked += [
        Question("presence", pick(generator, (f"Is this {a_name}?", f"Does the photo show {a_name}?")), "Yes.", "yes"),
        Question("presence", pick(generator, (f"Is this {a_wrong}?", f"Does the photo show {a_wrong}?")), "No.", "no"),
        Question("single", f"Is this {a_wrong}? If not, what is it?", f"No, it is {a_name}.", name),
        Question("choice", f"Is this {a_name} or {a_wrong}?", f"{capital(a_name)}.", name),
        Question("choice", f"Is this {a_wrong} or {a_name}?", f"{capital(a_name)}.", name),
    ]
    if kind.group in GROUPS:
        text = pick(generator, ("What kind of thing is this?", "What category does it belong to?"))
        asked.append(Question("group", text, f"{capital(with_article(kind.group))}.", kind.group))
    if kind.species:
        text = pick(generator, (f"What breed is this {kind.species}?", "Which breed is it?"))
        asked.append(Question("breed", text, f"It is {with_article(kind.name)}.", kind.name))
        asked.append(Question("single", "Is this a cat or a dog?", f"{capital(a_name)}.", name))
    return asked


def about_collage(kinds: Sequence[Kind], others: Sequence[Kind], generator: Generator) -> list[Question]:
    """Ask about four photographs in the order of `PLACES`, all of different names."""
    names = [short(kind) for kind in kinds]
    articles = [with_article(name) for name in names]
    asked = []
    for place, name, article in zip(PLACES, names, articles, strict=True):
        corner = place.replace("top", "upper").replace("bottom", "lower")
        text = pick(generator, (f"What is at the {place}?", f"What is in the {corner} corner?",
                                f"What do you see at the {place}?", f"Which thing is at the {place}?"))  # fmt: skip
        asked.append(Question("name", text, f"{capital(article)}.", name))
        text = pick(generator, (f"Where is the {name}?", f"In which corner is the {name}?"))
        asked.append(Question("where", text, f"At the {place}.", place))
        vertical, horizontal = place.split()
        text = pick(generator, (f"Is the {name} at the top or at the bottom?",
                                f"Is the {name} at the bottom or at the top?"))  # fmt: skip
        asked.append(Question("place", text, f"At the {vertical}.", vertical))
        text = pick(generator, (f"Is the {name} on the left or on the right?",
                                f"Is the {name} on the right or on the left?"))  # fmt: skip
        asked.append(Question("place", text, f"On the {horizontal}.", horizontal))
    for i, place in enumerate(PLACES):
        text = f"Describe what is at the {place}."
        asked.append(Question("name", text, f"{capital(articles[i])} at the {place}, next to {articles[i ^ 1]}.",
                              names[i]))  # fmt: skip
    for direction, pairs in NEIGHBORS.items():
        for seen, there in pairs.items():
            text = pick(generator, (f"What is {direction} the {names[seen]}?",
                                    f"Which thing is {direction} the {names[seen]}?"))  # fmt: skip
            asked.append(Question("neighbor", text, f"{capital(articles[there])}.", names[there]))
    listed = [f"{article} at the {place}" for article, place in zip(articles, PLACES, strict=True)]
    text = pick(generator, ("Describe the image.", "What is in the picture?", "Describe everything you see."))
    asked.append(Question("describe", text, f"{capital(', '.join(listed[:3]))} and {listed[3]}.", names[0]))
    text = pick(generator, ("List the things in the image.", "Which four things are shown?"))
    asked.append(Question("describe", text, f"{capital(', '.join(articles[:3]))} and {articles[3]}.", names[0]))
    for group in GROUPS:
        members = [name for name, kind in zip(names, kinds, strict=True) if kind.group == group]
        if len(members) == 1:
            text = pick(generator, (f"Which of these is {with_article(group)}?", f"Which {group} do you see?"))
            asked.append(Question("which", text, f"The {members[0]}.", members[0]))
    animals = sum(kind.group == "animal" for kind in kinds)
    text = pick(generator, ("How many animals are there?", "How many of the photos show an animal?"))
    asked.append(Question("count", text, f"{capital(NUMBERS[animals])}.", NUMBERS[animals]))
    shown = pick(generator, names)
    asked.append(Question("presence", f"Is there {with_article(shown)}?", "Yes.", "yes"))
    absent = [short(kind) for kind in others if short(kind) not in names]
    asked.append(Question("presence", f"Is there {with_article(pick(generator, absent))}?", "No.", "no"))
    return asked


def about_scene(
    questions: Sequence[tuple[str, str, str]], listed: Sequence[str], generator: Generator
) -> list[Question]:
    """Turn a drawn scene's questions (kind, text, answer) and its objects' names into this model's wording."""
    asked = []
    for kind, text, answer in questions:
        text = text.replace("colour", "color").replace(" a orange", " an orange")
        if kind in ("presence",):
            asked.append(Question("scene " + kind, text, f"{capital(answer)}.", answer))
        elif kind in ("count", "count of a colour"):
            word = NUMBERS[int(answer)]
            asked.append(Question("scene count", text, f"{capital(word)}.", word))
        elif kind == "shape":
            asked.append(Question("scene shape", text, f"{capital(with_article(answer))}.", answer))
        elif kind == "digit":
            asked.append(Question("scene digit", text, f"A {answer}." if answer != "8" else "An 8.", answer))
        else:
            asked.append(Question("scene " + kind.replace("colour", "color"), text, f"{capital(answer)}.", answer))
    if listed:
        texts = ("Describe the image.", "What is in the picture?", "List the objects from left to right.")
        said = [with_article(name) for name in listed]
        together = said[0] if len(said) == 1 else f"{', '.join(said[:-1])} and {said[-1]}"
        asked.append(Question("scene list", pick(generator, texts), f"{capital(together)}.", listed[0]))
    return asked
