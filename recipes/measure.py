"""Measure an embedded model: all numbers of its card.

python -m recipes.measure mini-llava                   writes recipes/results/mini-llava.json, and prints it
python -m recipes.measure mini-llava --only seconds    one part of it anew
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from clustrs import NoPruning, Pruner, Random
from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.embedded import default_task, samples
from clustrs.models import ask as sharing
from clustrs.models.ask import ask, chat_prompt
from clustrs.models.load import load_model
from clustrs_models.scenes import SceneExample, examples
from recipes.train import NAMES

RESULTS = Path(__file__).with_name("results")
SIGMAS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0)
TOP = 16
ON_OBJECT = 0.25
"""A patch lies on an object that covers at least this much of it."""


def answers(model: Any, processor: Any, image: Image.Image, example: SceneExample, method: Pruner) -> list[bool]:
    """Return True for each question about an image that is answered right."""
    prompts = [(0, chat_prompt(processor, question.text)) for question in example.questions]
    batch = sharing.encode(model, processor, [image], prompts)
    replies = sharing.reply(model, processor, batch, method, 3, positions="compact", attention="plain")
    return [reply.text == question.answer for reply, question in zip(replies, example.questions, strict=True)]


def accuracy(
    model: Any, processor: Any, tests: list[SceneExample], name: str, method: Pruner, corrupt: Any
) -> dict[str, Any]:
    """Right answers in per cent, over all and by kind."""
    right: dict[str, list[bool]] = defaultdict(list)
    for example in tqdm(tests, desc=name, file=sys.stderr):
        image = corrupt(example)
        for question, ok in zip(example.questions, answers(model, processor, image, example, method), strict=True):
            right[question.kind].append(ok)
    every = [ok for kind in right.values() for ok in kind]
    return {
        "questions": len(every),
        "right": 100 * sum(every) / len(every),
        "by kind": {kind: 100 * sum(values) / len(values) for kind, values in sorted(right.items())},
    }


def attention(model: Any, processor: Any, tests: list[SceneExample]) -> dict[str, float]:
    """Return the share of the most attended tokens that lie on objects, and that of all tokens."""
    hits, share = [], []
    for example in tqdm(tests, desc="attention", file=sys.stderr):
        image = clean(example)
        inputs = processor(images=[image], text=[chat_prompt(processor, "?")], return_tensors="pt")
        with NoPruning()(model) as handle, torch.inference_mode():
            model(**inputs)
        seen = handle.last[0]
        rows, _ = seen.grids[0]
        base = seen.scores[seen.layout.tile == 0]
        scaled = example.drawing.scene.scaled(8 * rows)
        covered = torch.from_numpy(coverage(scaled)).flatten()
        on_object = covered >= ON_OBJECT
        hits.append(on_object[base.topk(TOP).indices].float().mean().item())
        share.append(on_object.float().mean().item())
    top, chance = 100 * sum(hits) / len(hits), 100 * sum(share) / len(share)
    return {"of the 16 most attended": top, "of all": chance, "ratio": top / chance}


def coverage(scene: Any) -> Any:
    """The part of each patch that objects cover."""
    from clustrs_models.drawing import draw
    from clustrs_models.photographs import generator_for

    return draw(scene, generator_for(0)).coverage.sum(0)


def cold_start(model: str) -> float:
    """Seconds of `clustrs ask` from scratch to an answer."""
    sample = samples(default_task(model))[0]
    command = [sys.executable, "-m", "clustrs.cli", "ask", str(sample.path), sample.questions[0][0], "--model", model]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def load_and_answer(name: str) -> float:
    """Seconds to load the model and answer one question, in a process that has its libraries imported."""
    sample = samples(default_task(name))[0]
    started = time.perf_counter()
    model, processor = load_model(name)
    ask(model, processor, open_image(sample.path), sample.questions[0][0], NoPruning())
    return time.perf_counter() - started


def clean(example: SceneExample) -> Image.Image:
    return Image.fromarray(example.drawing.pixels)


def noisy(sigma: float) -> Any:
    corruption = Corruption("gaussian", sigma)
    return lambda example: corruption.apply(clean(example), str(example.number), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(NAMES.values()))
    parser.add_argument("--images", type=int, default=250, help="number of images of the test set (default: all 250)")
    parser.add_argument("--only", nargs="+", help="measure these parts again, and leave the others as they are")
    options = parser.parse_args()
    model, processor = load_model(options.model)
    tests = list(examples(options.images))

    def gray(example: SceneExample) -> Image.Image:
        return Image.new("RGB", (example.drawing.scene.side,) * 2, (128, 128, 128))

    conditions: dict[str, tuple[Pruner, Any]] = {
        "clean": (NoPruning(), clean),
        "grey image": (NoPruning(), gray),
        **{f"random, k = {k}": (Random(keep=k), clean) for k in (16, 50, 144)},
        **{f"sigma {sigma}": (NoPruning(), noisy(sigma)) for sigma in SIGMAS},
    }
    parts: dict[str, Any] = {
        "seconds": lambda: {"command": cold_start(options.model), "load and answer": load_and_answer(options.model)},
        "attention": lambda: attention(model, processor, tests),
        **{name: lambda n=name: accuracy(model, processor, tests, n, *conditions[n]) for name in conditions},
    }
    unknown = [name for name in options.only or [] if name not in parts]
    if unknown:
        parser.error(f"--only {unknown[0]}: the parts are {', '.join(parts)}")
    path = RESULTS / f"{options.model}.json"
    result = (
        json.loads(path.read_text()) if options.only and path.exists() else {"model": options.model, "accuracy": {}}
    )
    for name in options.only or parts:
        (result["accuracy"] if name in conditions else result)[name] = parts[name]()
    result["accuracy"] = {name: result["accuracy"][name] for name in conditions if name in result["accuracy"]}
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
