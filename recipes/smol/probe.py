"""Choose the tower's resolution: a linear classifier of each quarter of a collage, on the features the projector reads.

    python -m recipes.smol.probe PARTS [--learn 400] [--judge 120]     prints and writes results/probe.json

It sees photographs of the training part of the 48 kinds of the task `photos`; those it is judged by are not among those
it learns from. At 336 pixels the position embeddings are interpolated.
"""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPVisionModel

from clustrs_models.photographs import list_photos
from recipes.photo import probe
from recipes.photo.images import TrainingImages, halves, kind_indices
from recipes.photo.settings import DATA, read_settings
from recipes.smol import tower as towers

RESULT = Path(__file__).parent / "results" / "probe.json"
SIDES = (224, 336)


def pooled(tokens: Tensor) -> Tensor:
    """Return mean and maximum of each quarter's tokens: [B, N, D] to [B, 4, 2 D]. The middle row and column of an odd
    grid belong to no quarter."""
    side = int(tokens.shape[1] ** 0.5)
    kept = [i for i in range(side) if side % 2 == 0 or i != side // 2]
    return probe.pooled(tokens.unflatten(1, (side, side))[:, kept][:, :, kept].flatten(1, 2))


@torch.no_grad()
def collect(tower: CLIPVisionModel, images: TrainingImages, count: int) -> tuple[dict[int, Tensor], Tensor]:
    """Return the pooled features [count, 4, 2 D] at each resolution, and the kinds [count, 4]."""
    found: dict[int, list[Tensor]] = {side: [] for side in SIDES}
    kinds = []
    for number in range(count):
        image = images[number]
        kinds.append(kind_indices(image.kinds))
        for side in SIDES:
            pixels = towers.to_pixels([image.pixels.resize((side, side), Image.Resampling.BICUBIC)])
            states = tower(pixels, interpolate_pos_encoding=side != towers.SIDE).last_hidden_state
            found[side].append(pooled(states[:, 1:]))
        if (number + 1) % 20 == 0:
            print(f"{number + 1}/{count}", flush=True)
    return {side: torch.cat(features) for side, features in found.items()}, torch.stack(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Caltech-101")
    parser.add_argument("--learn", type=int, default=400, help="collages to learn from")
    parser.add_argument("--judge", type=int, default=120, help="collages to judge by")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = read_settings()
    collages = settings | {"features": settings["features"] | {"singles": 0.0}}
    parts = halves(list_photos(options.data, test=False), settings["probe"]["held_out"], settings["seed"])
    tower = towers.load_tower(options.parts / "tower")
    counts = (options.learn, options.judge)
    (learn, learn_kinds), (held, held_kinds) = (
        collect(tower, TrainingImages(collages, photos, purpose=4 + i), count)
        for i, (photos, count) in enumerate(zip(parts, counts, strict=True))
    )
    right = {side: probe.accuracy(learn[side], learn_kinds, held[side], held_kinds) for side in SIDES}
    result = {"learned from": counts[0], "judged by": counts[1], "right, %, by pixels": right}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
