"""Tuning: how well the measures of `clustrs tune`, which need no labels, rank candidates by their accuracy.

A measure is picked on one half of the images and reported on the other. The cost of choosing by it is the accuracy
that is lost on the held-out half, against the best candidate there and against choosing by labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clustrs import palette
from clustrs_paper.studies.result import StudyPart, StudyResult, pyplot
from clustrs_paper.studies.settings import Keep, StudyConfig

if TYPE_CHECKING:
    from clustrs.evaluation.tasks import Item, Task
    from clustrs.models.configuration import PruningConfig

Values = NDArray[np.float64]
Row = dict[str, Any]
METHODS: tuple[str, ...] = ("clustermeans", "clustrs", "divprune", "downsample", "fastervlm", "hiprune", "holov", "mmr")
METHODS += ("prumerge-plus", "tome", "visionzip", "vscan")  # without three slow ones: cdpruner, scope, vispruner
SETTINGS = (("auto", "auto"), ("compact", "plain"))  # positions and attention
PER_IMAGE = 2  # questions about an image
DRAWS = 2000
MEASURES = {"agreement": 1, "exact": 1, "tokens": 1, "logprob": 1, "kl": -1}  # -1 where less is better
ACCURACY, ANY, USUAL = "accuracy", "any candidate", "clustermeans"
CHOICES = {ACCURACY: "labels", ANY: "chance", USUAL: "nothing: clustermeans"}  # words of the page


@dataclass(frozen=True, kw_only=True)
class TuningConfig(StudyConfig):
    """Candidates, and the number of questions. A study that was stopped resumes from its `folder`."""

    folder: Path
    task: str = None  # type: ignore[assignment]
    data: str | None = None
    limit: int = 200
    methods: tuple[str, ...] = METHODS
    keep: tuple[Keep, ...] = (64, 16, 4)


@dataclass(frozen=True)
class Measurements:
    """Sums [candidates, images] over the questions of an image, of each measure and of "accuracy"; `sizes` [images] is
    how many questions these are."""

    configs: "Sequence[PruningConfig]"
    sums: Mapping[str, Values]
    sizes: Values

    def means(self, name: str, weights: Values) -> Values:
        """Return the means [..., candidates] over questions, with images counted as in `weights` [..., images]."""
        means: Values = weights @ self.sums[name].T / (weights @ self.sizes)[..., None]
        return means * MEASURES.get(name, 1)


def run(config: TuningConfig) -> StudyResult:
    """Measure every candidate on every question, and compare the measures."""
    from clustrs.evaluation.tasks import get_task

    task = get_task(config.task, config.data)
    if task.judged:
        raise ValueError(f"task must be one that scores answers itself, got {config.task!r}, which needs a judge")
    chosen = plan(task, config.limit)
    if len(chosen) < 4:
        raise ValueError(f"the questions must be about four images or more, got {len(chosen)} (raise the limit)")
    found = measure(config, task, chosen)
    about = f"{config.model} on {config.task}: {len(found.configs)} candidates, {int(found.sizes.sum())} questions"
    rows = compare(found, config.model)
    measures = StudyPart("tuning", draw_measures(rows, about), rows, findings(rows, about))
    scatter = draw_candidates(found, about)
    return StudyResult((measures, StudyPart("candidates", scatter, candidate_rows(found), "All candidates:")))


def plan(task: "Task", limit: int) -> "list[tuple[str, list[Item]]]":
    """Return images in random order, each with a few questions, until there are enough; a larger limit only adds."""
    by_image: dict[str, list[Item]] = {}
    for item in task.items:
        by_image.setdefault(item.image, []).append(item)
    random, chosen = np.random.default_rng(0), list[tuple[str, list[Any]]]()
    for i in random.permutation(len(by_image)):
        image, items = list(by_image.items())[i]
        picked = sorted(random.permutation(len(items))[:PER_IMAGE].tolist())
        if sum(len(own) for _, own in chosen) < limit:
            chosen.append((image, [items[n] for n in picked]))
    return chosen


def measure(config: TuningConfig, task: "Task", chosen: "Sequence[tuple[str, list[Item]]]") -> Measurements:
    """Measure candidates as `clustrs tune` does, without halving."""
    from tqdm import tqdm

    from clustrs.evaluation.config import expand_methods
    from clustrs.evaluation.tuning import Tuner, key
    from clustrs.models.configuration import PruningConfig
    from clustrs.models.load import apply_image_padding, load_model
    from clustrs.pruners import from_dict

    configs = [
        PruningConfig(method=from_dict(described), positions=positions, attention=attention)  # type: ignore[arg-type]
        for described in expand_methods(config.methods, config.keep)
        for positions, attention in SETTINGS
    ]
    model, processor = load_model(config.model, config.load_options())
    processor = apply_image_padding(processor, config.image_padding)
    tuner = Tuner(model, processor, task.max_new_tokens, config.prompt_template)
    config.folder.mkdir(parents=True, exist_ok=True)
    tuner.open(config.folder / "tune.jsonl")
    sizes: list[int] = []
    sums: dict[str, list[list[float]]] = {name: [] for name in (*MEASURES, ACCURACY)}
    for image, items in tqdm(chosen, desc="images", disable=not config.progress, dynamic_ncols=True):
        own = {item.question: item for item in items}
        tuner.see(task.open(image), list(own), configs)
        digest, sums_here = tuner.seen[-1][0], {name: list[float]() for name in sums}
        for candidate in configs:
            records = [tuner.known[key(candidate), digest, question] for question in own]
            failed = next((one.error for one in records if one.error), None)
            if failed:
                raise ValueError(f"{candidate.method!r} failed on image {image!r}: {failed}")
            for name in MEASURES:
                sums_here[name].append(sum(one.values[name] for one in records))
            sums_here[ACCURACY].append(sum(float(task.score(own[one.question], one.answer) or 0) for one in records))
        for name, values in sums_here.items():
            sums[name].append(values)
        sizes.append(len(own))
    return Measurements(configs, {name: np.array(own).T for name, own in sums.items()}, np.array(sizes, dtype=float))


def ranks(values: Values) -> Values:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values.round(9), return_inverse=True, return_counts=True)
    shared: Values = (counts.cumsum() - (counts - 1) / 2)[inverse]
    return shared


def spearman(first: Values, second: Values) -> float:
    """Return the rank correlation; NaN if all values of one side are equal."""
    left, right = ranks(first), ranks(second)
    if left.std() == 0 or right.std() == 0:
        return float("nan")
    return float(np.corrcoef(left, right)[0, 1])


def halves(images: int) -> tuple[Values, Values]:
    """Return weights of the images that pick (every other one) and of those that report."""
    picking = (np.arange(images) % 2 == 0).astype(float)
    return picking, 1 - picking


def choose(found: Measurements, name: str, weights: Values) -> dict[Keep, int]:
    """Return the best candidate of each budget by a measure; as in `tune`, log-probability decides between equals."""
    best, tie = found.means(name, weights).round(9), found.means("logprob", weights)
    chosen: dict[Keep, int] = {}
    for i in np.lexsort((tie, best)):  # ascending: the last of a budget stays
        chosen[found.configs[i].method.keep] = int(i)
    return chosen


def compare(found: Measurements, model: str) -> list[Row]:
    """Compare the measures: rank correlations with accuracy on both halves, and what choosing by them loses."""
    picking, reporting = halves(len(found.sizes))
    held_out = np.flatnonzero(reporting)
    drawn = np.random.default_rng(0).multinomial(len(held_out), reporting / reporting.sum(), size=DRAWS).astype(float)
    right, drawn_right = found.means(ACCURACY, reporting), found.means(ACCURACY, drawn)
    budgets: dict[Keep, list[int]] = {}
    for i, config in enumerate(found.configs):
        budgets.setdefault(config.method.keep, []).append(i)
    by_labels = choose(found, ACCURACY, picking)
    usual = {c.method.keep: i for i, c in reversed([*enumerate(found.configs)]) if c.method.name == USUAL}
    choices = {name: choose(found, name, picking) for name in MEASURES} | {ACCURACY: by_labels}
    rows = []
    for name in (*MEASURES, ACCURACY, ANY, *([USUAL] if usual else [])):
        row: Row = {"model": model, "candidates": len(found.configs), "images": len(held_out), "measure": name}
        row["questions"] = int(found.sizes[held_out].sum())
        if name in MEASURES:
            own = found.means(name, reporting)
            resampled = [spearman(*pair) for pair in zip(found.means(name, drawn), drawn_right, strict=True)]
            defined = [value for value in resampled if not np.isnan(value)] or [np.nan]
            low, high = np.percentile(defined, (2.5, 97.5))
            first = found.means(name, picking)
            within = [spearman(own[members], right[members]) for members in budgets.values()]
            row |= {"rho_picking": spearman(first, found.means(ACCURACY, picking)), "rho": spearman(own, right)}
            row |= {"rho_low": low, "rho_high": high, "rho_across": spearman(first, right)}
            row["rho_within_budget"] = float(np.nanmean(within)) if not np.isnan(within).all() else float("nan")
        else:
            row |= dict.fromkeys(("rho_picking", "rho", "rho_low", "rho_high", "rho_across", "rho_within_budget"), "")
        if name == ANY:
            gained = np.mean([drawn_right[:, members].mean(1) for members in budgets.values()], 0)
            accuracy = float(np.mean([right[members].mean() for members in budgets.values()]))
        else:
            taken = list((usual if name == USUAL else choices[name]).values())
            gained, accuracy = drawn_right[:, taken].mean(1), float(right[taken].mean())
        labels = list(by_labels.values())
        lost = drawn_right[:, labels].mean(1) - gained
        best = float(np.mean([right[members].max() for members in budgets.values()]))
        row |= {"accuracy": accuracy, "below_best": best - accuracy}
        row["below_labels"] = float(right[labels].mean()) - accuracy
        row |= dict(zip(("below_labels_low", "below_labels_high"), np.percentile(lost, (2.5, 97.5)), strict=True))
        rows.append({key: round(float(v), 4) if isinstance(v, float) else v for key, v in row.items()})
    return rows


def candidate_rows(found: Measurements) -> list[Row]:
    """Return every candidate with its means on both halves."""
    rows = []
    for half, weights in zip(("picking", "reporting"), halves(len(found.sizes)), strict=True):
        means = {name: found.means(name, weights) * MEASURES.get(name, 1) for name in found.sums}
        for i, config in enumerate(found.configs):
            row: Row = {"half": half, "method": config.method.name, "keep": config.method.keep}
            row |= {"positions": config.positions, "attention": config.attention}
            rows.append({**row, **{name: round(float(own[i]), 5) for name, own in means.items()}})
    return rows


def draw_measures(rows: Sequence[Row], about: str) -> Any:
    """Rank correlations with their intervals, and accuracy of the choices, on the half that reports."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    plt.close(figure)
    for axis, shown, value in ((left, MEASURES, "rho"), (right, [row["measure"] for row in rows], "accuracy")):
        own = [row for row in rows if row["measure"] in shown]
        axis.plot([row[value] for row in own], range(len(own)), "o", color=palette.color("clustrs"))
        axis.set_yticks(range(len(own)), [row["measure"] for row in own])
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
    for i, row in enumerate(row for row in rows if row["measure"] in MEASURES):
        left.plot([row["rho_low"], row["rho_high"]], [i, i], color=palette.color("clustrs"), alpha=0.7)
    left.set_xlabel("rank correlation with accuracy, 95 % interval")
    right.set_xlabel("accuracy of the choice, mean over budgets")
    figure.suptitle(about, fontsize=10, parse_math=False)
    return figure


