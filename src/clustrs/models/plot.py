"""Draw which tokens were kept over the image."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from clustrs.models.attach import ImageSelection

FORMATS = (".png", ".pdf", ".svg")
OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Colors for clusters, which color-blind people can tell apart."""
SHADES = (0.0, 0.45, -0.35)
"""After seven clusters the colors come again, lighter; after fourteen, darker; after 21 they repeat."""


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that a drawing can be stored under this name: better known before a model has run."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"drawing {str(path)!r}: give a file name that ends in {', '.join(FORMATS)}")


def draw_kept(image: Image.Image, result: "ImageSelection", path: str | os.PathLike[str], title: str = "") -> None:
    """Draw the kept tokens of the base crop, colored by cluster, and next to them the attention that the encoder pays.

    `image` is what the base crop shows.
    """
    check_path(path)
    plt = _pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, _height(5, image) + 0.8), layout="constrained")
    _draw_tokens(left, image, result)
    left.set_title(_count(result), fontsize=11)
    _draw_attention(fig, right, image, result)
    right.set_title("attention before pruning", fontsize=11)
    if title:
        fig.suptitle(title, fontsize=13, wrap=True, parse_math=False)
    note = _other_crops(result)
    if note:
        fig.supxlabel(note, fontsize=9, wrap=True)
    _save(fig, path)


def draw_comparison(
    image: Image.Image, selections: dict[str, "ImageSelection"], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draw one panel for each of `selections`, under its name: what is kept of the base crop, which shows `image`."""
    if not selections:
        raise ValueError("selections is empty: give that of at least one method")
    check_path(path)
    plt = _pyplot()
    columns = min(4, len(selections))
    rows = -(-len(selections) // columns)
    size = (max(4.5, 3.6 * columns), (_height(3.4, image) + 0.7) * rows + 0.4)
    fig, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(selections) :]:
        axis.set_axis_off()
    for axis, (name, result) in zip(axes.flat, selections.items(), strict=False):
        _draw_tokens(axis, image, result)
        axis.set_title(f"{name}\n{_count(result)}", fontsize=10, parse_math=False)
        axis.set_xlabel(_other_crops(result), fontsize=8, wrap=True)
    if title:
        fig.suptitle(title, fontsize=13, wrap=True, parse_math=False)
    _save(fig, path)


def _height(width: float, image: Image.Image) -> float:
    """The height of a panel of that width; very long images get less than they would need."""
    return width * min(1.5, max(0.4, image.height / image.width))


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _save(fig: Any, path: str | os.PathLike[str]) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, dpi=110)
    except OSError as error:
        raise ValueError(f"drawing {str(path)!r} could not be written: {error.strerror}") from error
    finally:
        _pyplot().close(fig)


def _count(result: "ImageSelection") -> str:
    """How many tokens are kept, and what of them the cells cannot show."""
    indices = result.selection.indices
    cls = int((indices < 0).sum())
    merged = result.selection.merged
    extra = [f"{cls} CLS"] if cls else []
    extra += [f"{int(merged.sum())} merged"] if merged is not None else []
    return f"{result.kept} of {result.placeholders} tokens" + (f" ({', '.join(extra)})" if extra else "")


def _other_crops(result: "ImageSelection") -> str:
    """How many tokens were kept in the crops that are not drawn."""
    if len(result.grids) < 2:
        return ""
    kept = result.selection.indices
    crops = result.layout.tile[kept[kept >= 0]].tolist()
    counts = ", ".join(str(crops.count(crop)) for crop in range(1, len(result.grids)))
    return f"kept in the base crop: {crops.count(0)}; in the crops not drawn: {counts}"


def _cluster_colors(count: int) -> NDArray[np.float64]:
    """The RGB color of each cluster; a shade goes towards white or (negative) towards black."""
    from matplotlib.colors import to_rgb

    colors = np.array([to_rgb(OKABE_ITO[i % len(OKABE_ITO)]) for i in range(count)]).reshape(count, 3)
    shades = np.array([SHADES[i // len(OKABE_ITO) % len(SHADES)] for i in range(count)])[:, None]
    return np.where(shades >= 0, colors + shades * (1 - colors), colors * (1 + shades))


def _draw_tokens(axis: Any, image: Image.Image, result: "ImageSelection") -> None:
    """Draw the image, a faint tint for each token's cluster, and outlines of the kept cells (dashed: merged)."""
    from matplotlib.patches import Rectangle

    rows, columns = result.grids[0]
    selection = result.selection
    labels = selection.labels
    n = len(result.layout.tile)
    clustered = labels is not None and result.kept < n
    _show(axis, image, faded=clustered)
    height, width = image.height / rows, image.width / columns
    base = (result.layout.tile == 0).tolist()
    row, column = result.layout.y.tolist(), result.layout.x.tolist()
    colors = _cluster_colors(len(selection.indices))
    if clustered and labels is not None:
        tint = np.zeros((rows, columns, 4))
        for i, label in enumerate(labels.tolist()):
            if base[i] and label >= 0:
                tint[row[i], column[i]] = (*colors[label], 0.5)
        axis.imshow(tint, extent=(0, image.width, image.height, 0), interpolation="nearest", aspect="auto")
    if len(set(selection.indices.tolist()) - {-1}) < n:
        merged = selection.merged.tolist() if selection.merged is not None else [False] * len(selection.indices)
        for position, i in enumerate(selection.indices.tolist()):
            if i < 0 or not base[i]:
                continue
            corner = (column[i] * width, row[i] * height)
            if clustered:
                axis.add_patch(Rectangle(corner, width, height, facecolor=(*colors[position], 0.85), edgecolor="none"))
            for edge, line in (("white", 3.2), ("black", 1.4)):
                dashes = "--" if merged[position] and edge == "black" else "-"
                outline: Any = {"edgecolor": edge, "linewidth": line, "linestyle": dashes, "fill": False}
                axis.add_patch(Rectangle(corner, width, height, clip_on=False, zorder=4, **outline))
    _frame(axis, image)


def _draw_attention(fig: Any, axis: Any, image: Image.Image, result: "ImageSelection") -> None:
    """Draw the attention of the base crop's tokens as a heat map over the grey image."""
    rows, columns = result.grids[0]
    base = (result.layout.tile == 0).cpu().numpy()
    heat = np.full((rows, columns), np.nan)
    at = result.layout.y.cpu().numpy()[base], result.layout.x.cpu().numpy()[base]
    heat[at] = result.scores.detach().float().cpu().numpy()[base]
    _show(axis, image.convert("L").convert("RGB"), faded=False)
    shown = axis.imshow(
        heat,
        extent=(0, image.width, image.height, 0),
        cmap="inferno",
        vmin=0,
        vmax=float(np.nanquantile(heat, 0.99)) or 1.0,  # a few outliers would leave all else black
        alpha=0.6,
        interpolation="nearest",
        aspect="auto",
    )
    fig.colorbar(shown, ax=axis, shrink=0.8, extend="max", label="attention")
    _frame(axis, image)


def _show(axis: Any, image: Image.Image, faded: bool) -> None:
    """Show the image; faded to light grey where colors have a meaning."""
    pixels = np.asarray(image)
    if faded:
        pixels = np.asarray(image.convert("L").convert("RGB")) // 2 + 120
    axis.imshow(pixels, extent=(0, image.width, image.height, 0))


def _frame(axis: Any, image: Image.Image) -> None:
    axis.set(xlim=(0, image.width), ylim=(image.height, 0), xticks=[], yticks=[])
    axis.set_aspect("equal")
