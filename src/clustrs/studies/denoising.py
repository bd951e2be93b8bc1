"""Denoising: does the shrinkage (RRS) bring noisy kept tokens nearer to the same tokens of the clean image?"""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from clustrs.studies.choices import add_images, known_levels, read_corruptions
from clustrs.studies.lists import read_keeps
from clustrs.studies.outcome import COLOURS, Outcome, pyplot

if TYPE_CHECKING:
    from clustrs.images.corruptions import Corruption
    from clustrs.pruners import Pruner
    from clustrs.studies.closeness import Kept
    from clustrs.studies.images import Eyes, StudyImage

TOGETHER = 8
"""How many images go through the tower at a time."""
SERIES = {
    "before": ("before shrinkage", "black", "s", "-"),
    "after": ("after shrinkage (RRS)", COLOURS["clustrs"], "o", "-"),
    "constant": ("best constant alpha", COLOURS["fastervlm"], "^", "--"),
    "bound": ("best alpha of each token (bound)", COLOURS["divprune"], "D", ":"),
}
"""What is drawn: words, colour, marker and line."""
Row = dict[str, Any]


def add_options(command: argparse.ArgumentParser) -> None:
    add_images(command, count=24)
    command.add_argument("--keep", default="16", help="counts or fractions, with commas (default: %(default)s)")
    command.add_argument("--corrupt", metavar="NAME", default="gaussian", help="a corruption (default: %(default)s)")
    command.add_argument("--levels", help="of the corruption, with commas (default: those of the paper)")
    command.add_argument("--seed", type=int, default=0, help="of the corruption (default: 0)")


def study(options: argparse.Namespace) -> list[Outcome]:
    from tqdm import tqdm

    from clustrs import validation
    from clustrs.pruners import get_method
    from clustrs.studies.closeness import summarise
    from clustrs.studies.images import Eyes, study_images

    validation.integer("--count", options.count, 1)
    methods = [get_method("clustrs", keep=keep) for keep in read_keeps(options.keep)]
    corruptions = read_corruptions(options.corrupt, options.levels, known_levels(options.corrupt))
    images = study_images(options.images, options.count)
    eyes = Eyes(options.model)
    conditions = [None, *corruptions]
    with tqdm(total=len(images) * len(conditions), unit="image", dynamic_ncols=True) as bar:
        kept = look(eyes, images, methods, conditions, options.seed, bar.update)
    rows = [
        summarise(method.keep, corruption, kept[number][level])
        for number, method in enumerate(methods)
        for level, corruption in enumerate(conditions)
    ]
    return [Outcome("denoising", draw(rows, options.model), rows, reading(rows))]


def look(
    eyes: "Eyes",
    images: "Sequence[StudyImage]",
    methods: "Sequence[Pruner]",
    conditions: "Sequence[Corruption | None]",
    seed: int,
    done: Callable[[int], Any],
) -> "list[list[list[Kept]]]":
    """For each method and condition (None: clean) what is kept of each image."""
    from clustrs.studies.closeness import compare

    found: list[list[list[Kept]]] = [[[] for _ in conditions] for _ in methods]
    for start in range(0, len(images), TOGETHER):
        some = images[start : start + TOGETHER]
        clean = eyes.see(some)
        for level, corruption in enumerate(conditions):
            noisy = clean if corruption is None else eyes.see([image.spoilt(corruption, seed) for image in some])
            for number, method in enumerate(methods):
                chosen = eyes.choose(method, noisy)
                found[number][level] += [compare(*parts) for parts in zip(clean, noisy, chosen, strict=True)]
            done(len(some))
    return found


def level_name(row: Row) -> str:
    return "clean" if row["level"] is None else f"{row['level']:g}"


