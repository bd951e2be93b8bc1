"""Compute the frozen tower's features of the training images, once; training may begin when some are there.

    python -m recipes.smol.features PARTS FEATURES --count 2000      images 0 to 1999 of the photographs to train on
    python -m recipes.smol.features PARTS FEATURES --part held --count 160

PARTS has the converted parts (`clustrs_models.smol_build`). Each shard of 40 images is one file,
FEATURES/train/00012.safetensors (float16 [40, 196, 768]) and 00012.json (the questions); the same command resumes.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from recipes.smol import tower as towers
from recipes.smol.images import Images

SHARD = 40
DATA = Path("../shared/data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=("train", "held", "test"), default="train")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that has caltech101/ and pets/")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16: twice as fast on some machines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tower = towers.load_tower(options.parts / "tower")
    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    tower.to(dtype)
    data = options.data
    images = Images(data / "caltech101", data / "pets", options.part, towers.SIDE, clean=options.part != "train")
    folder = options.folder / options.part
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, options.count, SHARD):
        path = folder / f"{first // SHARD:05}.safetensors"
        if path.exists():
            continue
        started = time.monotonic()
        shown = [images[number] for number in range(first, first + SHARD)]
        found = [
            towers.features(tower, towers.to_pixels([s.pixels for s in shown[i : i + 4]]).to(dtype))
            for i in range(0, SHARD, 4)
        ]
        path.with_suffix(".json").write_text(json.dumps([s.text for s in shown]))
        partial = path.with_suffix(".partial")
        save_file({"features": torch.cat(found).half()}, partial)
        os.replace(partial, path)
        print(f"{first + SHARD}/{options.count} {(time.monotonic() - started) / SHARD:.2f} s an image", flush=True)


if __name__ == "__main__":
    main()
