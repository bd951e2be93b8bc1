"""Bring the model card up to date: curves, attention maps and tables in `docs/embedded.md`, from what was measured.

python -m recipes.card      after training (the logs in build/train) and `python -m recipes.measure`
"""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from clustrs import NoPruning, palette
from clustrs.embedded import DEFAULT
from clustrs.models.ask import chat_prompt
from clustrs.models.load import load_model
from clustrs_models.scenes import examples
from clustrs_paper.studies.result import level_ticks, places
from recipes.measure import RESULTS
from recipes.train import NAMES

DOCS = Path(__file__).parents[1] / "docs"
LOGS = DOCS / "training"
PAGE = DOCS / "embedded.md"
PARTS = ("encoder", "language")
COLORS = (*palette.SERIES, "#000000", "#999999", "#88ccee", "#cc6677")
"""Colors that color-blind people can tell apart, and that are not those of methods."""
STYLES = ("-", "--", ":", "-.")
NOT_SHARES = {"step", "stage", "side", "seconds", "rate", "loss"}
"""Columns of a log that are not shares of right answers."""


def collect(source: Path = Path("build/train")) -> dict[str, list[dict[str, Any]]]:
    """Copy the logs of the runs into the docs, and read them."""
    LOGS.mkdir(exist_ok=True)
    for log in sorted(source.glob("*/log.jsonl")):
        shutil.copy(log, LOGS / f"{log.parent.name}.jsonl")
    names = [f"{family}-{part}" for family in NAMES for part in PARTS if (LOGS / f"{family}-{part}.jsonl").exists()]
    return {name: read_log(name) for name in names}


def read_log(name: str) -> list[dict[str, Any]]:
    """Read the training log of a run in the docs."""
    return [json.loads(line) for line in (LOGS / f"{name}.jsonl").read_text().splitlines()]