def draw(rows: Sequence[Row], model: str) -> Any:
    """A column a budget; above the distances, then how they change, below the alphas."""
    plt = pyplot()
    keeps = list(dict.fromkeys(row["keep"] for row in rows))
    figure, axes = plt.subplots(
        3,
        len(keeps),
        figsize=(max(6.4, 4.4 * len(keeps)), 8.4),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey="row",
        height_ratios=(4, 4, 3),
    )
    for (distance, change, alpha), keep in zip(axes.T, keeps, strict=True):
        mine = [row for row in rows if row["keep"] == keep]
        for name in ("before", "after"):
            draw_series(distance, mine, name, SERIES[name])
        for name in ("after", "constant", "bound"):
            draw_series(change, mine, f"{name}_change", SERIES[name], factor=100)
        change.axhline(0, color="black", linewidth=1)
        for name, of in (("mean_alpha", "after"), ("best_constant_alpha", "constant")):
            draw_series(alpha, mine, name, SERIES[of])
        distance.set_title(f"k = {keep}")
        alpha.set_xticks(range(len(mine)), [level_name(row) for row in mine])
        alpha.set(xlabel=f"{mine[-1]['corruption']} level", ylim=(-0.05, 1.05))
        for axis in (distance, change, alpha):
            axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="distance from the clean token\n/ mean norm of clean tokens", ylim=(0, None))
    axes[1][0].set_ylabel("change of that distance, %\n(below 0: nearer)")
    axes[2][0].set_ylabel("mean alpha\n(1: unchanged)")
    pairs = [pair for axis in axes[:2, 0] for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    shown = {words: line for line, words in pairs}
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(model, fontsize=11, parse_math=False)
    return figure


def draw_series(axis: Any, rows: Sequence[Row], name: str, look: tuple[str, str, str, str], factor: float = 1) -> None:
    """A line through the levels that have a value, with its interval where there is one."""
    words, colour, marker, line = look
    there = [(place, row) for place, row in enumerate(rows) if row[name] is not None]
    places = [place for place, _ in there]
    axis.plot(places, [factor * row[name] for _, row in there], line, color=colour, marker=marker, label=words)
    if there and there[0][1].get(f"{name}_low") is not None:
        bounds = [[factor * row[f"{name}_{end}"] for _, row in there] for end in ("low", "high")]
        axis.fill_between(places, *bounds, color=colour, alpha=0.15, linewidth=0)


def reading(rows: Sequence[Row]) -> str:
    """At which levels the shrinkage helps, and how much more could be had."""
    lines = [
        f"How the distance from the clean tokens changes, mean over {rows[0]['images']} images. Nearer and "
        "farther: the 95 % interval over images leaves no doubt."
    ]
    for keep in dict.fromkeys(row["keep"] for row in rows):
        clean, *noisy = [row for row in rows if row["keep"] == keep]
        verdicts = [verdict(row) for row in noisy]
        parts = []
        for words in dict.fromkeys(verdicts):
            here = [row for row, said in zip(noisy, verdicts, strict=True) if said == words]
            parts.append(f"{words} at " + ", ".join(f"{level_name(row)} ({change(row, 'after')})" for row in here))
        lines.append(f"k = {keep}, {noisy[0]['corruption']}: RRS brings kept tokens {'; '.join(parts)}.")
        lines.append(
            f"  The best constant alpha would give {', '.join(change(row, 'constant') for row in noisy)}; "
            f"the best alpha of each token {', '.join(change(row, 'bound') for row in noisy)}: no shrinkage towards "
            "these centres can do more."
        )
        alphas = ("mean_alpha", "best_constant_alpha")
        used, best = (", ".join(f"{row[name]:.2f}" for row in noisy) for name in alphas)
        lines.append(
            f"  Mean alpha of RRS: {used}; best constant: {best}. On clean images RRS moves tokens by "
            f"{clean['after']:.1%} of their mean norm."
        )
    return "\n".join(lines)


def change(row: Row, name: str) -> str:
    """By how much the distance is smaller or larger than before, in the mean over images."""
    value = row[f"{name}_change"]
    return "no distance before" if value is None else f"{value:+.1%}"


def verdict(row: Row) -> str:
    """Whether the shrinkage helped, as far as the images can tell."""
    value, low, high = (row[f"after_change{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return "away"
    if low is None or high is None:
        return f"{'nearer' if value < 0 else 'farther'}, by one image,"
    return "nearer" if high < 0 else "farther" if low > 0 else "neither nearer nor farther"
