"""Drawings of kept tokens: what is dimmed, lit and outlined, alike for every method."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_cells import Marked, lit_cells, lit_tile_cells
from PIL import Image, ImageDraw
from tiny_models import Load, prepare

from clustrs import NoPruning
from clustrs.models import draw
from clustrs.models.ask import as_seen, ask
from clustrs.models.select import ImageSelection
from clustrs.pruners.inputs import Layout, Selection

GREY = Image.new("RGB", (90, 60), (120, 120, 120))


def selection(indices: list[int], grid: tuple[int, int] = (4, 6), tiles: int = 1, **parts: Any) -> ImageSelection:
    """A selection of tokens in `tiles` equal grids."""
    rows, columns = grid
    place = torch.arange(tiles * rows * columns)
    inside = place % (rows * columns)
    layout = Layout(place // (rows * columns), inside // columns, inside % columns)
    chosen = Selection(torch.zeros(len(indices), 2), torch.tensor(indices), **parts)
    return ImageSelection(chosen, torch.ones(len(place)), layout, [grid] * tiles, len(place), len(indices))


def centre(drawing: Image.Image, grid: tuple[int, int], y: int, x: int) -> Any:
    left, top, right, bottom = draw.cell_box(drawing.size, grid, y, x)
    return drawing.getpixel(((left + right) // 2, (top + bottom) // 2))


def test_kept_tokens_are_lit_and_the_others_dimmed() -> None:
    result = selection([1, 9])
    drawing = draw.overlay_kept(GREY, result)
    assert lit_cells(GREY, result) == [(0, 1), (1, 3)]
    assert centre(drawing, (4, 6), 1, 3) == (120, 120, 120)
    assert centre(drawing, (4, 6), 2, 2) == (72, 72, 72)


def test_methods_with_and_without_clusters_look_alike() -> None:
    """Clusters are drawn on request only: a drawing shows what was kept, by whatever method."""
    labels = torch.arange(24) % 2
    plain, clustered = selection([1, 9]), selection([1, 9], labels=labels)
    assert draw.overlay_kept(GREY, plain) == draw.overlay_kept(GREY, clustered)
    assert draw.overlay_kept(GREY, plain) == draw.overlay_kept(GREY, plain, clusters=True)
    assert draw.overlay_kept(GREY, clustered) != draw.overlay_kept(GREY, clustered, clusters=True)


def test_clusters_are_outlined_in_colors_of_their_own() -> None:
    """Left half and right half: a line along each border, none inside, and the kept token in its cluster's color."""
    labels = (torch.arange(24) % 6 >= 3).long()
    drawing = draw.overlay_kept(GREY, selection([7, 10], labels=labels), clusters=True)
    colors = [Image.new("RGB", (1, 1), draw.OKABE_ITO[i]).getpixel((0, 0)) for i in (0, 1)]
    left, top, right, bottom = draw.cell_box(drawing.size, (4, 6), 2, 2)
    middle = (top + bottom) // 2
    assert drawing.getpixel((right - 1, middle)) == colors[0]
    assert drawing.getpixel((right, middle)) == colors[1]
    assert drawing.getpixel((left, middle)) == (72, 72, 72)
    assert drawing.getpixel(draw.cell_box(drawing.size, (4, 6), 1, 1)[:2]) == colors[0]
    assert drawing.getpixel(draw.cell_box(drawing.size, (4, 6), 1, 4)[:2]) == colors[1]


def testcluster_colors_differ() -> None:
    colors = [draw.cluster_color(i) for i in range(21)]
    assert len(set(colors)) == 21
    assert all(len(color) == 7 and int(color[1:], 16) >= 0 for color in colors)


