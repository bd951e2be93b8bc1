"""The picture in README.md is what the command above it draws."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]


def picture_and_command() -> tuple[Path, list[str]]:
    """The first picture of the README that is drawn by a command, and that command's words."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"\n    clustrs (compare (?:.|\\\n)*?)\n\n!\[.*?\]\((docs/images/.*?)\)", text)
    assert found, "README.md has no picture below a command"
    return ROOT / found[2], shlex.split(found[1].replace("\\\n", " "))


@pytest.mark.slow
def test_the_command_draws_the_picture(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    picture, words = picture_and_command()
    show = tmp_path / words[words.index("--show") + 1]
    words[words.index("--show") + 1] = str(show)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"drawing: {show}"
    drawn, stored = (np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (show, picture))
    assert drawn.shape == stored.shape
    assert np.abs(drawn - stored).mean() < 0.5, "of 255: fonts may be drawn a little differently, tokens may not"