def draw_candidates(found: Measurements, about: str) -> Any:
    """One panel per measure: accuracy against it on the half that reports, a color per budget."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(3.2 * len(MEASURES), 3.4), layout="constrained", sharey=True)
    plt.close(figure)
    reporting = halves(len(found.sizes))[1]
    right, keeps = 100 * found.means(ACCURACY, reporting), [config.method.keep for config in found.configs]
    for axis, (name, sign) in zip(axes, MEASURES.items(), strict=True):
        values = sign * found.means(name, reporting)
        for keep in dict.fromkeys(keeps):
            members = [i for i, own in enumerate(keeps) if own == keep]
            axis.plot(values[members], right[members], "o", markersize=4, alpha=0.7, label=f"k = {keep}")
        axis.set(xlabel=name, title=f"rho = {spearman(sign * values, right):.2f}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy (%)")
    axes[0].legend(frameon=False)
    figure.suptitle(f"{about}; held-out half of the images", fontsize=10, parse_math=False)
    return figure


def findings(rows: Sequence[Row], about: str) -> str:
    """Report the pick, the rank correlations, and what choosing by each measure loses, on the held-out half."""
    measured = [row for row in rows if row["measure"] in MEASURES]
    best = max(measured, key=lambda row: row["rho_picking"])
    lines = [f"{about}. Picked on one half of the images: {best['measure']}. On the other half:"]
    for row in rows:
        text = f"accuracy {100 * row['accuracy']:.1f} %, {100 * row['below_best']:.1f} points below the best"
        if row in measured:
            text = f"rank correlation {row['rho']:.2f} ({row['rho_low']:.2f} to {row['rho_high']:.2f}); {text}"
        lines.append(f"  {row['measure']}: {text}.")
    return "\n".join(lines)


def block(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table and the sentence of docs/tune.md, from the stored rows of all models."""
    from clustrs.tables import NOTHING, Table, Value
    from clustrs.tables import Row as TableRow

    models = list(dict.fromkeys(row["model"] for row in rows))
    by_measure: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        by_measure.setdefault(row["measure"], {})[row["model"]] = row

    def mean(name: str, column: str) -> float:
        return float(np.mean([float(by_measure[name][model][column]) for model in models]))

    best = max(MEASURES, key=lambda name: mean(name, "rho_picking"))
    lines = []
    for name, own in by_measure.items():
        measured = name in MEASURES
        cells = [
            Value(f"{float(row['rho']):.2f} ({float(row['rho_low']):.2f} to {float(row['rho_high']):.2f})")
            if measured
            else NOTHING
            for row in own.values()
        ]
        cells.append(Value(f"{mean(name, 'rho_picking'):.3f}", strong=name == best) if measured else NOTHING)
        lines.append(TableRow((CHOICES.get(name, name),), (*cells, Value(f"{100 * mean(name, 'below_best'):.1f}"))))
    columns = (*models, "picking half", "points below the best")
    counts = ", ".join(f"{by_measure[best][model]['questions']} ({model})" for model in models)
    return (
        f"{Table('', ('chosen by',), columns, tuple(lines)).markdown()}\n\n"
        f"{by_measure[best][models[0]]['candidates']} candidates; questions held out: {counts}. "
        f"Picked on the other half: {best}.\n"
    )
