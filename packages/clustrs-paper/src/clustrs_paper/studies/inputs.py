"""Methods and corruptions as the configs of several studies name them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustrs_paper.studies.settings import Keep

if TYPE_CHECKING:
    from clustrs.corruptions import Corruption
    from clustrs.pruners import Pruner


def resolve_methods(specs: Sequence[str], keeps: Sequence[Keep]) -> list[tuple[str, "Pruner"]]:
    """Each method at each budget, with the text that names it ("clustrs", "clustrs tau=2"); "all" is every method.

    The method that keeps everything, and one that sets `keep` itself, come once.
    """
    from clustrs.evaluation.config import expand_methods
    from clustrs.pruners import from_dict

    return [
        (stored["name"] if spec == "all" else spec, from_dict(stored))
        for spec in specs
        for stored in expand_methods([spec], keeps)
    ]


def methods_by_label(specs: Sequence[str], keep: Keep) -> dict[str, "Pruner"]:
    """Methods at one budget by the text that names them."""
    methods: dict[str, Pruner] = {}
    for label, method in resolve_methods(specs, [keep]):
        if label in methods:
            raise ValueError(f"methods={tuple(specs)!r}: give each method once")
        methods[label] = method
    return methods


def resolve_corruptions(
    name: str, levels: Sequence[float] | None, default: Sequence[float] | None = None
) -> list["Corruption"]:
    """A corruption at some levels; without any at `default`, or else at those that it is registered with."""
    from clustrs.corruptions import Corruption, corruption_rule

    registered = corruption_rule(name).levels
    if levels is None:
        levels = registered if default is None else default
    return [Corruption(name, level) for level in levels]


def strongest(name: str) -> tuple[float]:
    """The last of the levels that a corruption is registered with."""
    from clustrs.corruptions import corruption_rule

    return (corruption_rule(name).levels[-1],)


def part_names(study: str, images: Sequence[str], corruptions: Sequence[str]) -> list[list[str]]:
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