def test_merged_tokens_are_dashed() -> None:
    """The white outline of a merged token is interrupted on every side; CLS has no cell."""
    drawing = draw.overlay_kept(GREY, selection([-1, 1, 9], merged=torch.tensor([False, False, True])))
    pixels = np.asarray(drawing)
    left, top, right, bottom = draw.cell_box(drawing.size, (4, 6), 1, 3)
    for edge in (pixels[top, left:right], pixels[bottom - 1, left:right], pixels[top:bottom, left]):
        assert {tuple(pixel) for pixel in edge.tolist()} == {(255, 255, 255), (0, 0, 0)}
    left, top, right, _ = draw.cell_box(drawing.size, (4, 6), 0, 1)
    assert (pixels[top, left:right] == 255).all()


def test_an_image_of_which_nothing_was_dropped_is_shown_as_it_is() -> None:
    drawing = draw.overlay_kept(GREY, selection(list(range(24))))
    assert drawing.getcolors() == [(drawing.width * drawing.height, (120, 120, 120))]


def test_tiles_are_drawn_below_the_base_crop() -> None:
    """Two tiles of 4 x 6 tokens lie side by side in a wide image."""
    result = selection([0, 24 + 9, 48 + 10], tiles=3)
    assert lit_cells(GREY, result) == [(0, 0)]
    assert lit_tile_cells(GREY, result, (4, 12)) == [(1, 3), (1, 10)]
    assert draw.overlay_kept(GREY, result).size == (640, 2 * 427 + 8)
    assert lit_cells(GREY, selection([30], tiles=2)) == []


def test_tiles_are_drawn_beside_the_base_crop_of_a_tall_image() -> None:
    tall = GREY.rotate(90, expand=True)
    result = selection([0, 24 + 9, 48 + 10], tiles=3)
    assert lit_cells(tall, result) == [(0, 0)]
    assert lit_tile_cells(tall, result, (8, 6)) == [(1, 3), (5, 4)]
    assert draw.overlay_kept(tall, result).size == (2 * 427 + 8, 640)


def test_the_family_says_how_tiles_lie() -> None:
    result = replace(selection([24 + 9, 48 + 10], tiles=3), columns=1)
    assert lit_tile_cells(GREY, result, (8, 6)) == [(1, 3), (5, 4)]


@pytest.mark.parametrize(
    ("size", "tiles", "columns"), [((90, 60), 6, 3), ((60, 90), 6, 2), ((400, 90), 4, 4), ((90, 80), 1, 1)]
)
def test_tiles_lie_as_the_image_is_shaped(size: tuple[int, int], tiles: int, columns: int) -> None:
    assert draw._tile_columns(size, tiles) == columns


def test_rows_without_tokens_are_not_drawn() -> None:
    """Padding above and below has none, and its rows take no room in the drawing."""
    result = selection([], tiles=3)
    stay = ((result.layout.tile == 0) | ((result.layout.y > 0) & (result.layout.y < 3))).nonzero()[:, 0]
    layout = Layout(*(part[stay] for part in (result.layout.tile, result.layout.y, result.layout.x)))
    chosen = Selection(torch.zeros(1, 2), torch.tensor([24 + 12 + 6 + 4]))  # the second row of the second tile
    unpadded = ImageSelection(chosen, torch.ones(len(stay)), layout, result.grids, 72, 1)
    assert lit_tile_cells(GREY, unpadded, (2, 12)) == [(1, 10)]


def test_of_a_video_the_first_frame_is_drawn(tmp_path: Path) -> None:
    """Tokens of other frames lie in the same cells of other grids, and must not light up here."""
    result = replace(selection([0, 24 + 9, 48 + 10], tiles=3), modality="video")
    assert lit_cells(GREY, result) == [(0, 0)]
    assert draw.overlay_kept(GREY, result) == draw.overlay_kept(GREY, selection([0]))
    assert draw._crops(result) == "kept in the first frame: 1; in the frames not drawn: 1, 1"


