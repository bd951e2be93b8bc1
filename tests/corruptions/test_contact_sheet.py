"""The contact sheet has every corruption at every level, labelled, and shows what `apply` gives."""

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from clustrs.corruptions import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption
from clustrs.corruptions import contact_sheet as sheet
from clustrs.corruptions.contact_sheet import CELL, GAP, LINE, NAMES, contact_sheet
from clustrs_models import imagenet_c


def make_image(width: int = 60, height: int = 40) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([y % 256, x % 256, x * y % 256], axis=2).astype(np.uint8))


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written on sheets."""
    written: list[str] = []
    write = ImageDraw.ImageDraw.text

    def text(self: ImageDraw.ImageDraw, xy: tuple[float, float], text: str, *given: object, **named: object) -> None:
        written.append(text)
        write(self, xy, text, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return written


def cell_at(page: Image.Image, column: int, top: int, height: int) -> NDArray[np.uint8]:
    left = GAP + NAMES + column * (CELL + GAP)
    return np.asarray(page.crop((left, top, left + CELL, top + height)))


@pytest.mark.usefixtures("frost")
def test_every_cell(words: list[str]) -> None:
    image = make_image(CELL, 100)  # shown as it is
    page = contact_sheet(image, "a", 2)
    row = 100 + LINE + GAP
    assert (cell_at(page, 0, GAP, 100) == np.asarray(image)).all()
    top = GAP + row
    for section in (PAPER_LEVELS, IMAGENET_C_LEVELS):
        top += 2 * LINE
        for name, levels in section.items():
            for column, level in enumerate(levels):
                expected = np.asarray(Corruption(name, level).apply(image, "a", 2))
                assert (cell_at(page, column, top, 100) == expected).all(), f"{name}:{level}"
            for column in range(len(levels), 5):
                assert (cell_at(page, column, top, 100) == 255).all(), f"{name} has too many cells"
            top += row
    assert page.height == top + GAP
    labels = [name.rpartition("/")[2] for name in (*PAPER_LEVELS, *IMAGENET_C_LEVELS)]
    assert [word for word in words if word in labels] == labels
    levels_written = " ".join(word for word in words if word[:1].isdigit())
    assert levels_written.startswith("0.1 0.5 1 2 3 0.01 0.1 0.2 0.3 0.5 0.5 1.5 2 ")
    assert words.count("5") == 15
    assert "a\nseed 2\n208 x 100 pixels" in words


def test_without_photographs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_c, "find_spec", lambda name: None)
    contact_sheet(make_image())
    assert "imagenet_c/frost needs photographs of frost: pip install --no-deps imagecorruptions" in words
    assert words.count("5") == 14
    assert "seed 0\n60 x 40 pixels" in words


@pytest.mark.usefixtures("frost")
@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3)])
def test_odd_images(size: tuple[int, int]) -> None:
    page = contact_sheet(make_image(*size))
    assert page.mode == "RGB"
    assert page.width == GAP + NAMES + 5 * (CELL + GAP)


def test_large_images_are_scaled_down(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet, "LARGEST", 50)
    contact_sheet(make_image(100, 80))
    assert "seed 0\n100 x 80 pixels\nscaled down to 50 x 40 for this sheet" in words


def test_bad_image() -> None:
    with pytest.raises(ValueError, match="image must be in RGB, got mode 'L'"):
        contact_sheet(Image.new("L", (9, 9)))
