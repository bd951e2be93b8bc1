"""The run and what it cost: provenance, tokens and times, failures, configuration, and what was stored after it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.report.document import Block, DrawnExample, Gallery, Listing, Section, Text
from clustrs.evaluation.report.summary import UNPRUNED, Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED
from clustrs.evaluation.store import identity
from clustrs.tables import NOTHING, Row, Table, Value, short

LATENCY_FILE, EXAMPLES_FILE = "latency.json", "examples.json"
FIRST = 10
"""Number of error messages that are shown."""
PARTS = ("vision", "selection", "prefill", "decode")
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


def overview(summary: Summary) -> Section:
    """Describe the run in a few sentences; what is missing stands out."""
    run = summary.run
    config = run.config
    judge = f"Judge: {run.judge}. " if run.judge else ""
    parts = (
        _many(config["questions"] if run.totals_only else config["items"], "question"),
        _many(len(run.methods), "method"),
        _many(len(run.conditions), "condition"),
        _many(len(run.seeds), "seed"),
    )
    blocks: list[Block] = [
        Text(
            f"Task {config['task']}, model {config['model']}: {', '.join(parts)}, {run.expected} answers in all. "
            f"{judge}{protocol_sentence(config)}"
        ),
        Text(_provenance(config)),
    ]
    if run.totals_only:
        text = "Only totals are known: a score for all questions and not one each, so there are no intervals."
        blocks.append(Text(text, warning=True))
    missing, failed, unjudged = (run.count(state) for state in (MISSING, FAILED, UNJUDGED))
    if missing:
        share = 100 * missing / run.expected
        text = f"Incomplete: {missing} of {run.expected} answers ({share:.1f} %) are missing. The numbers may change."
        blocks.append(Text(text, warning=True))
    if failed:
        blocks.append(Text(f"{_many(failed, 'answer')} failed; no mean counts them.", warning=True))
    if unjudged:
        blocks.append(Text(f"{_many(unjudged, 'answer')} not judged yet; no mean counts them.", warning=True))
    return Section("The run", tuple(blocks))


def protocol_sentence(config: Mapping[str, Any]) -> str:
    """Return a sentence on prompt and images; what an imported or older run does not say is unknown."""
    prompt = PROMPTS.get(str(config.get("prompt_template")), "unknown")
    padding = PADDINGS.get(str(config.get("image_padding")), "fitted in an unknown way")
    chosen = config["chosen"] if isinstance(config.get("chosen"), dict) else {}
    used = {"attention": "plain", **config, **chosen}
    place, weight = PLACES.get(str(used.get("positions"))), WEIGHTS.get(str(used["attention"]))
    how = f" (chosen automatically: {', '.join(chosen)})" if chosen else ""
    kept = f" Kept tokens: {place}, {weight}{how}." if place and weight else ""
    return f"Prompt: {prompt}. Images: {padding}.{kept}"


def _provenance(config: Mapping[str, Any]) -> str:
    """When the run was started and with which versions, as far as it says so."""
    started = f"Started on {config['started']} (UTC)" if config.get("started") else "Started on an unknown day"
    versions = [f"{name} {config[name]}" for name in ("clustrs", "torch", "transformers") if config.get(name)]
    return f"{started}, with {', '.join(versions) or 'unknown versions'}."


def failures(summary: Summary) -> Section:
    """Count what is missing, failed or not judged, by method, and list the most frequent error messages."""
    run = summary.run
    if not (run.count(MISSING) or run.count(FAILED) or run.count(UNJUDGED) or run.judge_errors):
        return Section("What failed", (Text("Nothing: every answer is there and has a score."),))
    each = run.expected // len(run.methods)
    rows = []
    for method, states in zip(run.methods, run.states, strict=True):
        failed, unjudged = int((states == FAILED).sum()), int((states == UNJUDGED).sum())
        numbers = (each, each - int((states != MISSING).sum()), failed, unjudged)
        rows.append(Row((method.label, method.budget), tuple(Value(str(number)) for number in numbers)))
    columns = ("expected", "missing", "failed", "not judged")
    blocks: list[Block] = [Table("Answers", ("method", "keep"), columns, tuple(rows))]
    for title, errors in (("Errors of the model", run.errors), ("Errors of the judge", run.judge_errors)):
        if errors:
            blocks.append(_messages(title, errors))
    return Section("What failed", tuple(blocks))


def configuration(summary: Summary) -> Section:
    """List the configuration as JSON: a line for each entry and for each method."""
    lines = []
    for key, value in summary.run.config.items():
        if key == "methods":
            inside = ",\n    ".join(json.dumps(method) for method in value)
            lines.append(f"  {json.dumps(key)}: [\n    {inside}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    text = "{\n" + ",\n".join(lines) + "\n}"
    return Section("Configuration", (Listing(tuple(text.splitlines())),))


def _messages(title: str, errors: Mapping[str, int]) -> Table:
    ordered = sorted(errors.items(), key=lambda entry: (-entry[1], entry[0]))
    rest = sum(count for _, count in ordered[FIRST:])
    rows = [Row((short(message),), (Value(str(count)),)) for message, count in ordered[:FIRST]]
    if rest:
        rows.append(Row((f"{len(ordered) - FIRST} other messages",), (Value(str(rest)),)))
    return Table(title, ("message",), ("times",), tuple(rows))


def _many(count: int, word: str) -> str:
    return f"{count} {word}" + "s" * (count != 1)


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of each method (as its configuration has it) over `repeats` answers on a machine."""

    machine: str
    repeats: int
    milliseconds: tuple[tuple[Mapping[str, Any], Mapping[str, float]], ...]

    def to_json(self) -> str:
        return json.dumps({"machine": self.machine, "repeats": self.repeats, "milliseconds": self.milliseconds}) + "\n"


