"""A run and its means, the hook for published numbers, and the facts of a report: run, costs, failures."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.metrics import Estimate, Values
from clustrs.evaluation.report.document import DrawnExample, Lines, Section, Text
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Method, Run
from clustrs.evaluation.store import identity
from clustrs.plugins import install_hint, leave_out, load_entry, plugin_entries
from clustrs.pruners.registry import display_label
from clustrs.tables import NOTHING, Row, Table, Value, short

UNPRUNED = "unpruned"
REPORT_SECTIONS = "clustrs.report_sections"  # entry-point group, see `Reference`
LATENCY_FILE, EXAMPLES_FILE = "latency.json", "examples.json"
PARTS = ("vision", "selection", "prefill", "decode")
SHOWN_ERRORS = 10
STATES = {MISSING: "missing", FAILED: "failed", UNJUDGED: "not judged"}
PROMPTS = {
    "checkpoint": "the checkpoint's own chat template",
    "vicuna_v1": "LLaVA-1.5's template vicuna_v1 with its system line",
}
PADDINGS = {
    "checkpoint": "fitted as the checkpoint's processor does",
    "square": "padded to a square with the mean color",
}
PLACES = {"compact": "positions without gaps", "original": "at their own positions"}
WEIGHTS = {"plain": "each counts once", "proportional": "each counts as often as the tokens it stands for"}
Group = tuple[str, Sequence[Value]]  # heading of some rows, and the value of each method of the run
Conditions = Sequence[int]  # their indices in the run


@dataclass(frozen=True)
class Reference:
    """Published numbers to show next to a run's, returned by an entry point of the group `clustrs.report_sections`.

    A plugin is a callable `plugin(run: Run, compare_with: str | None) -> Reference | None`; the first that returns a
    `Reference` is used. `compare_with` is the model to compare with (`--compare-with`), None for the run's own; the
    plugin raises ValueError for a model that it does not know.

    Attributes:
        text: Sentences on the origin of the numbers, which they call `Numbers marked "paper"`.
        score: Function of a method, a corruption ("" for all) and a level (None for clean, or the mean over levels)
            that returns the published score, from 0 to 1, or None.
        tables: Function of the summary that returns further tables for the section "Scores".

    Examples:
        >>> def half(run, compare_with):
        ...     return Reference("Numbers marked \"paper\" are made up.", lambda method, corruption, level: 0.5)

        with `[project.entry-points."clustrs.report_sections"]` and `half = "my_package:half"` in pyproject.toml.
    """

    text: str
    score: Callable[[Method, str, float | None], float | None]
    tables: "Callable[[Summary], Sequence[Table]]" = lambda summary: ()


def find_reference(run: Run, compare_with: str | None = None) -> Reference | None:
    entries = plugin_entries(REPORT_SECTIONS)
    for entry in entries:
        try:
            plugin: Callable[[Run, str | None], Reference | None] = load_entry(entry)
        except ValueError as error:
            leave_out(str(error))
            continue
        if (reference := plugin(run, compare_with)) is not None:
            return reference
    if compare_with is not None and not entries:
        hint = install_hint("cli", package="clustrs-paper")
        raise ValueError(f"compare_with={compare_with!r} needs published numbers: {hint}")
    return None


class Summary:
    """A run and its means: `values` are the scores [methods, conditions, items], averaged over seeds.

    `reference` holds published numbers; `clean` is the index of the condition without corruption, if there is one.
    """

    def __init__(self, run: Run, compare_with: str | None = None) -> None:
        self.run = run
        self.values: Values = metrics.question_means(run.scores)
        self.reference = find_reference(run, compare_with)
        self.corrupted = [i for i, condition in enumerate(run.conditions) if condition.level is not None]
        self.clean = next((i for i, condition in enumerate(run.conditions) if condition.level is None), None)
        self.decimals = 3 if run.scale <= 1 else 2 if run.scale <= 10 else 1
        self.unit = "per cent" if run.scale == 100 else f"0 to {run.scale:g}"

    @cached_property
    def estimates(self) -> list[list[Estimate]]:
        flat, count = metrics.estimates(self.values), len(self.run.conditions)
        return [flat[i : i + count] for i in range(0, len(flat), count)]

    def together(self, conditions: Sequence[int]) -> Values:
        """Return the scores [methods, items] averaged over conditions, of the questions that have one under each."""
        return np.mean(self.values[:, list(conditions)], axis=1)

    def number(self, score: float, signed: bool = False) -> str:
        """Format a score in the scale of the run; 0 has no sign."""
        rounded = round(score * self.run.scale, self.decimals) + 0.0
        return f"{rounded:{'+' if signed and rounded else ''}.{self.decimals}f}"

    def interval(self, estimate: Estimate, signed: bool = False) -> str:
        """Format the bounds of an estimate; "" where it has none."""
        if estimate.low is None or estimate.high is None:
            return ""
        return f"[{self.number(estimate.low, signed)}, {self.number(estimate.high, signed)}]"

    def value(self, estimate: Estimate, paper: float | None = None, whole: int | None = None) -> Value:
        """Return a mean as a table shows it, with the number of questions where it is not `whole` (by default, all)."""
        printed = "" if paper is None else self.number(paper)
        if estimate.mean is None:
            return Value(NOTHING.text, paper=printed)
        expected = self.run.config["items"] if whole is None else whole
        note = f"n {estimate.n}" if estimate.n != expected else ""
        return Value(self.number(estimate.mean), self.interval(estimate), note, printed)

    def label(self, method: int) -> str:
        own = self.run.methods[method]
        return UNPRUNED if own.keep is None else display_label(own.label)

    def of_budget(self, budget: str) -> list[int]:
        return [i for i, one in enumerate(self.run.methods) if one.keep is not None and one.budget == budget]

    def ranked(self, budget: str, conditions: Conditions) -> list[tuple[int, float]]:
        """Return the pruning methods of a budget that have scores, the best over the conditions first, with means."""
        values = self.together(conditions)
        means = [(i, mean) for i in self.of_budget(budget) if (mean := metrics.mean(values[i])) is not None]
        return sorted(means, key=lambda entry: (-entry[1], entry[0]))

    def clearly_best(self, budget: str, conditions: Conditions) -> int | None:
        """Return the method whose paired difference to every other one of a budget has an interval above 0."""
        order = [method for method, _ in self.ranked(budget, conditions)]
        if len(order) < 2:
            return None
        scores = self.run.scores[order][:, list(conditions)].mean(axis=1)
        found = metrics.differences(np.broadcast_to(scores[:1], scores[1:].shape), scores[1:])
        return order[0] if all(one.low is not None and one.low > 0 for one in found) else None

    def paper_score(self, method: int, corruption: str, level: float | None) -> float | None:
        return None if self.reference is None else self.reference.score(self.run.methods[method], corruption, level)

    def table(
        self,
        title: str,
        head: str,
        groups: Sequence[Group],
        unpruned: bool = True,
        judged_on: Sequence[Conditions] | None = None,
    ) -> Table:
        """Build a table with a row per group and budget, and a column per method, as the paper has them.

        `unpruned` adds a column for the model that keeps everything, repeated in each row. `judged_on` has the
        conditions of each group: the value of a method that is clearly the best under them is marked.
        """
        run = self.run
        reference = run.unpruned if unpruned or not run.labels else None
        rows = []
        for number, (text, values) in enumerate(groups):
            for i, budget in enumerate(run.budgets):
                best = None if judged_on is None else self.clearly_best(budget, judged_on[number])
                methods = [run.find(label, budget) for label in run.labels]
                shown = [NOTHING if m is None else replace(values[m], strong=m == best) for m in methods]
                before = [] if reference is None else [values[reference]]
                rows.append(Row((text, budget), (*before, *shown), opens=i == 0))
        columns = (UNPRUNED,) * (reference is not None) + tuple(map(display_label, run.labels))
        return Table(title, (head, "keep"), columns, tuple(rows))


def overview(summary: Summary) -> Section:
    """Describe the run in a few sentences; what is missing stands out, what it does not say is unknown."""
    run, config = summary.run, summary.run.config
    counts = {
        "question": config["questions"] if run.totals_only else config["items"],
        "pruning method": len(run.labels),
        "budget": len(run.budgets) if run.labels else 0,
        "condition": len(run.conditions),
        "seed": len(run.seeds),
    }
    counted = ", ".join(_many(n, word) for word, n in counts.items() if n)
    unpruned = "" if run.unpruned is None else ", and the unpruned model"
    prompt = PROMPTS.get(str(config.get("prompt_template")), "unknown")
    padding = PADDINGS.get(str(config.get("image_padding")), "fitted in an unknown way")
    place, weight = PLACES.get(str(run.settings.get("positions"))), WEIGHTS.get(str(run.settings["attention"]))
    how = f" (chosen automatically: {', '.join(run.chosen)})" if run.chosen else ""
    kept = f" Kept tokens: {place}, {weight}{how}." if place and weight else ""
    started = f"Started on {config['started']} (UTC)" if config.get("started") else "Started on an unknown day"
    versions = [f"{name} {config[name]}" for name in ("clustrs", "torch", "transformers") if config.get(name)]
    texts = [
        f"Task {config['task']}, model {config['model']}: {counted}{unpruned}; {run.expected} answers in all. "
        f"{f'Judge: {run.judge}. ' if run.judge else ''}Prompt: {prompt}. Images: {padding}.{kept}",
        f"{started}, with {', '.join(versions) or 'unknown versions'}.",
    ]
    missing, failed, unjudged = (run.count(state) for state in STATES)
    share = f"{missing} of {run.expected} answers ({100 * missing / run.expected:.1f} %)"
    totals = "Only totals are known: a score for all questions and not one each, so there are no intervals."
    warnings = {
        totals: run.totals_only,
        f"Incomplete: {share} are missing. The numbers may change.": missing,
        f"{_many(failed, 'answer')} failed; no mean counts them.": failed,
        f"{_many(unjudged, 'answer')} not judged yet; no mean counts them.": unjudged,
    }
    shown = [Text(text, "warning") for text, applies in warnings.items() if applies]
    return Section("The run", (*map(Text, texts), *shown), folded=not shown)


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + "s" * (count != 1)


def failures(summary: Summary) -> Section:
    """Count what is missing, failed or not judged, by method, and list the most frequent error messages."""
    run = summary.run
    if not (any(run.count(state) for state in STATES) or run.judge_errors):
        return Section("What failed", (Text("Nothing: every answer is there and has a score."),), folded=True)
    each = run.expected // len(run.methods)
    rows = []
    for i, (method, states) in enumerate(zip(run.methods, run.states, strict=True)):
        numbers = (each, each - (states != MISSING).sum(), (states == FAILED).sum(), (states == UNJUDGED).sum())
        rows.append(Row((summary.label(i), method.budget), tuple(Value(str(number)) for number in numbers)))
    blocks = [Table("Answers", ("method", "keep"), ("expected", *STATES.values()), tuple(rows))]
    for title, errors in (("Errors of the model", run.errors), ("Errors of the judge", run.judge_errors)):
        ordered = sorted(errors.items(), key=lambda entry: (-entry[1], entry[0]))
        rest = sum(count for _, count in ordered[SHOWN_ERRORS:])
        rows = [Row((short(message),), (Value(str(count)),)) for message, count in ordered[:SHOWN_ERRORS]]
        if rest:
            rows.append(Row((f"{len(ordered) - SHOWN_ERRORS} other messages",), (Value(str(rest)),)))
        if rows:
            blocks.append(Table(title, ("message",), ("times",), tuple(rows)))
    return Section("What failed", tuple(blocks), folded=True)


def configuration(summary: Summary) -> Section:
    """List the configuration as JSON: a line for each entry and for each method."""
    entries = {key: json.dumps(value) for key, value in summary.run.config.items()}
    entries["methods"] = "[\n    " + ",\n    ".join(map(json.dumps, summary.run.config["methods"])) + "\n  ]"
    text = "{\n" + ",\n".join(f"  {json.dumps(key)}: {value}" for key, value in entries.items()) + "\n}"
    return Section("Configuration", (Lines(tuple(text.splitlines()), listing=True),), folded=True)


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of each method (as its configuration has it) over `repeats` answers on a machine.

    `kv_bytes` beside them are bytes of the KV cache.
    """

    machine: str
    repeats: int
    milliseconds: tuple[tuple[Mapping[str, Any], Mapping[str, float]], ...]

    @property
    def by_method(self) -> dict[str, Mapping[str, float]]:
        return {identity(dict(method)): times for method, times in self.milliseconds}


