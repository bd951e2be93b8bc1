"""Which cells a drawing of kept tokens shows as kept, read from its pixels."""

from typing import Any

import numpy as np
from PIL import Image

from clustrs.models.plot import cell_box, overlay_kept


def lit_cells(image: Image.Image, result: Any) -> list[tuple[int, int]]:
    """The y and x of every cell with a white outline, given that the image is not white there when dimmed."""
    drawing = overlay_kept(image, result)
    pixels = np.asarray(drawing)
    rows, columns = result.grids[0]
    found = []
    for y in range(rows):
        for x in range(columns):
            left, top, right, bottom = cell_box(drawing.size, (rows, columns), y, x)
            frame = [pixels[top, left:right], pixels[bottom - 1, left:right], pixels[top:bottom, left]]
            if all((edge == 255).all() for edge in frame):
                found.append((y, x))
    return found