def read_latency(folder: Path) -> Latency | None:
    """Read the times that were measured for a run; None where none were."""
    return _read_stored(Path(folder) / LATENCY_FILE, Latency, None)


def read_examples(folder: Path) -> tuple[DrawnExample, ...]:
    """Read the examples that were drawn for a run; none where none were."""
    return _read_stored(Path(folder) / EXAMPLES_FILE, tuple[DrawnExample, ...], ())


def _read_stored(path: Path, kind: Any, default: Any) -> Any:
    if not path.exists():
        return default
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r}: {str(error) or 'nested too deeply'}: make it again, or remove it") from None


def encode_examples(examples: tuple[DrawnExample, ...]) -> str:
    """Return the content of the file that `read_examples` reads."""
    return msgspec.json.encode(examples).decode() + "\n"


def costs(summary: Summary, latency: Latency | None = None) -> Section | None:
    """Build a row per method and budget: tokens, scores, and milliseconds if there are any."""
    run = summary.run
    if np.isnan(run.visual_tokens).all():
        return None
    columns = ["visual tokens", "of unpruned"]
    columns += ["clean score"] if summary.clean is not None else []
    columns += ["corrupted score"] if summary.corrupted else []
    times = {} if latency is None else {identity(dict(method)): ms for method, ms in latency.milliseconds}
    if latency is not None:
        columns += [f"{part} ms" for part in PARTS]
    order = sorted(range(len(run.methods)), key=lambda i: (-_known(run.visual_tokens[i]), i))
    rows = tuple(_row(summary, i, times, latency is not None) for i in order)
    blocks: list[Block] = [Text(_explained(latency, elsewhere="lmms_eval" in run.config))]
    return Section("Tokens and time", (*blocks, Table("Cost and score", ("method", "keep"), tuple(columns), rows)))


def _known(count: Any) -> float:
    return -1.0 if np.isnan(count) else float(count)


def _row(summary: Summary, index: int, times: Mapping[str, Mapping[str, float]], timed: bool) -> Row:
    run, method = summary.run, summary.run.methods[index]
    tokens, whole = run.visual_tokens[index], run.unpruned_tokens[index]
    values = [NOTHING if np.isnan(tokens) else Value(f"{tokens:.0f}")]
    values.append(NOTHING if np.isnan(tokens) or not whole else Value(f"{100 * tokens / whole:.0f} %"))
    if summary.clean is not None:
        values.append(_score(summary, summary.values[index, summary.clean]))
    if summary.corrupted:
        values.append(_score(summary, summary.together(summary.corrupted)[index]))
    if timed:
        own = times.get(identity(run.config["methods"][index]), {})
        values += [Value(f"{own[part]:.1f}") if part in own else NOTHING for part in PARTS]
    return Row((UNPRUNED if method.keep is None else method.label, method.budget), tuple(values))


def _score(summary: Summary, values: metrics.Values) -> Value:
    mean = metrics.mean(values)
    return NOTHING if mean is None else Value(summary.number(mean))


def _explained(latency: Latency | None, elsewhere: bool) -> str:
    """Text above the table. The times of an imported run can't be measured here."""
    text = "What the language model reads of an image on average, beside the score."
    if latency is None and elsewhere:
        return text
    if latency is None:
        return f"{text} Times are not part of a run: clustrs report RUN --latency 10 measures them."
    return (
        f"{text} Milliseconds are medians of {latency.repeats} answers, one at a time, measured on {latency.machine}: "
        "vision is the tower and the projector, selection includes scoring, decode is per token."
    )


def disagreements(examples: tuple[DrawnExample, ...]) -> Section | None:
    """Build the gallery of questions that only one of two methods answered well."""
    if not examples:
        return None
    text = (
        "Some questions that one method answered well and another did not, drawn from either side in turn. Kept tokens "
        "are lit and outlined (dashed: others were merged into them), dropped ones dimmed."
    )
    return Section("Where methods disagree", (Text(text), Gallery(examples)))