def read_stored(path: Path, kind: Any) -> Any:
    """Read what was measured or drawn after a run, as an object of a kind; None where there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r}: {str(error) or 'nested too deeply'}: make it again, or remove it") from None


def costs(summary: Summary, latency: Latency | None = None) -> Section | None:
    """Build a row per method and budget: tokens, scores, and milliseconds if there are any."""
    run = summary.run
    if np.isnan(run.visual_tokens).all():
        return None
    text = "What the language model reads of an image on average, beside the score."
    scored = {} if summary.clean is None else {"clean score": summary.values[:, summary.clean]}
    scored |= {"corrupted score": summary.together(summary.corrupted)} if summary.corrupted else {}
    inside = bool(np.nanmax(np.abs(run.average_tokens - run.visual_tokens)) > 0)  # pruned inside the language model
    columns, times = ["visual tokens", *["mean over layers"] * inside, "of unpruned", *scored], {}
    if latency is not None:
        columns += [*(f"{part} ms" for part in PARTS), "KV MiB"]
        times = latency.by_method
        text += (
            f" Milliseconds are medians of {latency.repeats} answers, one at a time, measured on {latency.machine}: "
            "vision is the tower and the projector, selection includes scoring, decode is per token. "
            "The KV cache is that of the visual tokens."
        )
    elif "lmms_eval" not in run.config:  # an imported run cannot be measured here
        text += " Times are not part of a run: clustrs report RUN --latency 10 measures them."
    rows = []
    for i in sorted(range(len(run.methods)), key=lambda i: (-np.nan_to_num(run.visual_tokens[i], nan=-1.0), i)):
        tokens, whole = run.visual_tokens[i], run.unpruned_tokens[i]
        counts = (tokens, run.average_tokens[i]) if inside else (tokens,)
        values = [NOTHING if np.isnan(count) else Value(f"{count:.0f}") for count in counts]
        values.append(NOTHING if np.isnan(tokens) or not whole else Value(f"{100 * tokens / whole:.0f} %"))
        means = [metrics.mean(own[i]) for own in scored.values()]
        values += [NOTHING if mean is None else Value(summary.number(mean)) for mean in means]
        if latency is not None:
            own = times.get(identity(run.config["methods"][i]), {})
            values += [Value(f"{own[part]:.1f}") if part in own else NOTHING for part in PARTS]
            values.append(Value(f"{own['kv_bytes'] / 2**20:.2f}") if "kv_bytes" in own else NOTHING)
        rows.append(Row((summary.label(i), run.methods[i].budget), tuple(values)))
    table = Table("Cost and score", ("method", "keep"), tuple(columns), tuple(rows))
    return Section("Tokens and time", (Text(text), table), folded=True)


def disagreements(examples: tuple[DrawnExample, ...]) -> Section | None:
    """Build the gallery of questions that only one of two methods answered well."""
    text = (
        "Some questions that one method answered well and another did not, drawn from either side in turn. Kept tokens "
        "are lit and outlined (dashed: others were merged into them), dropped ones dimmed."
    )
    return Section("Where methods disagree", (Text(text), *examples), folded=True) if examples else None
