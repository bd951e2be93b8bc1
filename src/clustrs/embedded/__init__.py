"""What the package carries to be tried at once: two small models, and images to ask them about."""

import json
from dataclasses import dataclass
from pathlib import Path

from clustrs.validation import nearest

HERE = Path(__file__).parent
MODELS = ("mini-llava", "mini-onevision")
DEFAULT = MODELS[0]
SAMPLE = "sample:"
"""Before the name of a sample image, where a file is asked for."""


@dataclass(frozen=True)
class Sample:
    """An image that comes with the package. Photographs have no questions: the embedded models only know scenes."""

    name: str
    path: Path
    licence: str
    questions: tuple[tuple[str, str], ...]


def model_folder(name: str) -> Path:
    """Where an embedded model lies, in the format of the model hub."""
    if name not in MODELS:
        raise ValueError(f"embedded model {name!r}: there are {', '.join(MODELS)}")
    return HERE / name


def photo_folder() -> Path:
    """Where the photographs of the task `photos` lie, one folder per kind."""
    return HERE / "photos"


def samples() -> list[Sample]:
    """The sample images, scenes first."""
    listed = json.loads((HERE / "images" / "samples.json").read_text())
    return [
        Sample(row["name"], HERE / "images" / row["file"], row["licence"], tuple(map(tuple, row["questions"])))
        for row in listed
    ]


def image_path(given: str) -> Path:
    """The file that a user means: `sample:NAME` is a sample image, anything else is a path."""
    if not given.startswith(SAMPLE):
        return Path(given)
    name = given.removeprefix(SAMPLE)
    for sample in samples():
        if sample.name == name:
            return sample.path
    names = [sample.name for sample in samples()]
    near = nearest(name, names).replace("mean '", f"mean '{SAMPLE}")
    raise ValueError(f"image {given!r}{near}: the samples are {', '.join(names)} (see clustrs samples)")
