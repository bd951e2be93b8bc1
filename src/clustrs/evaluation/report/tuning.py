"""What `tune` found: its candidates, the recommendation in one sentence, table, figures and files."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Literal

from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report import document, replace_files
from clustrs.evaluation.report.summary import UNPRUNED
from clustrs.models.configuration import FILE, PruningConfig
from clustrs.pruners.registry import display_label
from clustrs.tables import NOTHING, Row, Table, Value

Measure = Literal["agreement", "exact", "tokens"]
WORDS: dict[str, str] = {"agreement": "agreement", "exact": "identical answers", "tokens": "of the answers' tokens"}
COLUMNS = {  # of the table: name of a mean, by what it is multiplied, and how it is written
    "images": ("images", 1, "d"),
    "visual tokens": ("visual_tokens", 1, ".4g"),
    **{name: (name, 100, ".1f") for name in (*WORDS, "clean")},
    "log-prob": ("logprob", 1, ".3f"),
    "KL": ("kl", 1, ".3f"),
    "ms": ("first_token", 1000, ".1f"),
    "x faster": ("faster", 1, ".2f"),
    "KV kB": ("kv_bytes", 0.001, ".0f"),
}


@dataclass(frozen=True)
class TunedCandidate:
    """A configuration, and what was measured of it.

    Attributes:
        config: The configuration.
        label: Its method, with what tells it from others.
        images: Number of images that it was measured on.
        quality: The chosen measure with its 95 % interval, from a bootstrap over images.
        means: Means of all measures by name, as in `Measured`; "first_token" is the median of the seconds of encoding
            an image, selection and prefill.
        finalist: False if halving left it out.
        error: Why it failed, if it did.
    """

    config: PruningConfig
    label: str
    images: int
    quality: Estimate
    means: Mapping[str, float]
    finalist: bool
    error: str | None = None

    @property
    def keep(self) -> int | float:
        return self.config.method.keep

    @property
    def name(self) -> str:
        return f"keep {self.keep} with {self.label}"


@dataclass(frozen=True)
class TuningResult:
    """Measurements of `tune`, and its recommendation.

    Attributes:
        candidates: All candidates, by budget.
        unpruned: The unpruned model.
        recommended: The candidate with the fewest visual tokens that reaches the target; None if none does.
        target: The target.
        measure: The measure that must reach it.
        complete: False if the time was over before all images were seen.
        unreadable: Errors of images that could not be read, by name.
    """

    candidates: tuple[TunedCandidate, ...]
    unpruned: TunedCandidate
    recommended: TunedCandidate | None
    target: float
    measure: Measure
    complete: bool
    unreadable: Mapping[str, str]

    def sentence(self) -> str:
        """Return the recommendation, with its uncertainty."""
        measured = [one for one in self.candidates if one.finalist and one.images]
        chosen = self.recommended or max(measured, key=order, default=None)
        if chosen is None:
            return "no candidate could be measured"
        left, total = chosen.means["visual_tokens"], chosen.means["unpruned_tokens"]
        where = f"{chosen.images} image{'s' * (chosen.images != 1)}"
        text = (
            f"{chosen.name} ({left:.4g} of {total:.4g} visual tokens): {_percent(chosen.quality.mean)} % "
            f"{WORDS[self.measure]} ({_interval(chosen.quality, ' to ', ', ')}{where}), "
            f"{self.unpruned.means['first_token'] / chosen.means['first_token']:.1f} x faster to the first token"
        )
        if self.recommended is None:
            return f"no candidate reaches {_percent(self.target)} %; the best is {text}"
        if (chosen.quality.low or 0) < self.target:
            text += "; the true value may lie below the target, more images would tell"
        fewer = [one for one in measured if one.means["visual_tokens"] < left]
        following = max((one for one in fewer if one.keep == fewer[0].keep), key=order, default=None)  # by budget
        return text + (f"; {following.name}: {_percent(following.quality.mean)} %" if following else "")

    def table(self) -> Table:
        """Return the candidates as a table; the recommended one is marked."""
        columns = {head: own for head, own in COLUMNS.items() if head != "clean" or head in self.unpruned.means}
        rows: list[Row] = []
        for one in (self.unpruned, *self.candidates):
            values = [NOTHING] * len(columns)
            if one.images:
                bounds = _interval(one.quality, "-")
                faster = self.unpruned.means["first_token"] / one.means["first_token"]
                means = {**one.means, "images": one.images, "faster": faster}
                values = [
                    Value(
                        f"{means[name] * unit:{form}}", bounds * (name == self.measure), strong=one is self.recommended
                    )
                    for name, unit, form in columns.values()
                ]
            opens = not rows or rows[-1].heads[0] != str(one.keep)
            rows.append(Row((str(one.keep), one.label), tuple(values), opens))
        return Table("Candidates", ("keep", "method"), tuple(columns), tuple(rows), caption="shares in per cent")

    def spelled(self) -> "TuningResult":
        """Return the result for a page, with names of methods as papers write them."""
        shown = {id(one): replace(one, label=display_label(one.label)) for one in self.candidates}
        unpruned, recommended = replace(self.unpruned, label=UNPRUNED), shown.get(id(self.recommended))
        return replace(self, candidates=tuple(shown.values()), unpruned=unpruned, recommended=recommended)

    def figures(self) -> tuple[document.Figure, ...]:
        """Return the quality of all candidates against the budget, and against the time, with the Pareto front."""
        shown = [one for one in reversed(self.candidates) if one.images]
        budgets = tuple(dict.fromkeys(str(one.keep) for one in shown))
        by_budget = _curves([(budgets.index(str(one.keep)), one) for one in shown])
        timed = [*enumerate(sorted([self.unpruned, *shown], key=lambda one: (_ms(one), -order(one)[0])))]
        times = [_ms(one) for _, one in timed]
        front: list[tuple[int, TunedCandidate]] = []
        for place, one in timed:
            if not front or order(one)[0] > order(front[-1][1])[0]:
                front.append((place, one))
        far, ticks, last = (times[-1] - times[0]) / 6, list[str](), -inf
        for time in times:  # those that are too close to the last one that is written are not
            ticks.append(f"{time:.3g}" if time - last > far else "")
            last = time if ticks[-1] else last
        by_time = (*_curves(timed, bands=False), *_curves(front, bands=False, label="Pareto front"))
        title, axis = f"Answers like those of the unpruned model ({self.measure}) by ", f"{self.measure} (%)"
        return (
            document.Figure(
                f"{title}budget; bands are 95 % intervals.", "keep", axis, budgets, (("", by_budget),), 1, "keep"
            ),
            document.Figure(
                *(f"{title}time to the first token.", "ms", axis, tuple(ticks), (("", by_time),), 1, "ms"),
                places=tuple(times) if far else (),
            ),
        )

    def problems(self) -> list[str]:
        """Return what went wrong: candidates that failed, images that could not be read, time that was over."""
        lines = [f"{one.name} failed: {one.error}" for one in self.candidates if one.error]
        lines += [f"{name} was left out: {error}" for name, error in self.unreadable.items()]
        return lines + ([] if self.complete else ["the time was over before all images were seen"])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write tune.html, tune.md, and pruning.json if a candidate is recommended; returns the path of tune.html.

        Without a recommendation, a pruning.json of an earlier run is renamed to pruning.json.old.
        """
        page = self.spelled()
        blocks: list[document.Block] = [document.Text(page.sentence()), page.table(), *page.figures()]
        blocks += [document.Lines(tuple(lines))] if (lines := page.problems()) else []
        title, sections = "Tuned pruning", [document.Section("Recommendation", tuple(blocks))]
        pages = {"tune.html": document.page(title, sections), "tune.md": document.markdown(title, sections)}
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        replace_files(target, pages)
        if self.recommended:
            self.recommended.config.save_pretrained(target)
        elif (target / FILE).exists():
            (target / FILE).replace(target / f"{FILE}.old")
        return target / "tune.html"


