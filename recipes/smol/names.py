"""Names for the things on the photographs: Caltech-101 and Oxford Pets, and which photographs are for testing."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

SPLIT_SEED, TEST_SHARE, HELD_SHARE = 2026, 0.25, 0.08
"""The split of `clustrs.images.photos`: a folder's files in the order of their checksums, the first quarter for tests.
The next few are held back from training to watch it."""

CALTECH = {
    "animal": "Leopards:leopard ant bass:fish beaver butterfly cougar_body:cougar cougar_face:cougar crab crayfish "
    "crocodile crocodile_head:crocodile dalmatian dolphin dragonfly elephant emu flamingo flamingo_head:flamingo "
    "gerenuk:gazelle hawksbill:sea_turtle hedgehog ibis kangaroo llama lobster mayfly octopus okapi panda pigeon "
    "platypus rhino:rhinoceros rooster scorpion sea_horse:seahorse starfish tick wild_cat nautilus",
    "vehicle": "Motorbikes:motorbike airplanes:airplane car_side:car ferry helicopter ketch:sailboat schooner:sailboat "
    "wheelchair",
    "instrument": "accordion electric_guitar euphonium grand_piano mandolin saxophone",
    "plant": "bonsai joshua_tree lotus sunflower water_lilly:water_lily",
    "building": "minaret pagoda pyramid",
    "food": "pizza strawberry",
    "object": "anchor barrel binocular:pair_of_binoculars brain buddha camera cannon ceiling_fan cellphone:cell_phone "
    "chair chandelier cup dollar_bill:banknote ewer:jug gramophone headphone:headset inline_skate lamp laptop menorah "
    "metronome revolver scissors:pair_of_scissors soccer_ball stapler stop_sign umbrella watch windsor_chair:chair "
    "wrench yin_yang:yin_yang_symbol",
    "figure": "brontosaurus:dinosaur stegosaurus:dinosaur garfield:cartoon_cat snoopy:cartoon_dog trilobite:fossil",
}
GROUPS = ("animal", "vehicle", "instrument", "plant", "building")
"""Groups that questions ask for."""
TESTED = (
    "Leopards dalmatian elephant kangaroo panda llama hedgehog dolphin hawksbill sea_horse starfish flamingo rooster "
    "butterfly dragonfly scorpion airplanes helicopter Motorbikes car_side ferry ketch accordion grand_piano "
    "electric_guitar euphonium sunflower bonsai lotus minaret pagoda pyramid camera laptop cellphone watch headphone "
    "chandelier umbrella chair barrel revolver soccer_ball stop_sign ewer dollar_bill buddha brain"
)
"""Folders of the 48 kinds of the task `photos`: these are drawn more often."""


@dataclass(frozen=True)
class Kind:
    """A kind of thing: its name, its group, its folder, and for pets the animal."""

    name: str
    group: str
    folder: str
    species: str = ""

    @property
    def weight(self) -> float:
        """How often it is drawn, relative to the 48 kinds of the task `photos`."""
        return 1.0 if self.folder in TESTED.split() else 0.15 if self.species else 0.4


def caltech_kinds() -> list[Kind]:
    """Return the kinds of Caltech-101."""
    entries = [(group, entry.partition(":")) for group, entries in CALTECH.items() for entry in entries.split()]
    return [Kind((name or folder).replace("_", " "), group, folder) for group, (folder, _, name) in entries]


def pet_kinds(data: Path) -> list[Kind]:
    """Return the breeds of Oxford Pets; folders of cats begin with a capital."""
    folders = sorted(path.name for path in data.iterdir() if path.is_dir())
    return [
        Kind(folder.replace("_", " ").title(), "animal", folder, "cat" if folder[0].isupper() else "dog")
        for folder in folders
    ]


def split(folder: Path) -> dict[str, list[Path]]:
    """Return a folder's photographs for "test", "held" and "train"."""
    names = sorted(path.name for path in folder.glob("*.jpg"))
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{SPLIT_SEED}/{folder.name}/{name}".encode()).digest())
    tested = sum(rank < TEST_SHARE * len(ranked) for rank in range(len(ranked)))
    held = tested + max(2, round(HELD_SHARE * len(ranked)))
    parts = {"test": ranked[:tested], "held": ranked[tested:held], "train": ranked[held:]}
    return {part: [folder / name for name in sorted(chosen)] for part, chosen in parts.items()}


def with_article(name: str) -> str:
    """Put the indefinite article before a name."""
    an = name[0].lower() in "aeiou" and not name.lower().startswith("eu")
    return f"{'an' if an else 'a'} {name}"
