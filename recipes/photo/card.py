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

from clustrs.corruptions.images import open_image
from clustrs.embedded import samples
from clustrs_models.photographs import QUESTION_KINDS
from recipes import card
from recipes.card import DOCS, LOGS, plot_run, row
from recipes.photo import measure, probe
from recipes.photo.settings import FOLDER

NAME = "photo-llava"
LOG = "photo-language"
PAGE = DOCS / f"{NAME}.md"
REPEATED = """\
The log of the run that made the shipped weights was lost. The table and the curves are those of a second run with the
settings in `settings.toml`, whose weights are not shipped: it answers
{second:.1f} % of the test questions on clean images, the shipped weights {first:.1f} %."""
SHARES = ("all", *QUESTION_KINDS)
CONDITIONS = ("clean", "grey image", "sigma 0.1", "sigma 0.2", "sigma 0.5", "random, k = 16", "random, k = 50")
"""The measured conditions in the table of the page."""


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


def probe_table(found: dict[str, Any]) -> str:
    layers = found["right, %, by layer"]
    lines = [row(["layer", *layers]), "|:--|" + "--:|" * len(layers)]
    return "\n".join([*lines, row(["quarters named right, %", *layers.values()])])


def training(rows: list[dict[str, Any]], result: dict[str, Any], second: dict[str, Any] | None) -> str:
    """The table and the curves of a run; and, if it is a second run, how it compares."""
    image = f"![What {NAME} had right while it was trained](images/{NAME}-training.png)"
    parts = [card.training_table({LOG: rows}), image]
    if second is not None:
        right = [run["accuracy"]["clean"]["right"] for run in (result, second)]
        parts = [REPEATED.format(first=right[0], second=right[1]), *parts]
    return "\n\n".join(parts)


def blocks(
    result: dict[str, Any], layers: dict[str, Any], rows: list[dict[str, Any]], second: dict[str, Any] | None
) -> dict[str, str]:
    """Everything that the card says in numbers, by the name of its place in the page."""
    return {
        "probe": probe_table(layers),
        "training": training(rows, result, second),
        "accuracy": card.accuracy_table(card.shown({NAME: result}, CONDITIONS), QUESTION_KINDS),
        "seconds": card.seconds_table({NAME: result}),
    }


def stored() -> dict[str, str]:
    """The same from what is stored in the repository."""
    result, layers = (json.loads(path.read_text()) for path in (measure.RESULT, probe.RESULT))
    second = json.loads(measure.REPEATED.read_text()) if measure.REPEATED.exists() else None
    return blocks(result, layers, card.read_log(LOG), second)


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
