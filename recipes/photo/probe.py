"""Find the layer for the projector to read: a linear classifier of each quarter of a collage, on every layer's tokens.

    python -m recipes.photo.probe        prints and writes recipes/results/photo-probe.json

It sees photographs of the training half only; those it is judged by are not among those it learns from.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clustrs_models.photographs import KINDS, list_photos
from recipes.photo import tower as towers
from recipes.photo.images import TrainingImages, halves, kind_indices, pixel_values
from recipes.photo.language import by_quarter
from recipes.photo.settings import DATA, FOLDER, read_settings

RESULT = Path(__file__).parents[1] / "results" / "photo-probe.json"
STEPS, RATE, DECAY = 400, 3e-3, 0.02


def pooled(tokens: Tensor) -> Tensor:
    """(B, 576, D) to (B, 4, 2 D): mean and maximum of each quarter's tokens."""
    quarters = by_quarter(tokens)
    return torch.cat([quarters.mean(2), quarters.amax(2)], -1)


def collect(tower: nn.Module, images: TrainingImages, count: int) -> tuple[Tensor, Tensor]:
    """Pooled tokens (layers, images, 4, 2 D), and kinds (images, 4)."""
    tokens, kinds = [], []
    for first in range(0, count, 4):
        batch = [images[n] for n in range(first, min(first + 4, count))]
        states = towers.hidden_states(tower, pixel_values([image.pixels for image in batch]))
        tokens.append(torch.stack([pooled(state[:, 1:]) for state in states]))
        kinds += [kind_indices(image.kinds) for image in batch]
        print(f"{first + len(batch)}/{count}", flush=True)
    return torch.cat(tokens, 1), torch.stack(kinds)


def accuracy(learn: Tensor, learn_kinds: Tensor, held: Tensor, held_kinds: Tensor) -> float:
    """Per cent right of a linear classifier on the held-out quarters."""
    learn, held = learn.flatten(0, 1), held.flatten(0, 1)
    mean, std = learn.mean(0), learn.std(0) + 1e-6
    torch.manual_seed(0)
    layer = nn.Linear(learn.shape[1], len(KINDS))
    optimiser = torch.optim.AdamW(layer.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(STEPS):
        value = F.cross_entropy(layer((learn - mean) / std), learn_kinds.flatten(), label_smoothing=0.1)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    right = layer((held - mean) / std).argmax(-1) == held_kinds.flatten()
    return round(100 * right.float().mean().item(), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    settings: dict[str, Any] = read_settings()
    collages = settings | {"features": settings["features"] | {"singles": 0.0}}
    own = settings["probe"]
    parts = halves(list_photos(options.data, test=False), own["held_out"], settings["seed"])
    tower = towers.load(options.folder)
    counts = (round(own["images"] * (1 - own["held_out"])), round(own["images"] * own["held_out"]))
    (learn, learn_kinds), (held, held_kinds) = (
        collect(tower, TrainingImages(collages, photos, purpose=4 + i), count)
        for i, (photos, count) in enumerate(zip(parts, counts, strict=True))
    )
    right = {i + 1: accuracy(learn[i], learn_kinds, held[i], held_kinds) for i in range(len(learn))}
    result = {"learnt from": counts[0], "judged by": counts[1], "right, %, by layer": right}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
