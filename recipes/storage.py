"""Store a model's weights in float16, and count what that changes.

    python -m recipes.storage FOLDER TARGET                            a copy of the folder, all tensors in float16
    python -m recipes.storage FOLDER TARGET --float32 vision_tower     those whose names begin so stay as they are
    python -m recipes.storage FOLDER TARGET --task photos              ... and how many answers to its questions differ

The configuration keeps its dtype, so that transformers loads such weights as float32: only their rounding is left.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from clustrs import Pruner
from clustrs.corruptions import Corruption
from clustrs.evaluation.tasks import Task, get_task
from clustrs.models import ask as sharing
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs.pruners import get_method

WEIGHTS = "model.safetensors"
Said = tuple[str, list[int]]
"""An answer, and the indices of the visual tokens that were kept for it."""


def store(source: Path, target: Path, float32: Sequence[str] = ()) -> None:
    """Copy a folder in the format of the model hub; tensors become float16 unless their name has one of the beginnings
    in `float32`, or a value would overflow."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / WEIGHTS)
    kept = tuple(float32)
    save_file(
        {name: tensor if kept and name.startswith(kept) else halved(tensor) for name, tensor in tensors.items()},
        target / WEIGHTS,
        {"format": "pt"},
    )
    (target / WEIGHTS).chmod(0o644)  # safetensors writes files that only their owner can read


def halved(tensor: Tensor) -> Tensor:
    """The tensor in float16, or as it is where that has no such large numbers."""
    half = tensor.half()
    return half if bool(half.isfinite().all()) else tensor


def answers(folder: Path, task: Task, methods: Sequence[Pruner], corruption: Corruption | None) -> list[list[Said]]:
    """For each method: what the model says to each question of a task, and which tokens it was left."""
    model, processor = load_model(str(folder))
    found: list[list[Said]] = [[] for _ in methods]
    groups = [(name, list(group)) for name, group in groupby(task.items, key=lambda item: item.image)]
    for name, items in tqdm(groups, desc=f"{folder} {corruption or 'clean'}", file=sys.stderr):
        image = task.open(name)
        shown = corruption.apply(image, name, 0) if corruption else image
        prompts = [(0, chat_prompt(processor, item.question)) for item in items]
        batch = sharing.encode(model, processor, [shown], prompts)
        for method, said in zip(methods, found, strict=True):
            replies = sharing.reply(model, processor, batch, method, task.max_new_tokens)
            said += [(reply.text, reply.image.selection.indices.tolist()) for reply in replies]
    return found


def compare(task: Task, method: Pruner, before: list[Said], after: list[Said]) -> dict[str, Any]:
    """Count the answers and the selections that differ, and the right answers."""
    both = list(zip(before, after, strict=True))
    return {
        "method": method.to_dict(),
        "questions": len(both),
        "answers that differ": sum(a[0] != b[0] for a, b in both),
        "selections that differ": sum(a[1] != b[1] for a, b in both),
        "right": [
            sum(task.score(item, text) or 0 for item, (text, _) in zip(task.items, one, strict=True))
            for one in (before, after)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--float32", nargs="*", default=[], metavar="PREFIX", help="tensors that keep their type")
    parser.add_argument("--task", help="compare the answers to its questions")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    parser.add_argument("--methods", nargs="+", default=["none", "clustrs"])
    parser.add_argument("--keep", type=int, default=16)
    parser.add_argument("--corrupt", nargs="+", default=["clean"], metavar="NAME:LEVEL")
    options = parser.parse_args()
    store(options.folder, options.target, options.float32)
    sizes = [(folder / WEIGHTS).stat().st_size for folder in (options.folder, options.target)]
    print(json.dumps({"bytes": sizes}))
    if options.task is None:
        return
    torch.set_num_threads(1)
    task = get_task(options.task, limit=options.limit)
    methods = [get_method(name, **({} if name == "none" else {"keep": options.keep})) for name in options.methods]
    for text in options.corrupt:
        corruption = None if text == "clean" else Corruption.parse(text)
        before, after = (answers(folder, task, methods, corruption) for folder in (options.folder, options.target))
        for method, *pair in zip(methods, before, after, strict=True):
            print(json.dumps({"corruption": text, **compare(task, method, *pair)}), flush=True)


if __name__ == "__main__":
    main()
