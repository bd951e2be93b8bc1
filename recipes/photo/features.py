"""Compute what the frozen tower says of every training image, once.

    python -m recipes.photo.features        writes build/photo/features/*.safetensors, about 440 KB an image,
                                            and build/photo/development/*.safetensors

Stop it at any moment: the same command continues with the first file that is missing. Several processes may share the
work: `--part 1/2` and `--part 2/2` write every second file each.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.photo import tower as towers
from recipes.photo.images import TrainingImages, kind_indices, pixel_values, training_images
from recipes.photo.settings import DATA, FOLDER, read_settings

BATCH = 4


def tokens(tower: nn.Module, pixels: Tensor) -> Tensor:
    """(B, 576, D): the output of the tower's last layer as the projector reads it, without CLS."""
    return towers.hidden_states(tower, pixels)[-1][:, 1:]


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.safetensors"


def compute_shard(tower: nn.Module, images: TrainingImages, numbers: range) -> dict[str, Tensor]:
    """Features (images, 576, D) in half precision, the kinds in the quarters (images, 4), and which are single."""
    features, kinds, single = [], [], []
    for first in range(numbers.start, numbers.stop, BATCH):
        batch = [images[n] for n in range(first, min(first + BATCH, numbers.stop))]
        features.append(tokens(tower, pixel_values([image.pixels for image in batch])).half())
        kinds += [kind_indices(image.kinds) for image in batch]
        single += [len(image.kinds) == 1 for image in batch]
    return {"features": torch.cat(features), "kinds": torch.stack(kinds), "single": torch.tensor(single)}


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def compute(
    tower: nn.Module, images: TrainingImages, count: int, shard: int, target: Path, part: tuple[int, int] = (1, 1)
) -> None:
    """Write the files of the first `count` images that are missing, or the given part of them."""
    target.mkdir(parents=True, exist_ok=True)
    shards = -(-count // shard)
    for number in range(part[0] - 1, shards, part[1]):
        path, started = shard_path(target, number), time.monotonic()
        if not path.exists():
            write_shard(path, compute_shard(tower, images, range(number * shard, (number + 1) * shard)))
            seconds = (time.monotonic() - started) / shard
            print(f"{target.name} {number + 1}/{shards}: {seconds:.2f} s an image", flush=True)


def part_of(text: str) -> tuple[int, int]:
    """Read "I/N"."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N (such as 1/2), got {text!r}")
    return int(first), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="the I-th of N processes")
    options = parser.parse_args()
    settings = read_settings()
    tower = towers.load(options.folder, settings["tower"]["layers"])
    learn, unseen = training_images(settings, options.data)
    shard = settings["features"]["shard"]
    compute(tower, unseen, settings["development"]["images"], shard, options.folder / "development", options.part)
    compute(tower, learn, settings["features"]["images"], shard, options.folder / "features", options.part)


if __name__ == "__main__":
    main()