def curves(logs: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the accuracy of each run over its minutes."""
    for family, name in NAMES.items():
        runs = [(part, logs[f"{family}-{part}"]) for part in PARTS if f"{family}-{part}" in logs]
        if not runs:
            continue
        size = (5.6 * len(runs), 4.6)
        figure, axes = plt.subplots(1, len(runs), figsize=size, squeeze=False, layout="constrained")
        for axis, (part, rows) in zip(axes[0], runs, strict=True):
            plot_run(axis, f"{name}: {part}", rows, [key for key in rows[-1] if key not in NOT_SHARES])
        figure.savefig(DOCS / "images" / f"{name}-training.png", dpi=110)
        plt.close(figure)


def plot_run(axis: Any, title: str, rows: list[dict[str, Any]], keys: list[str]) -> None:
    """Draw some columns of a log, with a line where a stage begins."""
    for i, key in enumerate(keys):
        found = [(row["seconds"] / 60, 100 * row[key]) for row in rows if key in row]
        axis.plot(*zip(*found, strict=True), STYLES[i % 4], color=COLORS[i % 9], label=key, linewidth=1.3)
    for start in [row["seconds"] / 60 for a, row in pairwise(rows) if a["stage"] != row["stage"]]:
        axis.axvline(start, color="#bbbbbb", linewidth=0.8)
    axis.set(title=title, xlabel="minutes", ylabel="right, %", ylim=(0, 101))
    axis.legend(fontsize=8, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    axis.grid(alpha=0.25)


def attention_maps(name: str, images: list[Image.Image]) -> None:
    """Some images, and how much the encoder attends to each of their tokens, on one scale for all images."""
    model, processor = load_model(name)
    figure, axes = plt.subplots(2, len(images), figsize=(13, 29.4 / len(images)), layout="constrained")
    maps = []
    for column, image in enumerate(images):
        inputs = processor(images=[image], text=[chat_prompt(processor, "?")], return_tensors="pt")
        with NoPruning()(model) as handle, torch.inference_mode():
            model(**inputs)
        seen = handle.last[0]
        rows, columns = seen.grids[0]
        scores = seen.scores[seen.layout.tile == 0].reshape(rows, columns)
        maps.append(scores.float().numpy())
        axes[0, column].imshow(image)
        axes[0, column].set_title(f"test image {column + 1}", fontsize=10)
    highest = float(np.quantile(np.concatenate([part.ravel() for part in maps]), 0.999))
    for column, part in enumerate(maps):
        shown = axes[1, column].imshow(part, cmap="magma", vmin=0, vmax=highest)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    axes[0, 0].set_ylabel("image", fontsize=11)
    axes[1, 0].set_ylabel(f"attention, {rows} x {columns} tokens", fontsize=11)
    figure.colorbar(shown, ax=axes[1, :], label="attention", shrink=0.9, pad=0.01, extend="max")
    figure.suptitle(f"{name}: how much the vision encoder attends to each token", fontsize=12)
    figure.savefig(DOCS / "images" / f"{name}-attention.png", dpi=90)
    plt.close(figure)


def noise_curve(results: dict[str, dict[str, Any]]) -> None:
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for i, (name, result) in enumerate(results.items()):
        accuracy = result["accuracy"]
        right = {key.removeprefix("sigma "): cell["right"] for key, cell in accuracy.items() if "sigma" in key}
        right = {"clean": accuracy["clean"]["right"], **right}
        at = places([0.0 if level == "clean" else float(level) for level in right])
        axis.plot(at, [*right.values()], "o-", color=COLORS[i], label=name)
        level_ticks(axis, at, [*right])
        axis.axhline(accuracy["grey image"]["right"], color=COLORS[i], linestyle=":", label=f"{name}, grey image")
    axis.set(xlabel="noise, sigma (log scale)", ylabel="right, %", ylim=(0, 100))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(DOCS / "images" / "embedded-noise.png", dpi=110)
    plt.close(figure)


def row(cells: list[Any]) -> str:
    return "| " + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


CONDITIONS = ("clean", "grey image", "sigma 0.1", "sigma 0.2", "sigma 0.5", "random, k = 16", "random, k = 144")
"""The measured conditions in the table of `docs/embedded.md`."""


def accuracy_table(results: dict[str, dict[str, Any]], conditions: Sequence[str] = CONDITIONS) -> str:
    """Build a row of right answers per model; a star marks what was measured with fewer questions than clean images."""
    lines = [row(["", *conditions]), "|:--|" + "--:|" * len(conditions)]
    for name, result in results.items():
        cells = [result["accuracy"][condition] for condition in conditions]
        stars = ["*" if cell["questions"] < cells[0]["questions"] else "" for cell in cells]
        lines.append(row([name, *(f"{cell['right']:.1f}{star}" for cell, star in zip(cells, stars, strict=True))]))
    return "\n".join(lines)


def clips_table() -> str:
    """Build a row for the model for clips, for it without sight, and for a constant answer to each form of question."""
    result = json.loads((RESULTS / "mini-onevision-clips.json").read_text())
    rows = [name for name, part in result.items() if isinstance(part, dict)]
    kinds = list(result[rows[0]]["by kind"])
    lines = [row(["", "all", *kinds]), "|:--|" + "--:|" * (len(kinds) + 1)]
    lines += [row([name, result[name]["right"], *(result[name]["by kind"][kind] for kind in kinds)]) for name in rows]
    return "\n".join(lines)


def attention_text(results: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, result in results.items():
        most, every = (result["attention"][key] for key in ("of the 16 most attended", "of all"))
        parts.append(f"{name} {most:.0f} % (of all tokens {every:.0f} %)")
    return f"Share of the 16 most attended tokens that lie on objects: {', '.join(parts)}."


def seconds_text(results: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name} {found['seconds']['command']:.1f} s ({found['seconds']['load and answer']:.1f} s)"
        for name, found in results.items()
    ]
    return f"`clustrs ask` from scratch (load and answer alone): {', '.join(parts)}."


def training_table(logs: dict[str, list[dict[str, Any]]]) -> str:
    lines = [row(["run", "steps", "minutes", "last loss"]), "|:--|--:|--:|--:|"]
    for name, rows in logs.items():
        lines.append(
            row(
                [
                    f"[{name}](training/{name}.jsonl)",
                    rows[-1]["step"],
                    rows[-1]["seconds"] / 60,
                    f"{rows[-1]['loss']:.3f}",
                ]
            )
        )
    return "\n".join(lines)


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Put each text between its marks in the page."""
    text = page.read_text()
    for name, block in blocks.items():
        begin = f"<!-- {name} -->\n"
        if begin not in text:
            raise SystemExit(f"{page} has no place for {name}: {begin.strip()} ... <!-- end -->")
        before, rest = text.split(begin, 1)
        text = f"{before}{begin}{block}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    page.write_text(text)


def read_results() -> dict[str, dict[str, Any]]:
    """Read what was measured of each embedded model."""
    paths = {name: RESULTS / f"{name}.json" for name in (DEFAULT, *NAMES.values())}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def stored() -> dict[str, str]:
    """Build the tables from what is stored in the repository, by the name of their place in the page."""
    results = read_results()
    names = [*(f"{family}-{part}" for family in NAMES for part in PARTS), "clips-language", "photo-language"]
    return {
        "accuracy": accuracy_table(results),
        "clips": clips_table(),
        "attention": attention_text({name: found for name, found in results.items() if "attention" in found}),
        "seconds": seconds_text(results),
        "training": training_table({name: read_log(name) for name in names if (LOGS / f"{name}.jsonl").exists()}),
    }


def main() -> None:
    logs = collect()
    results = {name: found for name, found in read_results().items() if name in NAMES.values()}
    curves(logs)
    noise_curve(results)
    for name in results:
        attention_maps(name, [Image.fromarray(example.drawing.pixels) for example in examples(6)])
    fill(PAGE, stored())


if __name__ == "__main__":
    main()
