"""The scores: a table and curves for each corruption, means over levels, kinds of questions."""

from collections.abc import Callable, Sequence

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report.blocks import Block, Figure, Section, Table, Text, Value
from clustrs.evaluation.report.figures import curves
from clustrs.evaluation.report.grids import Group, grid
from clustrs.evaluation.report.paper_reference import about_reference, reference_tables
from clustrs.evaluation.report.summary import Summary
from clustrs.images.corruptions import PAPER_LEVELS

NAMES = {"salt_pepper": "salt and pepper", "motion_blur": "motion blur", "jpeg": "JPEG", "gaussian": "Gaussian noise"}


def words(corruption: str) -> str:
    return NAMES.get(corruption, corruption)


def scores(summary: Summary) -> Section:
    """A table for each corruption, with the paper's numbers where it has the same cell."""
    tables = [*_tables(summary), *_means(summary), *reference_tables(summary)]
    blocks: list[Block] = [Text(_legend(summary))]
    if summary.reference and any(value.paper for table in tables for row in table.rows for value in row.values):
        blocks.append(Text(about_reference(summary.run.config, summary.reference)))
    return Section("Scores", (*blocks, *tables))


def figures(summary: Summary) -> Section | None:
    """Curves of the score against the level, where a corruption was measured."""
    drawn: list[Block] = []
    for name in summary.run.families:
        if name != "clean":
            svg = curves(summary, name, f"figure{len(drawn) + 1}")
            if svg is None:
                return Section("Curves", (Text("Curves need matplotlib: pip install 'clustrs[plot]'."),))
            drawn.append(Figure(f"Score ({summary.unit}) under {words(name)}; bands are 95 % intervals.", svg))
    return Section("Curves", tuple(drawn)) if drawn else None


def kinds(summary: Summary) -> Section | None:
    """Means for each kind of question, on clean images and over all corruptions."""
    run = summary.run
    if not any(run.kinds):
        return None
    tables = []
    if summary.clean is not None:
        tables.append(_kind_table(summary, "Clean images", [summary.clean]))
    if summary.corrupted:
        tables.append(_kind_table(summary, "Corrupted images, mean over all corruptions", summary.corrupted))
    note = Text("A question counts under each of its kinds; n is how many questions a kind has in the record.")
    return Section("Kinds of questions", (note, *tables))


def _kind_table(summary: Summary, title: str, conditions: Sequence[int]) -> Table:
    run = summary.run
    found = metrics.kind_estimates(summary.together(conditions), run.kinds)
    groups: list[Group] = []
    for kind, estimates in found.items():
        n = sum(kind in own for own in run.kinds)
        groups.append((f"{kind} (n {n})", _picker(summary, estimates, n)))
    return grid(run, title, "kind", groups)


def _picker(summary: Summary, estimates: Sequence[Estimate], whole: int) -> Callable[[int], Value]:
    return lambda method: summary.value(estimates[method], whole=whole)


def _legend(summary: Summary) -> str:
    seeds = len(summary.run.seeds)
    return (
        f"Mean score ({summary.unit}){f', averaged over {seeds} seeds' if seeds > 1 else ''}, with the 95 % interval "
        "of a bootstrap over questions. Failed answers are left out, never counted as 0; n is given where a mean is "
        "not over all questions. The best method of each row is bold; the unpruned model does not take part in that."
    )


def _tables(summary: Summary) -> list[Table]:
    run = summary.run
    tables = []
    for name, conditions in run.families.items():
        groups = [(run.conditions[i].level_text or "clean", _cell(summary, i)) for i in conditions]
        title = "Clean images" if name == "clean" else words(name)
        tables.append(grid(run, title[0].upper() + title[1:], "level", groups))
    return tables


def _cell(summary: Summary, place: int) -> Callable[[int], Value]:
    condition = summary.run.conditions[place]

    def value(method: int) -> Value:
        paper = summary.paper_score(method, condition.name, condition.level)
        return summary.value(summary.estimates[method][place], paper)

    return value


def _means(summary: Summary) -> list[Table]:
    """Means over the levels of each corruption, over brightness and contrast as in the paper, and over everything."""
    run = summary.run
    families = {name: places for name, places in run.families.items() if name != "clean"}
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        (words(name), name if _all_levels(summary, name) else "", places)
        for name, places in families.items()
        if len(places) > 1
    ]
    if _all_levels(summary, "brightness") and _all_levels(summary, "contrast"):
        both = families["brightness"] + families["contrast"]
        wanted.append(("brightness and contrast", "brightness_contrast", both))
    if len(families) > 1:
        wanted.append(("all corruptions", "", tuple(summary.corrupted)))
    if not wanted:
        return []
    found = metrics.estimates(np.stack([summary.together(places) for *_, places in wanted]))
    groups = [
        (title, _mean_cell(summary, known, found[i * len(run.methods) : (i + 1) * len(run.methods)]))
        for i, (title, known, _) in enumerate(wanted)
    ]
    return [grid(run, "Means over levels", "corruption", groups)]


def _mean_cell(summary: Summary, corruption: str, estimates: Sequence[Estimate]) -> Callable[[int], Value]:
    return lambda method: summary.value(estimates[method], summary.paper_score(method, corruption, None))


def _all_levels(summary: Summary, name: str) -> bool:
    """Whether the run has the paper's levels of a corruption and no others."""
    levels = {summary.run.conditions[i].level for i in summary.run.families.get(name, ())}
    return name in PAPER_LEVELS and levels == set(PAPER_LEVELS[name])
