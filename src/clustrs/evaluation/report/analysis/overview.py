"""The run in a few words: what is missing, what failed, and the exact configuration."""

import json
from collections.abc import Mapping
from typing import Any

from clustrs.evaluation.report.analysis.protocol import protocol_sentence
from clustrs.evaluation.report.blocks import Block, Listing, Row, Section, Table, Text, Value
from clustrs.evaluation.report.escaping import short
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED

FIRST = 10
"""How many error messages are shown."""


def overview(summary: Summary) -> Section:
    """The run in a few sentences; what is missing stands out."""
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


def _provenance(config: Mapping[str, Any]) -> str:
    """When the run was started and with which versions, as far as it says so."""
    started = f"Started on {config['started']} (UTC)" if config.get("started") else "Started on an unknown day"
    versions = [f"{name} {config[name]}" for name in ("clustrs", "torch", "transformers") if config.get(name)]
    return f"{started}, with {', '.join(versions) or 'unknown versions'}."


def failures(summary: Summary) -> Section:
    """What is missing, failed or not judged, by method, and the most frequent error messages."""
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
    """The configuration, as JSON: a line for each entry and for each method."""
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
