"""Images, methods and corruptions as the command line names them, for several studies."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clustrs.images.corruptions import Corruption
    from clustrs.pruners import Pruner


def add_images(command: argparse.ArgumentParser, count: int) -> None:
    command.add_argument(
        "images", metavar="IMAGE", nargs="*", help="files, folders or sample:NAME (default: drawn scenes)"
    )
    command.add_argument("--count", type=int, default=count, help="how many drawn scenes (default: %(default)s)")


def read_methods(names: str, keep: str) -> list["Pruner"]:
    """Methods named with commas between them, each with the same budget but the one that keeps everything."""
    from clustrs import validation
    from clustrs.pruners import get_method

    given = [name.strip() for name in names.split(",")]
    if len(set(given)) < len(given):
        raise ValueError(f"--methods {names}: give each method once")
    budget = validation.read_keep(keep)
    return [get_method(name) if name == "none" else get_method(name, keep=budget) for name in given]


def read_corruptions(name: str, levels: str | None, usual: Sequence[float]) -> list["Corruption"]:
    """A corruption at the levels named with commas between them, or at the usual ones."""
    from clustrs.images.corruptions import Corruption

    try:
        wanted = list(usual) if levels is None else [float(level) for level in levels.split(",")]
    except ValueError:
        raise ValueError(f"--levels {levels}: give numbers with commas between them, for example 0.1,1,3") from None
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"--levels {levels}: give each level once")
    return [Corruption(name, level) for level in wanted]


def known_levels(name: str) -> tuple[float, ...]:
    """The levels of the paper or of ImageNet-C; 0 for an unknown corruption, which `Corruption` then refuses."""
    from clustrs.images.corruptions import IMAGENET_C_LEVELS, PAPER_LEVELS

    return {**IMAGENET_C_LEVELS, **PAPER_LEVELS}.get(name, (0.0,))


def level_text(corruption: "Corruption") -> str:
    """The level without needless decimals."""
    return str(corruption).partition(":")[2]


def outcome_names(study: str, images: Sequence[str], corruptions: Sequence[str]) -> list[list[str]]:
    """A file name for each image under each corruption: what there is only one of, and clean, is not mentioned."""
    stems = [name.rpartition(".")[0] or name for name in images]
    marked = [f"{stem}-{stems[:i].count(stem) + 1}" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems)]
    suffixes = ["" if text == "clean" else "-" + text.replace("/", "-").replace(":", "-") for text in corruptions]
    return [
        [
            study + (f"-{stem}" if len(images) > 1 else "") + (suffix if len(corruptions) > 1 else "")
            for suffix in suffixes
        ]
        for stem in marked
    ]
