"""Image files: which formats are read, and how large an image may be."""

from pathlib import Path

import pytest
from PIL import Image

from clustrs.corruptions import images as opening
from clustrs.corruptions.images import FORMATS, check_size, open_image


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, name: str) -> None:
    path = tmp_path / "image"
    Image.new("RGB", (40, 30), (200, 100, 50)).save(path, format=name)
    image = open_image(path)
    assert (image.mode, image.size) == ("RGB", (40, 30))


def test_no_other_program_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript; whatever the file is called, it is not looked at."""
    import subprocess

    def start(*_: object, **__: object) -> None:
        pytest.fail("a program was started")

    monkeypatch.setattr(subprocess, "check_call", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    for name in ("a.eps", "a.png"):
        Image.new("RGB", (4, 3)).save(tmp_path / name, format="EPS")
        with pytest.raises(ValueError, match=r"not an image in any format that is read here \(PNG, JPEG"):
            open_image(tmp_path / name)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((65500, 2), "too long, 65500 x 2: at most 100 times as long as wide is allowed"),
        ((1, 101), "too long, 1 x 101"),
        ((8001, 8001), "too large, 8001 x 8001: at most 64000000 pixels"),
    ],
)
def test_sizes(tmp_path: Path, size: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", size).save(tmp_path / "a.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match=message):
        open_image(tmp_path / "a.png")


def test_sizes_that_are_accepted(tmp_path: Path) -> None:
    check_size("image", (8000, 8000))
    Image.new("1", (100, 1)).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").size == (100, 1)


def test_larger_than_pillow_warns_about(tmp_path: Path) -> None:
    Image.new("1", (12_000, 12_000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"too large, .*64000000 pixels"):
        open_image(tmp_path / "a.png")
    assert opening.MAX_PIXELS == 64_000_000
