"""Small models that can be tried at once, and images to ask them about; the package `clustrs-models` has the files."""

import json
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from clustrs.plugins import install_hint
from clustrs.validation import nearest

HERE = Path(__file__).parent
DATA_PACKAGE = "clustrs_models"
INSTALL = install_hint("models")
SAMPLE = "sample:"  # before the name of a sample image, where a file is asked for


@dataclass(frozen=True)
class EmbeddedModel:
    """A small model with a name that is taken wherever a model is asked for."""

    name: str
    family: str  # the `model_type` of its configuration
    knows: str  # what it can be asked about
    task: str  # the one that measures it
    question: str  # one that it understands
    built: bool = False  # comes in parts; `clustrs models get` puts it together in the user's cache, once


EMBEDDED = (  # a line per folder of `clustrs-models`; command line, web page and documentation follow from it
    EmbeddedModel("photo-llava", "llava", "photographs of 48 kinds of things", "photos", "What is this?"),
    EmbeddedModel("mini-llava", "llava", "drawn scenes", "scenes", "How many objects are there?"),
    EmbeddedModel("mini-onevision", "llava_onevision", "drawn scenes", "scenes", "How many objects are there?"),
    EmbeddedModel("mini-onevision-clips", "llava_onevision", "drawn clips", "clips", "How many objects pass?"),
    EmbeddedModel("smol-llava", "llava", "photographs", "photos-sentences", "What is this?", True),
)
MODELS = tuple(model.name for model in EMBEDDED)
BEARS: dict[str, dict[str, tuple[float, float]]] = {
    "photo-llava": {"gaussian": (0.11, 0.29), "salt_pepper": (0.021, 0.11)},
    "mini-llava": {"gaussian": (0.18, 0.54), "salt_pepper": (0.1, 0.43)},
    "mini-onevision": {"gaussian": (0.21, 0.4), "salt_pepper": (0.13, 0.43)},
    "smol-llava": {"gaussian": (0.29, 0.8), "salt_pepper": (0.15, 0.61)},
}
"""Levels of corruption that cost an unpruned model 10 % and 50 % of its clean score, as docs/evidence.md has them."""
DEFAULT = "photo-llava"  # the model of `clustrs ask`, `compare`, `app`, `eval` and `make demo` when none is given


@dataclass(frozen=True)
class Sample:
    """An image to try things with. Those that are like the images of a task have questions with known answers."""

    name: str
    path: Path
    licence: str
    questions: tuple[tuple[str, str], ...]
    task: str = ""


def embedded_model(name: str) -> EmbeddedModel | None:
    return next((model for model in EMBEDDED if model.name == name), None)


def default_task(model: str) -> str:
    """Return the task that measures an embedded model; for any other model, that of the default one."""
    tasks = {one.name: one.task for one in EMBEDDED}
    return tasks.get(model, tasks[DEFAULT])


def default_model(task: str) -> str:
    """Return the first embedded model that knows a task, or the default one."""
    return next((model.name for model in EMBEDDED if model.task == task), DEFAULT)


def model_and_task(model: str | None, task: str | None) -> tuple[str, str]:
    """Fill in a missing model or task: a model's own task, an embedded model that knows the task."""
    if model is None:
        model = DEFAULT if task is None else default_model(task)
    return model, default_task(model) if task is None else task


def list_known() -> str:
    by_knowledge: dict[str, list[str]] = {}
    for model in EMBEDDED:
        by_knowledge.setdefault(model.knows, []).append(model.name)
    return ", ".join(f"{' and '.join(names)} ({knows} only)" for knows, names in by_knowledge.items())


def model_folder(name: str) -> Path:
    """Return the folder of an embedded model, in the format of the model hub."""
    if name not in MODELS:
        raise ValueError(f"embedded model {name!r}: there are {', '.join(MODELS)}")
    package = data_package()
    if package is None:
        raise ValueError(f"model {name!r}: the package clustrs-models has this and is not installed: {INSTALL}")
    if not (package / name).is_dir():
        raise ValueError(f"model {name!r}: the installed clustrs-models does not have this: {INSTALL}")
    if name not in [model.name for model in EMBEDDED if model.built]:
        return package / name
    built: Path | None = import_module(f"{DATA_PACKAGE}.smol").find()
    if built is None:
        raise ValueError(f"model {name!r} is not built on this machine yet: clustrs models get {name}")
    return built


def folder_of(model_id: str) -> Path | None:
    """Return the folder of an embedded model, or the one that is given; None for an id of the Hugging Face hub."""
    expanded = model_folder(model_id) if model_id in MODELS else Path(os.path.expanduser(model_id))
    if os.path.exists(expanded):  # unlike Path.exists, also for names that are too long
        return expanded
    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
        raise ValueError(f"model {model_id!r}: there is no such folder")
    near = "" if "/" in model_id else nearest(model_id, MODELS)
    if near:  # answered at once: the hub would take its time to say that it has no such model
        raise ValueError(f"model {model_id!r}: there is no such folder or embedded model{near}")
    return None


def data_package() -> Path | None:
    """Return the folder of the package `clustrs-models`; None where it is not installed."""
    spec = find_spec(DATA_PACKAGE)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def samples(task: str | None = None) -> list[Sample]:
    """Return the sample images, those of the default model's task first; or those of one task."""
    found = [
        Sample(row["name"], folder / row["file"], row["licence"], tuple(map(tuple, row["questions"])), row["task"])
        for folder in sample_folders()
        for row in json.loads((folder / "samples.json").read_text())
    ]
    found.sort(key=lambda sample: (sample.task != default_task(DEFAULT), not sample.task))
    return [sample for sample in found if task in (None, sample.task)]


def sample_folders() -> list[Path]:
    """Return the folders of the installed sample images; those of the task `photos` are in `clustrs-models`."""
    package = data_package()
    folders = [HERE / "images"] if package is None else [HERE / "images", package / "samples"]
    return [folder for folder in folders if folder.is_dir()]


def image_path(given: str) -> Path:
    """Return the file that a user means: `sample:NAME` is a sample image, anything else is a path."""
    if not given.startswith(SAMPLE):
        return Path(given)
    paths = {sample.name: sample.path for sample in samples()}
    name = given.removeprefix(SAMPLE)
    if name not in paths:
        near = nearest(name, paths).replace("mean '", f"mean '{SAMPLE}")
        raise ValueError(f"image {given!r}{near}: the samples are {', '.join(paths)} (see clustrs samples)")
    return paths[name]


def expected_answer(image: str, question: str) -> str | None:
    """Return the answer to a question that `clustrs samples` lists for a sample image; None for any other."""
    found = [sample for sample in samples() if image == f"{SAMPLE}{sample.name}"]
    return dict(found[0].questions).get(question.strip()) if found else None
