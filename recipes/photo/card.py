"""Bring the card of photo-llava up to date: curves, attention maps and tables in `docs/photo-llava.md`.

python -m recipes.photo.card      after `python -m recipes.photo.measure`; takes a log of the training from build/photo
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from clustrs.embedded import samples
from clustrs.images.open import open_image
from clustrs.images.photos.questions import QUESTION_KINDS
from recipes import card
from recipes.card import DOCS, LOGS, NOT_SHARES, plot_run, row
from recipes.photo import measure, probe
from recipes.photo.settings import FOLDER

NAME = "photo-llava"
LOG = "photo-language"
PAGE = DOCS / f"{NAME}.md"
NO_LOG = """\
The log of the run that made these weights was lost with the machine it ran on, so there are no curves to show, and its
minutes are not known. `recipes/photo/settings.toml` is as that run left it; a new run writes a log."""
REPEATED = """\
The log of the run that made these weights was lost with the machine it ran on. What follows is from a second run, with
the same settings and with features computed anew. Its weights are not shipped: everything else in these pages was
measured with those of the first run. How near they come to each other on the test set, right answers in per cent:"""


def columns(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The shares of right answers in a log: on the images that are learnt from, and on unseen photographs."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in NOT_SHARES | {"images"}))
    return [key for key in keys if "unseen" not in key], [key for key in keys if "unseen" in key]


def curves(rows: list[dict[str, Any]]) -> None:
    """What the training had right, over its minutes."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 4))
    for axis, title, keys in zip(axes, ("training images", "unseen photographs"), columns(rows), strict=True):
        plot_run(axis, f"{NAME}: {title}", rows, keys)
    figure.tight_layout()
    figure.savefig(DOCS / "images" / f"{NAME}-training.png", dpi=110)
    plt.close(figure)


def geometry_table(found: dict[str, float]) -> str:
    lines = [row(["projected tokens", ""]), "|:--|--:|"]
    return "\n".join(lines + [f"| {name} | {value:.2f} |" for name, value in found.items()])


def probe_table(found: dict[str, Any]) -> str:
    layers = found["right, %, by layer"]
    lines = [row(["layer", *layers]), "|:--|" + "--:|" * len(layers)]
    return "\n".join([*lines, row(["quarters named right, %", *layers.values()])])


def repeated_table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The right answers of two runs, in the conditions that both were measured in."""
    lines = [row(["", "questions", "shipped weights", "second run"]), "|:--|--:|--:|--:|"]
    for name, cell in second["accuracy"].items():
        if name in first["accuracy"]:
            lines.append(row([name, cell["questions"], first["accuracy"][name]["right"], cell["right"]]))
    return "\n".join(lines)


def training(
    rows: list[dict[str, Any]] | None, result: dict[str, Any] | None = None, second: dict[str, Any] | None = None
) -> str:
    """The table and the curves of a run, or that there are none; and, if it is a second run, how it compares."""
    if rows is None:
        return NO_LOG
    image = f"![What {NAME} had right while it was trained](images/{NAME}-training.png)"
    parts = [card.training_table({LOG: rows}), image]
    if result is not None and second is not None:
        parts = [REPEATED, repeated_table(result, second), *parts]
    return "\n\n".join(parts)


def blocks(
    result: dict[str, Any],
    layers: dict[str, Any],
    rows: list[dict[str, Any]] | None,
    second: dict[str, Any] | None = None,
) -> dict[str, str]:
    """Everything that the card says in numbers, by the name of its place in the page."""
    return {
        "probe": probe_table(layers),
        "training": training(rows, result, second),
        "accuracy": card.accuracy_table({NAME: result}, QUESTION_KINDS),
        "geometry": geometry_table(result["geometry"]),
        "seconds": card.seconds_table({NAME: result}),
    }


def stored() -> dict[str, str]:
    """The same from what is stored in the repository."""
    result, layers = (json.loads(path.read_text()) for path in (measure.RESULT, probe.RESULT))
    rows = card.read_log(LOG) if (LOGS / f"{LOG}.jsonl").exists() else None
    return blocks(result, layers, rows, json.loads(measure.REPEATED.read_text()) if measure.REPEATED.exists() else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    log = options.folder / "language" / "log.jsonl"
    if log.exists():
        shutil.copy(log, LOGS / f"{LOG}.jsonl")
        curves(card.read_log(LOG))
    card.attention_maps(NAME, [open_image(sample.path) for sample in samples("photos")])
    card.fill(PAGE, stored())


if __name__ == "__main__":
    main()
