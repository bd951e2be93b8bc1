"""Draw what photo-llava had right while it was trained, and copy the log into the docs.

python -m recipes.photo.curves        writes docs/images/photo-llava-training.png and docs/training/photo-language.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from recipes.card import DOCS, LOGS, NOT_SHARES, plot_run
from recipes.photo.settings import FOLDER


def columns(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The shares of right answers in a log: on the images that are learnt from, and on unseen photographs."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in NOT_SHARES | {"images"}))
    return [key for key in keys if "unseen" not in key], [key for key in keys if "unseen" in key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    text = (options.folder / "language" / "log.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    (LOGS / "photo-language.jsonl").write_text(text)
    figure, axes = plt.subplots(1, 2, figsize=(13, 4))
    for axis, title, keys in zip(axes, ("training images", "unseen photographs"), columns(rows), strict=True):
        plot_run(axis, f"photo-llava: {title}", rows, keys)
    figure.tight_layout()
    figure.savefig(DOCS / "images" / "photo-llava-training.png", dpi=110)


if __name__ == "__main__":
    main()
