"""The kinds of things on the photographs, and which photographs are kept for testing.

Both were written down before any result was known. A kind stands alone: of those that people mix up
(crocodile and crocodile head, ketch and schooner, lotus and water lily, chair and windsor chair, chandelier and
menorah), at most one is in the list.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 2026
"""Of the split; see `is_test`."""
TEST_SHARE = 0.25
"""The share of each kind's photographs that training never sees."""


@dataclass(frozen=True)
class Kind:
    """What is on a photograph: the word for it, the group it belongs to, and its folder in Caltech-101."""

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
    """Whether each photograph of a kind is for testing: those whose names' checksums come first."""
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
            raise ValueError(f"data={str(data)!r}: no photographs in {kind.folder}/: give a folder of Caltech-101")
        chosen = is_test(kind.folder, files)
        photos += [Photo(kind, folder / file) for file in files if test in (None, chosen[file])]
    return photos
