"""What `tune` found: its candidates, the recommendation in one sentence, table, figures and files."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from clustrs.evaluation.metrics import Estimate
from clustrs.evaluation.report import charts, document, replace_files
from clustrs.models.configuration import PruningConfig
from clustrs.tables import NOTHING, Row, Table, Value

Measure = Literal["agreement", "exact", "tokens"]
COLUMNS = ("images", "visual tokens", "agreement", "exact", "tokens", "log-prob", "KL", "ms", "x faster", "KV kB")


@dataclass(frozen=True)
class TunedCandidate:
    """A configuration, and what was measured of it.

    Attributes:
        config: The configuration.
        label: Its method, with what tells it from others.
        images: Number of images that it was measured on.
        quality: The chosen measure with its 95 % interval, from a bootstrap over images.
        means: Means of all measures by name, as in `Measured`.
        first_token: Median seconds of encoding an image, selection and prefill.
        finalist: False if halving left it out.
        error: Why it failed, if it did.
    """

    config: PruningConfig
    label: str
    images: int
    quality: Estimate
    means: Mapping[str, float]
    first_token: float
    finalist: bool
    error: str | None = None

    @property
    def name(self) -> str:
        return f"keep {self.config.method.keep:g} with {self.label}"


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
        chosen = self.recommended or max(measured, key=rank, default=None)
        if chosen is None:
            return "no candidate could be measured"
        quality, words = chosen.quality, {"exact": "identical answers", "tokens": "of the answers' tokens"}
        interval = "" if quality.low is None else f"{_percent(quality.low, '')} to {_percent(quality.high, '')}, "
        left, total = chosen.means["visual_tokens"], chosen.means["unpruned_tokens"]
        text = (
            f"{chosen.name} ({left:.4g} of {total:.4g} visual tokens): "
            f"{_percent(quality.mean)} {words.get(self.measure, 'agreement')} ({interval}{_counted(chosen.images)}), "
            f"{self.unpruned.first_token / chosen.first_token:.1f} x faster to the first token"
        )
        if self.recommended is None:
            return f"no candidate reaches {_percent(self.target)}; the best is {text}"
        if quality.low is None or quality.low < self.target:
            text += "; the true value may lie below the target, more images would tell"
        fewer = [one for one in measured if one.means["visual_tokens"] < chosen.means["visual_tokens"]]
        following = max(fewer, key=rank, default=None)
        return text + (f"; {following.name}: {_percent(following.quality.mean)}" if following else "")

    def table(self) -> Table:
        """Return the candidates as a table; the recommended one is marked."""
        clean = "clean" in self.unpruned.means
        rows, last = [], None
        for one in (self.unpruned, *self.candidates):
            means, keep = one.means, f"{one.config.method.keep:g}"
            heads, opens = (keep, one.label), keep != last
            last = keep
            if not one.images:
                rows.append(Row(heads, (NOTHING,) * (len(COLUMNS) + clean), opens))
                continue
            quality = (
                f"{_percent(one.quality.low, '')}-{_percent(one.quality.high, '')}"
                if one.quality.low is not None
                else ""
            )
            shares = [
                Value(_percent(means[name], ""), quality * (name == self.measure), strong=one is self.recommended)
                for name in ("agreement", "exact", "tokens", *["clean"] * clean)
            ]
            speed = self.unpruned.first_token / one.first_token
            texts = f"{means['logprob']:.3f}", f"{means['kl']:.3f}", f"{1000 * one.first_token:.1f}", f"{speed:.2f}"
            numbers = [Value(text) for text in (*texts, f"{means['kv_bytes'] / 1000:.0f}")]
            counts = (Value(f"{one.images}"), Value(f"{means['visual_tokens']:.4g}"))
            rows.append(Row(heads, (*counts, *shares[:3], *numbers, *shares[3:]), opens))
        columns = (*COLUMNS, *["clean"] * clean)
        return Table("Candidates", ("keep", "method"), columns, tuple(rows), caption="shares in per cent")

    def figures(self) -> tuple[charts.Figure, ...]:
        """Return curves of the quality against the budget, and the candidates that are best for their time."""
        shown = [one for one in self.candidates if one.images]
        budgets = sorted({one.config.method.keep for one in shown})
        ahead: list[TunedCandidate] = []
        for one in sorted([self.unpruned, *shown], key=lambda one: (one.first_token, -rank(one)[0])):
            if not ahead or rank(one)[0] > rank(ahead[-1])[0]:
                ahead.append(one)

        def figure(label: str, name: str, title: str, ticks: Sequence[str], placed: Any) -> charts.Figure:
            curves: dict[str, list[charts.Point]] = {}
            for tick, one in placed:
                bounds = [None if bound is None else 100 * bound for bound in (one.quality.low, one.quality.high)]
                curves.setdefault(one.label, []).append(charts.Point(tick, 100 * rank(one)[0], *bounds))
            methods = {one.label: one.config.method.name for _, one in placed}
            drawn = tuple(charts.Curve(methods[key], key, tuple(points)) for key, points in curves.items())
            return charts.Figure(title, label, f"{self.measure} (%)", tuple(ticks), (("", drawn),), 1, name)

        by_budget = [(budgets.index(one.config.method.keep), one) for one in shown]
        by_budget.sort(key=lambda pair: pair[0])
        times = [f"{1000 * one.first_token:.3g}" for one in ahead]
        words = f"Answers like those of the unpruned model ({self.measure})"
        budget_title = f"{words} by budget; bands are 95 % intervals."
        time_title = f"{words} by milliseconds to the first token: the Pareto front."
        return (
            figure("keep", "keep", budget_title, [f"{k:g}" for k in budgets], by_budget),
            figure("ms", "time", time_title, times, [*enumerate(ahead)]),
        )

    def problems(self) -> list[str]:
        """Return what went wrong: candidates that failed, images that could not be read, time that was over."""
        lines = [f"{one.name} failed: {one.error}" for one in self.candidates if one.error]
        lines += [f"{name} was left out: {error}" for name, error in self.unreadable.items()]
        return lines + ([] if self.complete else ["the time was over before all images were seen"])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write tune.html and tune.md; pruning.json if a candidate is recommended. Returns the path of tune.html."""
        failed = self.problems()
        blocks: tuple[document.Block, ...] = (document.Text(self.sentence()), self.table(), *self.figures())
        sections = [document.Section("Recommendation", (*blocks, *([document.Lines(tuple(failed))] if failed else [])))]
        title = f"Pruning tuned on {_counted(self.unpruned.images)}"
        pages = {"tune.html": document.page(title, sections), "tune.md": document.markdown(title, sections)}
        Path(folder).mkdir(parents=True, exist_ok=True)
        replace_files(Path(folder), {name: text.encode(errors="replace") for name, text in pages.items()})
        if self.recommended:
            self.recommended.config.save_pretrained(folder)
        return Path(folder) / "tune.html"


def rank(one: TunedCandidate) -> tuple[float, float, float]:
    """Order candidates by the measure, then by fewer visual tokens, then by log-probability of the unpruned answer."""
    quality = -1.0 if one.quality.mean is None else one.quality.mean
    return quality, -one.means.get("visual_tokens", inf), one.means.get("logprob", -inf)


def _percent(share: float | None, unit: str = " %") -> str:
    return "-" if share is None else f"{100 * share:.1f}{unit}"


def _counted(images: int) -> str:
    return f"{images} image{'s' * (images != 1)}"
