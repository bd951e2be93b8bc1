"""Measure where survivors and text should stand: accuracy of pruned models under three kinds of positions.

compact   positions are counted without gaps
original  survivors and text have the positions that they had in the whole prompt
closed    survivors have those positions, and the text continues right after the last survivor

Attention is proportional. Images pass the tower once per corruption; every method, budget and kind of positions prunes
the result. Writes a CSV with per cent right on the even questions (to choose on), the odd ones (to report) and all.
`closed` exists here only.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from clustrs import get_method
from clustrs.embedded import model_and_task
from clustrs.evaluation.config import parse_corruption
from clustrs.evaluation.tasks import get_task
from clustrs.models.ask import chat_prompt, encode, reply
from clustrs.models.attach import Handle
from clustrs.models.load import load_model, quiet_transformers

KINDS = ("compact", "original", "closed")
COLUMNS = ("model", "corruption", "method", "keep", "positions", "even", "odd", "all", "questions")
BATCH = 25


@contextmanager
def gap_closed(closed: bool) -> Iterator[None]:
    """Let text after an image continue right after the last survivor; prompts have one image."""
    before: Any = Handle._first_turn

    def first_turn(self: Handle, arguments: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = before(self, arguments, *args, **kwargs)
        positions, image = arguments["position_ids"], arguments["input_ids"] == self.adapter.placeholder("image")
        after = (image.cumsum(1) == image.sum(1, keepdim=True)) & ~image
        last = positions.masked_fill(~image, -1).amax(1, keepdim=True)
        first = positions.masked_fill(~after, 2**31).amin(1, keepdim=True)
        arguments["position_ids"] = torch.where(after, positions - (first - last - 1), positions)
        return result

    if closed:
        Handle._first_turn = first_turn  # type: ignore[method-assign]
    try:
        yield
    finally:
        Handle._first_turn = before  # type: ignore[method-assign]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each corruption, method, budget and kind of positions."""
    name = model_and_task(options.model, None)[1]
    task = get_task(name, None, options.questions)
    model, processor = load_model(options.model)
    methods = [get_method("none"), *(get_method(m, keep=k) for m in options.methods for k in options.keep)]
    cells = [(m, kind) for m in methods for kind in (KINDS if m.name != "none" else ("original",))]
    rows = []
    with tqdm(total=len(options.corrupt) * len(cells) * len(task.items), unit="answer") as bar:
        for text in options.corrupt:
            corruption = parse_corruption(text)
            scores: dict[Any, list[float]] = {cell: [] for cell in cells}
            for start in range(0, len(task.items), BATCH):
                items = task.items[start : start + BATCH]
                names = list(dict.fromkeys(item.image for item in items))
                images = [task.open(one) for one in names]
                if corruption is not None:
                    images = [corruption.apply(image, one, 0) for image, one in zip(images, names, strict=True)]
                prompts = [(names.index(item.image), chat_prompt(processor, item.question)) for item in items]
                batch = encode(model, processor, images, prompts, options.crops)
                for method, kind in cells:
                    placed = {"positions": "original" if kind == "closed" else kind, "attention": "proportional"}
                    with gap_closed(kind == "closed"):
                        replies = reply(
                            model, processor, batch, method, task.max_new_tokens, crops=options.crops, **placed
                        )
                    for item, one in zip(items, replies, strict=True):
                        score = task.score(item, one.text)
                        assert score is not None, "a task that a judge scores"
                        scores[method, kind].append(score)
                    bar.update(len(items))
            for (method, kind), values in scores.items():
                halves = {"even": values[::2], "odd": values[1::2], "all": values}
                means = {half: f"{100 * sum(part) / len(part):.1f}" for half, part in halves.items()}
                about = {"model": options.model, "corruption": text, "method": method.name, "keep": method.keep}
                rows.append({**about, "positions": kind, **means, "questions": len(values)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="photo-llava", help="an embedded model")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--corrupt", nargs="+", default=["clean", "gaussian:0.1"])
    parser.add_argument("--methods", nargs="+", default=["clustrs", "clustermeans"])
    parser.add_argument("--keep", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--crops", default="all", choices=("all", "base"))
    parser.add_argument("--out", type=Path, help="CSV file (default: printed)")
    options = parser.parse_args()
    quiet_transformers()
    rows = measure(options)
    with options.out.open("w", newline="") if options.out else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
