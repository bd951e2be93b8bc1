"""Settings of the recipe, and the folders of its photographs and products."""

import tomllib
from pathlib import Path
from typing import Any

SETTINGS = Path(__file__).with_name("settings.toml")
FOLDER = Path("build/photo")
"""For the converted tower, features, checkpoints and logs."""
DATA = Path("../shared/data/caltech101")


def read_settings() -> dict[str, Any]:
    return tomllib.loads(SETTINGS.read_text())
