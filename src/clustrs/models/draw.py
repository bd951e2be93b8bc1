"""Draw which tokens were kept over the image."""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageEnhance

from clustrs import validation

if TYPE_CHECKING:
    from clustrs.models.select import ImageSelection

Box = tuple[int, int, int, int]  # left, top, right and bottom in pixels; right and bottom are outside
Pair = tuple[int, int]

FORMATS = (".png", ".pdf", ".svg")
MOVING = (".gif", ".mp4")  # of videos
OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")  # of clusters
SHADES = (0.0, 0.45, -0.35)  # after seven clusters the colors come again, lighter; after fourteen, darker
BRIGHTNESS, SATURATION = 0.6, 0.5  # brightness and saturation of dropped tokens, as fractions
DEFAULT_SIZE = 640
CELL = 16  # pixels of a token's cell that drawings have room for, unless told otherwise
SMALLEST_CELL = 8  # smaller cells are drawn larger and then reduced: an outline needs room
GAP = 8  # pixels between the drawings of an image in several tiles
STRIP = 8  # frames of a video in a line
LINE = 18  # pixels of a line of text above a frame
DPI = 110


def overlay_kept(
    image: Image.Image, result: "ImageSelection", *, clusters: bool = False, size: int | None = None
) -> Image.Image:
    """Draw what was kept of `image`, as the base crop shows it: dropped tokens dimmed, kept ones lit and outlined.

    An image in several tiles is drawn twice: with the cells of the base crop, and below (a tall one: at the right) with
    those of the tiles. Of a video the first frame is drawn. A dashed outline marks a merged token.

    Args:
        image: The image as the base crop shows it.
        result: Kept tokens, an entry of `handle.last`.
        clusters: Outline each cluster's cells as well, in the color of its kept token's outline.
        size: Longer side of the image in the drawing, in pixels; by default every token has room.
    """
    if size is not None:
        validation.integer("size", size, 1)
    layout, selection = result.layout, result.selection
    merged = [False] * len(selection.indices) if selection.merged is None else selection.merged.tolist()
    kept = dict(zip(selection.indices.tolist(), merged, strict=True))
    labels = selection.labels.tolist() if clusters and selection.labels is not None else [-1] * len(layout.tile)
    base, others = layout.tile == 0, layout.tile > 0
    views = [(result.grids[0], base, layout.y[base], layout.x[base])]
    if others.any() and result.modality == "image":
        height, width = result.grids[1]
        columns = result.columns or _tile_columns(image.size, len(result.grids) - 1)
        tile = layout.tile[others] - 1
        # padding has no tokens, and tokens may be fewer than cells: rows and columns of tokens are counted
        rows, y = (tile // columns * height + layout.y[others]).unique(return_inverse=True)
        lines, x = (tile % columns * width + layout.x[others]).unique(return_inverse=True)
        views.append(((len(rows), len(lines)), others, y, x))
    size = size or max(DEFAULT_SIZE, CELL * max(max(grid) for grid, *_ in views))
    drawings = []
    for grid, members, y, x in views:
        places = zip(y.tolist(), x.tolist(), strict=True)
        cells = dict(zip(places, members.nonzero()[:, 0].tolist(), strict=True))
        if members is base:  # tokens that a chunk of a video dropped are not in the layout
            cells = dict.fromkeys(product(range(grid[0]), range(grid[1])), len(labels)) | cells
        drawings.append(_draw_view(image, grid, cells, kept, [*labels, -1], size))
    if len(drawings) == 1:
        return drawings[0]
    width, height = drawings[0].size
    right, down = (0, height + GAP) if width >= height else (width + GAP, 0)
    whole = Image.new("RGB", (width + right, height + down), "white")
    whole.paste(drawings[0])
    whole.paste(drawings[1], (right, down))
    return whole


def cell_box(size: Pair, grid: Pair, y: int, x: int) -> Box:
    """Return the pixels of one token's cell in a drawing of that width and height; cells meet without gaps."""
    (width, height), (rows, columns) = size, grid
    left, right = (round(i * width / columns) for i in (x, x + 1))
    top, bottom = (round(i * height / rows) for i in (y, y + 1))
    return left, top, right, bottom


def check_path(path: str | os.PathLike[str], video: bool = False) -> None:
    """Check that a drawing can be stored under this name: better known before a model has run."""
    formats = (*FORMATS, *MOVING) if video else FORMATS
    if Path(path).suffix.lower() not in formats:
        raise ValueError(f"drawing must be a file name that ends in {', '.join(formats)}, got {str(path)!r}")


def draw_frames(
    frames: Sequence[Image.Image],
    results: "Sequence[ImageSelection] | Mapping[str, Sequence[ImageSelection]]",
    path: str | os.PathLike[str],
    title: str = "",
) -> None:
    """Draw the kept tokens of the frames of a video: as a strip, or to a .gif or .mp4 file one after the other. With
    `results` of several methods by name, a strip each of at most 8 frames, or side by side."""
    size, moving = _panel_size(frames[0], 240), Path(path).suffix.lower()
    rows = results if isinstance(results, Mapping) else {"": results}
    if moving in (".gif", ".mp4"):
        pictures = []
        for number, frame in enumerate(frames):
            views = {name: overlay_kept(frame, row[number], size=size) for name, row in rows.items()}
            pictures.append(_side_by_side(views) if isinstance(results, Mapping) else views[""])
        if moving == ".mp4":
            _write_mp4(pictures, path)
        else:
            pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=500, loop=0)
        return
    shown = list(range(len(frames)))
    if len(rows) > 1 and len(frames) > STRIP:
        shown = [round(i * (len(frames) - 1) / (STRIP - 1)) for i in range(STRIP)]
    panels = {
        f"{name}\nframe {i + 1}: {row[i].kept}".strip(): overlay_kept(frames[i], row[i], size=size)
        for name, row in rows.items()
        for i in shown
    }
    fig, _ = _panels(panels, min(STRIP, len(shown)), title, "")
    _save(fig, path)


