"""What each method costs beside what it scores: visual tokens, and the time of an answer where it was measured."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clustrs.evaluation import metrics
from clustrs.evaluation.report.analysis.tables import UNPRUNED
from clustrs.evaluation.report.blocks import NOTHING, Block, Row, Section, Table, Text, Value
from clustrs.evaluation.report.latency import PARTS, Latency
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.store import identity


def costs(summary: Summary, latency: Latency | None = None) -> Section | None:
    """A row per method and budget: tokens, scores, and milliseconds if there are any."""
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
    """What the table shows. The times of a run from elsewhere can't be measured here."""
    text = "What the language model reads of an image on average, beside the score."
    if latency is None and elsewhere:
        return text
    if latency is None:
        return f"{text} Times are not part of a run: clustrs report RUN --latency 10 measures them."
    return (
        f"{text} Milliseconds are medians of {latency.repeats} answers, one at a time, measured on {latency.machine}: "
        "vision is the tower and the projector, selection includes scoring, decode is per token."
    )
