"""Bring the card of photo-llava up to date: curves, attention maps and tables in `docs/embedded.md`.

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

from clustrs.corruptions.images import open_image
from clustrs.embedded import samples
from clustrs_models.photographs import QUESTION_KINDS
from recipes import card
from recipes.card import DOCS, LOGS, plot_run
from recipes.photo import measure, probe
from recipes.photo.settings import FOLDER

NAME = "photo-llava"
LOG = "photo-language"
REPEATED = """\
The log of the run that made photo-llava's weights was lost: the row and the curves are those of a second run with the
same settings, whose weights are not shipped. It answers {second:.1f} % of the test questions, the shipped weights
{first:.1f} %."""
SHARES = ("all", *QUESTION_KINDS)


def columns(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The shares of right answers in a log, in the same order for both: on the images that are learnt from, and on
    unseen photographs."""
    known = set().union(*rows)
    learnt = [*SHARES, "quarters"]
    unseen = [f"{key}, unseen" for key in learnt]
    return [key for key in learnt if key in known], [key for key in unseen if key in known]


def curves(rows: list[dict[str, Any]]) -> None:
    """Draw the accuracy of the training over its minutes."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 4))
    for axis, title, keys in zip(axes, ("training images", "unseen photographs"), columns(rows), strict=True):
        plot_run(axis, f"{NAME}: {title}", rows, keys)
    figure.tight_layout()
    figure.savefig(DOCS / "images" / f"{NAME}-training.png", dpi=110)
    plt.close(figure)


def probe_text(found: dict[str, Any]) -> str:
    """The best layer of the tower, beside the first and the last."""
    layers = found["right, %, by layer"]
    best = max(layers, key=layers.get)
    ends = [f"layer {layer} {layers[layer]:.1f} %" for layer in (next(iter(layers)), next(reversed(layers)))]
    return f"Layer {best} names {layers[best]:.1f} % of the quarters right, {' and '.join(ends)}."


def stored() -> dict[str, str]:
    """Build what the page says of this model alone from what is stored in the repository, by the name of its place."""
    result, layers, second = (json.loads(path.read_text()) for path in (measure.RESULT, probe.RESULT, measure.REPEATED))
    first, repeated = (run["accuracy"]["clean"]["right"] for run in (result, second))
    return {"probe": probe_text(layers), "second run": REPEATED.format(first=first, second=repeated)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    log = options.folder / "language" / "log.jsonl"
    if log.exists():
        shutil.copy(log, LOGS / f"{LOG}.jsonl")
        curves(card.read_log(LOG))
    card.attention_maps(NAME, [open_image(sample.path) for sample in samples("photos")])
    card.fill(card.PAGE, card.stored() | stored())


if __name__ == "__main__":
    main()