def _side_by_side(views: Mapping[str, Image.Image]) -> Image.Image:
    """Return pictures of one size next to each other, each with its name above it."""
    width, height = next(iter(views.values())).size
    sheet = Image.new("RGB", (len(views) * width, height + LINE), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (name, view) in enumerate(views.items()):
        words = next(cut for n in range(len(name), -1, -1) if pen.textlength(cut := name[:n]) <= width - 8)
        pen.text((i * width + 4, 3), words, fill="black")
        sheet.paste(view, (i * width, LINE))
    return sheet


def _write_mp4(pictures: Sequence[Image.Image], path: str | os.PathLike[str]) -> None:
    """Write two pictures a second; sides of the format are even."""
    try:
        import av
    except ImportError:
        raise ValueError("drawing must not end in .mp4 without PyAV (pip install av)") from None
    width, height = (side // 2 * 2 for side in pictures[0].size)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture.resize((width, height)))))
        container.mux(stream.encode())


def draw_kept(image: Image.Image, result: "ImageSelection", path: str | os.PathLike[str], title: str = "") -> None:
    """Draw the kept tokens, their clusters where the method has some, and the encoder's attention to the base crop.

    Args:
        image: The image as the base crop shows it.
        result: Kept tokens, an entry of `handle.last`.
        path: A .png, .pdf or .svg file to write.
        title: Text above the panels.

    Raises:
        ValueError: For a file name with another ending.

    Examples:
        >>> import tempfile
        >>> model, processor = load_model("mini-llava")
        >>> image = open_image(image_path("sample:scene-1"))
        >>> answer = ask(model, processor, image, "How many objects are there?", ClustRS(keep=16))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_kept(image, answer.image, f"{folder}/kept.png")
    """
    check_path(path)
    size = _panel_size(image, 480)
    panels = {_count(result): overlay_kept(image, result, size=size)}
    if result.selection.labels is not None and result.kept < len(result.layout.tile):
        panels["clusters"] = overlay_kept(image, result, clusters=True, size=size)
    grey = image.convert("L").resize(_scaled(image, size), Image.Resampling.LANCZOS)
    panels["attention before pruning"] = grey
    fig, axes = _panels(panels, len(panels), title, _crops(result), legend=96)
    heat, layout = np.full(result.grids[0], np.nan), result.layout
    base = layout.tile == 0
    y, x, scores = (part[base].detach().cpu().numpy() for part in (layout.y, layout.x, result.scores.float()))
    heat[y, x] = scores
    shown = axes[-1].imshow(
        heat,
        extent=(-0.5, grey.width - 0.5, grey.height - 0.5, -0.5),
        cmap="inferno",
        vmin=0,
        vmax=float(np.nanquantile(heat, 0.99)) or 1.0,  # a few outliers would leave all else black
        alpha=0.6,
        interpolation="nearest",
        aspect="auto",
    )
    place, pixel = axes[-1].get_position(), 1 / (fig.get_figwidth() * DPI)
    bar = fig.add_axes((place.x1 + 8 * pixel, place.y0, 12 * pixel, place.height))
    fig.colorbar(shown, cax=bar, extend="max").set_label("attention", fontsize=9)
    bar.tick_params(labelsize=8)
    _save(fig, path)


def draw_comparison(
    image: Image.Image, selections: dict[str, "ImageSelection"], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw the kept tokens of several methods side by side, one panel each.

    Args:
        image: The image as the base crop shows it.
        selections: Kept tokens by the name of the method.
        path: A .png, .pdf or .svg file to write.
        title: Text above the panels.

    Raises:
        ValueError: Without a selection, or for a file name with another ending.
    """
    if not selections:
        raise ValueError("selections must have at least one method, got none")
    check_path(path)
    panels = {
        f"{name}\n{_count(result)}": overlay_kept(image, result, size=_panel_size(image, 360))
        for name, result in selections.items()
    }
    fig, axes = _panels(panels, 4, title)
    for axis, result in zip(axes, selections.values(), strict=True):
        axis.set_xlabel(_crops(result), fontsize=8, wrap=True)
    _save(fig, path)


def _tile_columns(size: Pair, tiles: int) -> int:
    """Return how many tiles lie side by side where the family does not say: the number that fits the image best."""
    shape = math.log(size[0] / size[1])
    fitting = [columns for columns in range(1, tiles + 1) if tiles % columns == 0]
    return min(fitting, key=lambda columns: abs(math.log(columns**2 / tiles) - shape))


def _draw_view(
    image: Image.Image, grid: Pair, cells: dict[Pair, int], kept: dict[int, bool], labels: list[int], size: int
) -> Image.Image:
    """Draw the `cells` (y, x: token) of one grid over the image; `kept` is True where others were merged in."""
    width, height = _scaled(image, size)
    room = math.ceil(max(1.0, SMALLEST_CELL / min(width / grid[1], height / grid[0])))
    drawing = image.convert("RGB").resize((room * width, room * height), Image.Resampling.LANCZOS)
    if any(kept.get(i, True) for i in cells.values()):  # dropped, or merged
        boxes = {cell: cell_box(drawing.size, grid, *cell) for cell in cells}
        dropped = Image.new("L", drawing.size, 0)
        mask, pen = ImageDraw.Draw(dropped), ImageDraw.Draw(drawing)
        for cell, i in cells.items():
            if i not in kept:
                left, top, right, bottom = boxes[cell]
                mask.rectangle((left, top, right - 1, bottom - 1), fill=255)
        dark = ImageEnhance.Brightness(ImageEnhance.Color(drawing).enhance(SATURATION)).enhance(BRIGHTNESS)
        drawing.paste(dark, mask=dropped)
        line = max(1, round(min(drawing.width / grid[1], drawing.height / grid[0]) / 9))
        for (y, x), i in cells.items():  # a thin line along each cluster's border, inside its own cells
            left, top, right, bottom = boxes[y, x]
            sides = {
                (y - 1, x): (left, top, right - 1, top + line - 1),
                (y + 1, x): (left, bottom - line, right - 1, bottom - 1),
                (y, x - 1): (left, top, left + line - 1, bottom - 1),
                (y, x + 1): (right - line, top, right - 1, bottom - 1),
            }
            for neighbor, side in sides.items():
                if labels[i] >= 0 and (neighbor not in cells or labels[cells[neighbor]] != labels[i]):
                    pen.rectangle(side, fill=cluster_color(labels[i]))
        for cell, i in cells.items():
            if i in kept:
                _outline(pen, boxes[cell], line, cluster_color(labels[i]) if labels[i] >= 0 else "white", kept[i])
    return drawing.reduce(room) if room > 1 else drawing


def _scaled(image: Image.Image, size: int) -> Pair:
    """Return width and height of the image when its longer side has `size` pixels."""
    scale = size / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    return width, height


def _outline(pen: ImageDraw.ImageDraw, box: Box, line: int, edge: str, dashed: bool) -> None:
    """Outline a cell: a thin black frame outside, which shows on white, and inside it one in the given color."""
    left, top, right, bottom = box
    halo = max(1, line // 2)
    pen.rectangle((left - halo, top - halo, right + halo - 1, bottom + halo - 1), outline="black", width=halo)
    pen.rectangle((left, top, right - 1, bottom - 1), outline=edge, width=line)
    for length, across in ((right - left, True), (bottom - top, False)):
        count = 2 * max(1, round(length / (6 * line))) + 1  # dashes of about three times the line's width
        ends = [round(i * length / count) for i in range(count + 1)]
        for start, end in zip(ends[1:-1:2], ends[2::2], strict=False) if dashed else ():
            for near in (top, bottom - line) if across else (left, right - line):
                dash = (left + start, near, left + end - 1, near + line - 1)
                pen.rectangle(dash if across else (near, top + start, near + line - 1, top + end - 1), fill="black")


def cluster_color(cluster: int) -> str:
    """Return the color of a cluster as #rrggbb; a shade goes towards white or (negative) towards black."""
    shade = SHADES[cluster // len(OKABE_ITO) % len(SHADES)]
    parts = ImageColor.getrgb(OKABE_ITO[cluster % len(OKABE_ITO)])
    shaded = (part + shade * (255 - part) if shade >= 0 else part * (1 + shade) for part in parts)
    return "#" + "".join(f"{round(part):02x}" for part in shaded)


def _panel_size(image: Image.Image, width: int) -> int:
    """Return the longer side of a panel of that width; very tall images get a narrower one."""
    return max(width, min(round(1.5 * width), round(width * image.height / image.width)))


def _panels(
    panels: dict[str, Image.Image], columns: int, title: str = "", note: str = "", legend: int = 0
) -> tuple[Any, list[Any]]:
    """A figure with titled images in rows, each shown pixel by pixel, and as many pixels on the right for a legend."""
    from matplotlib.figure import Figure

    gap, heading, footer = 12, 48, 26
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    width, height = (max(side) for side in zip(*(panel.size for panel in panels.values()), strict=True))
    top = 34 if title else 0
    total = max(480, columns * (width + gap) + gap + legend), top + rows * (heading + height + footer)
    fig: Any = Figure(figsize=(total[0] / DPI, total[1] / DPI), dpi=DPI)
    axes = []
    for i, (name, panel) in enumerate(panels.items()):
        row, column = divmod(i, columns)
        left = gap + column * (width + gap) + (width - panel.width) // 2
        bottom = total[1] - top - (row + 1) * heading - row * (height + footer) - panel.height
        axis = fig.add_axes((left / total[0], bottom / total[1], panel.width / total[0], panel.height / total[1]))
        axis.imshow(np.asarray(panel.convert("RGB")), interpolation="none", aspect="auto")
        axis.set(xticks=[], yticks=[])
        axis.set_title(name, fontsize=10, parse_math=False)
        axes.append(axis)
    if title:
        fig.suptitle(title, fontsize=13, y=1 - 8 / total[1], va="top", wrap=True, parse_math=False)
    if note:
        fig.text(gap / total[0], 6 / total[1], note, fontsize=9)
    return fig, axes


def _save(fig: Any, path: str | os.PathLike[str]) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=DPI)
    except OSError as error:
        raise ValueError(f"drawing {str(path)!r} could not be written: {error.strerror}") from error


def _count(result: "ImageSelection") -> str:
    """Describe how many tokens are kept, and what of them the cells cannot show."""
    cls, merged = int((result.selection.indices < 0).sum()), result.selection.merged
    extra = [f"{cls} CLS"] if cls else []
    extra += [f"{int(merged.sum())} merged, dashed"] if merged is not None and merged.any() else []
    return f"{result.kept} of {result.placeholders} tokens" + (f" ({', '.join(extra)})" if extra else "")


def _crops(result: "ImageSelection") -> str:
    """Describe how many tokens were kept in each crop, or frame of a video, where there are several."""
    if len(result.grids) < 2:
        return ""
    kept = result.selection.indices
    crops = result.layout.tile[kept[kept >= 0]].tolist()
    first, *others = (crops.count(crop) for crop in range(len(result.grids)))
    video = result.modality == "video"
    base, rest = ("first frame", "frames not drawn") if video else ("base crop", "others")
    return f"kept in the {base}: {first}; in the {rest}: {', '.join(map(str, others))}"
