"""Measure photo-llava with all tokens, and the geometry of its tokens: all numbers of its card.

python -m recipes.photo.measure                        writes recipes/results/photo-llava.json, and prints it
python -m recipes.photo.measure --only geometry        one part of it anew
python -m recipes.photo.measure --model build/photo/photo-llava
                                                       of another run than the shipped one: writes
                                                       recipes/results/photo-llava-repeated.json
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from clustrs import NoPruning, Pruner, Random
from clustrs.corruptions import Corruption
from clustrs.evaluation.tasks import Item
from clustrs.models import ask as sharing
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs_models.photographs import SIDE, Photos, load
from recipes.measure import cold_start, load_and_answer
from recipes.photo.settings import DATA

RESULT = Path(__file__).parents[1] / "results" / "photo-llava.json"
REPEATED = RESULT.with_stem("photo-llava-repeated")
SIGMAS = (0.05, 0.1, 0.2, 0.3, 0.5)
COUNTS = (8, 16, 50, 144)
OTHERS = ("seconds", "geometry")
"""Parts that are not shares of right answers."""
SAMPLED = 40
"""Images whose tokens the geometry is measured on."""


def by_image(task: Photos, limit: int | None) -> dict[str, list[Item]]:
    """The questions of each image, of the first `limit` images."""
    table: dict[str, list[Item]] = defaultdict(list)
    for item in task.items:
        table[item.image].append(item)
    return dict(list(table.items())[:limit])


def accuracy(model: Any, processor: Any, task: Photos, asked: Any, name: str, method: Pruner, change: Any) -> Any:
    """Right answers in per cent, over all and by kind of question; naming in collages is `name` and `neighbor`."""
    right: dict[str, list[float]] = defaultdict(list)
    for image, items in tqdm(asked.items(), desc=name, file=sys.stderr):
        prompts = [(0, chat_prompt(processor, item.question)) for item in items]
        batch = sharing.encode(model, processor, [change(task.open(image), image)], prompts)
        replies = sharing.reply(
            model, processor, batch, method, task.max_new_tokens, positions="compact", attention="plain"
        )
        for item, reply in zip(items, replies, strict=True):
            right[item.kinds[0]].append(task.score(item, reply.text) or 0.0)
    every = [value for values in right.values() for value in values]
    return {
        "questions": len(every),
        "right": 100 * sum(every) / len(every),
        "by kind": {kind: 100 * sum(values) / len(values) for kind, values in sorted(right.items())},
    }


def spread(tokens: Tensor, words: Tensor) -> dict[str, float]:
    """Of projected tokens (images, 576, D): norms, distances between tokens of an image, and the share of the first
    direction in the variance over all images; and the norms of word embeddings (words, D)."""
    everything = tokens.flatten(0, 1)
    variance = torch.linalg.svdvals(everything - everything.mean(0)).square()
    distances = torch.stack([torch.pdist(image).mean() for image in tokens])
    norms, word_norms = everything.norm(dim=-1), words.norm(dim=-1)
    return {
        "mean norm of tokens": norms.mean().item(),
        "largest norm of tokens": norms.max().item(),
        "mean norm of words": word_norms.mean().item(),
        "mean distance between tokens of an image": distances.mean().item(),
        "share of the first direction, %": 100 * (variance[0] / variance.sum()).item(),
    }


def geometry(model: Any, processor: Any, task: Photos, asked: Any) -> dict[str, float]:
    found = []
    for image in list(asked)[:SAMPLED]:
        prompts = [(0, chat_prompt(processor, "What is this?"))]
        found.append(sharing.encode(model, processor, [task.open(image)], prompts).images[0].features)
    return spread(torch.stack(found).float(), model.get_input_embeddings().weight.detach())


def unchanged(image: Image.Image, name: str) -> Image.Image:
    return image


def gray(image: Image.Image, name: str) -> Image.Image:
    return Image.new("RGB", (SIDE, SIDE), (128, 128, 128))


def noisy(sigma: float) -> Any:
    corruption = Corruption("gaussian", sigma)
    return lambda image, name: corruption.apply(image, name, 0)


def conditions() -> dict[str, tuple[Pruner, Any]]:
    return {
        "clean": (NoPruning(), unchanged),
        "grey image": (NoPruning(), gray),
        **{f"sigma {sigma}": (NoPruning(), noisy(sigma)) for sigma in SIGMAS},
        **{f"random, k = {k}": (Random(keep=k), unchanged) for k in COUNTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="photo-llava", help="the shipped one, or the folder of another run (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--images", type=int, help="number of images of the test set (default: all)")
    parser.add_argument("--only", nargs="+", help="measure these parts again, and leave the others as they are")
    options = parser.parse_args()
    target = RESULT if options.model == "photo-llava" else REPEATED
    model, processor = load_model(options.model)
    task, parts = load(options.data), conditions()
    asked = by_image(task, options.images)
    unknown = [name for name in options.only or [] if name not in (*OTHERS, *parts)]
    if unknown:
        parser.error(f"--only {unknown[0]}: the parts are {', '.join((*OTHERS, *parts))}")
    result: dict[str, Any] = json.loads(target.read_text()) if options.only and target.exists() else {"accuracy": {}}
    for name in options.only or (*OTHERS, *parts):
        if name == "seconds":
            result[name] = {"command": cold_start(options.model), "load and answer": load_and_answer(options.model)}
        elif name == "geometry":
            result[name] = geometry(model, processor, task, asked)
        else:
            found = result["accuracy"] | {name: accuracy(model, processor, task, asked, name, *parts[name])}
            result["accuracy"] = {part: found[part] for part in parts if part in found}
        print(name, json.dumps(result.get(name) or result["accuracy"][name]), flush=True)
        target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
