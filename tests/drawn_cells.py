"""Which cells a drawing of kept tokens shows as kept, read from its pixels. Nothing here asks the library where."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clustrs import FasterVLM
from clustrs.models.draw import overlay_kept

GAP = 8
"""Pixels between the image with the base crop's cells and the same with those of the tiles."""
Box = tuple[int, int, int, int]


class Marked(FasterVLM):
    """Keeps one token that is known beforehand."""

    name = "marked"

    def __init__(self, index: int) -> None:
        super().__init__(keep=1)
        self.index = index

    def _choose(self, inputs: Any, k: int) -> Tensor:
        return torch.full((len(inputs.tokens), 1), self.index)


def lit_cells(image: Image.Image, result: Any) -> list[tuple[int, int]]:
    """The y and x of every outlined cell of the base crop, given that the image is not white there when dimmed."""
    return outlined(_panels(image, result)[0], result.grids[0])


def lit_tile_cells(image: Image.Image, result: Any, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """The same in the drawing of the tiles, which together have that many rows and columns of tokens."""
    return outlined(_panels(image, result)[1], grid)


def pixels_of_cell(size: tuple[int, int], grid: tuple[int, int], y: int, x: int) -> Box:
    """Left, top, right and bottom of the pixels whose centres lie in a cell; right and bottom are outside."""
    (width, height), (rows, columns) = size, grid
    across = [i for i in range(width) if x <= (i + 0.5) / width * columns < x + 1]
    down = [i for i in range(height) if y <= (i + 0.5) / height * rows < y + 1]
    return across[0], down[0], across[-1] + 1, down[-1] + 1


def outlined(drawing: Image.Image, grid: tuple[int, int]) -> list[tuple[int, int]]:
    """The cells with a white outline at the top and at the left; a neighbour's frame may cover the other two sides.

    A pixel further in is looked at, because a border half-way between two pixels may go to either.
    """
    white = (np.asarray(drawing) == 255).all(-1)
    found = []
    for y in range(grid[0]):
        for x in range(grid[1]):
            left, top, right, bottom = pixels_of_cell(drawing.size, grid, y, x)
            across, down = (right - left) // 4, (bottom - top) // 4
            sides = white[top + 1, left + across : right - across], white[top + down : bottom - down, left + 1]
            if all(side.all() for side in sides):
                found.append((y, x))
    return found


def _panels(image: Image.Image, result: Any) -> list[Image.Image]:
    """The drawing, cut at its gap: wide images lie below each other, tall ones side by side."""
    drawing = overlay_kept(image, result)
    if len(result.grids) == 1 or result.modality == "video":
        return [drawing]
    width, height = drawing.size
    if image.width >= image.height:
        height = (height - GAP) // 2
        return [drawing.crop((0, top, width, top + height)) for top in (0, height + GAP)]
    width = (width - GAP) // 2
    return [drawing.crop((left, 0, left + width, height)) for left in (0, width + GAP)]