def test_panels_of_tiles(tmp_path: Path) -> None:
    """Both drawings, and a caption that counts what was kept."""
    result = selection([0, 24 + 9, 48 + 10], tiles=3, labels=torch.arange(72) % 3)
    assert draw._crops(result) == "kept in the base crop: 1; in the others: 1, 1"
    draw.draw_kept(GREY, result, tmp_path / "kept.png")
    draw.draw_comparison(GREY, {"a": result}, tmp_path / "compared.png")
    expected = np.asarray(draw.overlay_kept(GREY, result, size=360))
    stored = np.asarray(Image.open(tmp_path / "compared.png").convert("RGB"))
    windows = np.lib.stride_tricks.sliding_window_view(stored[:, 12:372], expected.shape)
    matches = (windows[:, 0, 0, 1:-1, 1:-1] == expected[1:-1, 1:-1]).mean(axis=(1, 2, 3))
    assert matches.max() > 0.99


@pytest.mark.parametrize("place", [(1, 2), (4, 6)])
@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_a_bright_square_is_drawn_in_its_crop(load: Load, family: str, place: tuple[int, int]) -> None:
    """An image in 2 x 2 crops with padding above and below, whose tokens have 6 rows and 8 columns."""
    model, processor = load(family)
    for name, parameter in model.model.vision_tower.named_parameters():
        if "out_proj" in name:  # a patch sees itself alone
            parameter.data.zero_()
    y, x = place
    features = []
    for color in ("black", "white"):
        image = Image.new("RGB", (240, 160), "black")
        ImageDraw.Draw(image).rectangle((30 * x, 27 * y, 30 * x + 29, 27 * y + 26), fill=color)
        with torch.no_grad(), NoPruning()(model) as handle:
            model(**prepare(processor, ["<s><image> what?"], [[image]]))
        features.append(handle.last[0].selection.tokens)
    changed = (features[1] - features[0]).norm(dim=-1).masked_fill(handle.last[0].layout.tile == 0, 0)
    answer = ask(model, processor, image, "what?", Marked(int(changed.argmax())), 1)
    assert (len(answer.image.grids), answer.image.columns) == (5, 2)
    assert lit_tile_cells(as_seen(processor, image), answer.image, (6, 8)) == [place]


@pytest.mark.parametrize("size", [24, 48, 97, 1000])
def test_the_longer_side_is_as_asked(size: int) -> None:
    """Outlines stay visible when cells are hardly larger than a pixel."""
    drawing = draw.overlay_kept(GREY, selection([300], grid=(24, 24)), size=size)
    assert drawing.size == (size, round(size * 60 / 90))
    pixels = np.asarray(drawing.convert("L")).astype(int)
    assert pixels.max() > 120, "white of the outline"
    assert (pixels == 72).mean() > 0.9, "all else is dimmed"


def test_the_default_size_has_room_for_every_token() -> None:
    assert draw.overlay_kept(GREY, selection([3])).size == (640, 427)
    assert draw.overlay_kept(GREY, selection([3], grid=(50, 100))).size == (1600, 1067)
    tall = draw.overlay_kept(Image.new("RGB", (2, 900)), selection([3], grid=(100, 1)))
    assert tall.size == (4, 1600)


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "640"])
def test_bad_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match="size must be an integer of at least 1, got"):
        draw.overlay_kept(GREY, selection([3]), size=size)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_images_of_any_mode(mode: str) -> None:
    assert draw.overlay_kept(GREY.convert(mode), selection([3])).mode == "RGB"


def test_drawings_need_no_matplotlib() -> None:
    code = "import sys; from clustrs.models import draw; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_panels_show_the_drawing_pixel_by_pixel(tmp_path: Path) -> None:
    """Nothing is resampled on its way into the file: a line of one pixel stays one."""
    result = selection([300, 301], grid=(24, 24), labels=torch.arange(576) % 2)
    expected = np.asarray(draw.overlay_kept(GREY, result, size=360))
    draw.draw_comparison(GREY, {"a": result, "b": result}, tmp_path / "both.png", "What?")
    stored = np.asarray(Image.open(tmp_path / "both.png").convert("RGB"))
    windows = np.lib.stride_tricks.sliding_window_view(stored[:, 12:372], expected.shape)
    matches = (windows[:, 0, 0, 1:-1, 1:-1] == expected[1:-1, 1:-1]).mean(axis=(1, 2, 3))
    assert matches.max() > 0.99
