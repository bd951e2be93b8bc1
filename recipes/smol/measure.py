"""Measure smol-llava: all numbers of its card.

    clustrs models get smol-llava
    python -m recipes.smol.measure [--questions N] [--only clean seconds ...]

Writes results/measured.json and the table of docs/smol-llava.md. Answers are greedy and scored by the expected word;
test photographs are in no part of the training. Pruned as published: positions without gaps, plain attention.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import trange

from clustrs import Config, NoPruning, Pruner, Random
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path
from clustrs.evaluation.runner import Unit
from clustrs.evaluation.tasks import get_task
from clustrs.models.ask import Picture, ask
from clustrs.models.load import load_model, quiet_transformers
from clustrs_models.smol import NAME
from clustrs_paper.evidence.page import SMOL_PAGE, filled
from clustrs_paper.evidence.results import table
from recipes.photo.measure import by_image, geometry, gray, noisy, unchanged
from recipes.smol.grid import BATCH, TASK, SharedWorker, use_onednn

RESULT = Path(__file__).parent / "results" / "measured.json"
CONDITIONS: dict[str, tuple[str, Pruner, Any]] = {
    "clean": (TASK, NoPruning(), unchanged),
    "gray image": (TASK, NoPruning(), gray),
    "sigma 0.1": (TASK, NoPruning(), noisy(0.1)),
    "random, k = 16": (TASK, Random(keep=16), unchanged),
    "random, k = 64": (TASK, Random(keep=64), unchanged),
    "drawn scenes": ("scenes-sentences", NoPruning(), unchanged),
    "descriptions": ("describe", NoPruning(), unchanged),
}
GUESSING = "no image, most frequent answers"
COUNTS = (196, 64, 16)
"""Tokens kept where seconds and memory are measured."""
REPEATS = 5


def cost(keep: int) -> dict[str, float]:
    """Return seconds of one answer of eight tokens (median of a few), and the process's peak memory in MB."""
    model, processor = load_model(NAME)
    image, question = open_image(image_path("sample:photo-3")), "What is at the top right?"
    method = NoPruning() if keep == max(COUNTS) else Random(keep=keep)
    taken = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        ask(model, processor, image, question, method, 8)
        taken.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": round(median(taken[1:]), 3), "peak MB": round(peak)}


class ChangedWorker(SharedWorker):
    """Worker whose images are changed first."""

    change: Callable[[Picture, str], Picture]

    def show(self, name: str, corruption: str = "clean", seed: int = 0) -> Picture:
        return self.change(super().show(name, corruption, seed), name)


def accuracy(loaded: tuple[Any, Any], task: str, limit: int | None, method: Pruner, change: Any) -> dict[str, Any]:
    """Return the share of right answers to a task's first questions in per cent, over all and by kind of question."""
    how: Any = {"positions": "compact", "attention": "plain"}
    worker = ChangedWorker(Config(task=task, model=NAME, methods=(method.to_dict(),), **how))
    worker.loaded, worker.change = loaded, change
    right: dict[str, list[float]] = defaultdict(list)
    count = len(worker.task.items[:limit])
    for start in trange(0, count, BATCH, desc=task):
        unit = Unit("clean", 0, tuple(range(start, min(start + BATCH, count))), (0,))
        for record in chain.from_iterable(worker.run(unit)):
            if record.error is not None:
                raise RuntimeError(f"{record.item}: {record.error}")
            right[record.kinds[0]].append(record.score or 0.0)
    every = [score for scores in right.values() for score in scores]
    by_kind = {kind: 100 * sum(scores) / len(scores) for kind, scores in sorted(right.items())}
    return {"questions": len(every), "right": 100 * sum(every) / len(every), "by kind": by_kind}


def guessing(limit: int | None) -> dict[str, Any]:
    """Return the same for a guesser who knows the test's most frequent answer to each question of few answers, and to
    each kind of the others."""
    items = get_task(TASK, None, limit).items
    answers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for item in items:
        forms = {
            "which": item.question,
            "count": item.question,
            "place": "rows" if "top" in item.question else "columns",
        }
        answers[item.kinds[0], forms.get(item.kinds[0], "")][item.answer] += 1
    right, asked = Counter[str](), Counter(item.kinds[0] for item in items)
    for (kind, _), counts in answers.items():
        right[kind] += max(counts.values())
    by_kind = {kind: 100 * right[kind] / asked[kind] for kind in sorted(asked)}
    return {"questions": len(items), "right": 100 * right.total() / len(items), "by kind": by_kind}


def accuracy_table(measured: Mapping[str, Any]) -> str:
    """Build the table of docs/smol-llava.md: right answers by condition and kind of question, in per cent."""
    own = (part for part, (task, *_) in CONDITIONS.items() if task == TASK)
    found = {part: measured[part] for part in (*own, GUESSING) if part in measured}
    kinds = list(dict.fromkeys(kind for one in found.values() for kind in one["by kind"]))
    rows = [
        [part, f"{one['questions']:,}", f"{one['right']:.1f}", *(f"{one['by kind'][kind]:.1f}" for kind in kinds)]
        for part, one in found.items()
    ]
    head = ["condition", "questions", "all", *(kind.replace("our", "or") for kind in kinds)]
    return table(head, rows, numbers=len(head) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, help="the first N of each task (default: all)", metavar="N")
    parts = (*CONDITIONS, GUESSING, "geometry", "seconds")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cost", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_transformers()
    if options.cost:
        print(json.dumps(cost(options.cost)))
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    model, processor = load_model(NAME)
    use_onednn(model)  # seconds are those of processes of their own
    for part in options.only:
        if part == "seconds":
            words = [sys.executable, "-m", "recipes.smol.measure", "--threads", str(options.threads), "--cost"]
            found: Any = {"threads": options.threads}
            for keep in COUNTS:
                done = subprocess.run([*words, str(keep)], check=True, capture_output=True, text=True)
                found[str(keep)] = json.loads(done.stdout)
        elif part == "geometry":
            task: Any = get_task(TASK)
            found = geometry(model, processor, task, by_image(task, None))
        elif part == GUESSING:
            found = guessing(options.questions)
        else:
            name, method, change = CONDITIONS[part]
            found = accuracy((model, processor), name, options.questions, method, change)
        result[part] = found
        print(part, json.dumps(found), flush=True)
        RESULT.write_text(json.dumps({key: result[key] for key in parts if key in result}, indent=1) + "\n")
    SMOL_PAGE.write_text(filled(SMOL_PAGE.read_text(encoding="utf-8"), accuracy_table(result), "accuracy"), "utf-8")


if __name__ == "__main__":
    main()