def order(one: TunedCandidate) -> tuple[float, float, float]:
    """Order candidates by the measure, then by fewer visual tokens, then by log-probability of the unpruned answer."""
    quality = -1.0 if one.quality.mean is None else one.quality.mean
    return quality, -one.means.get("visual_tokens", inf), one.means.get("logprob", -inf)


def _ms(one: TunedCandidate) -> float:
    """Milliseconds to the first token."""
    return 1000 * one.means["first_token"]


def _curves(
    points: Sequence[tuple[int, TunedCandidate]], bands: bool = True, label: str = ""
) -> tuple[document.Curve, ...]:
    """Return a curve per method, or a single one with a label, through candidates, each at a tick."""
    curves = dict[tuple[str, str], list[document.Point]]()
    for tick, one in points:
        bounds = (one.quality.low, one.quality.high) if bands else (None, None)
        low, high = (None if bound is None else 100 * bound for bound in bounds)
        names = ("none", label) if label else (one.config.method.name, one.label)
        curves.setdefault(names, []).append(document.Point(tick, 100 * order(one)[0], low, high))
    return tuple(document.Curve(*names, tuple(found)) for names, found in curves.items())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _interval(quality: Estimate, dash: str, end: str = "") -> str:
    return "" if quality.low is None else f"{_percent(quality.low)}{dash}{_percent(quality.high)}{end}"
