"""The report on a run: its sections, and the files and the terminal table that show them."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from clustrs.evaluation.report.charts import pdf_figures
from clustrs.evaluation.report.comparisons import conclusions, paired, robustness
from clustrs.evaluation.report.document import Document, DrawnExample, latex, markdown, page
from clustrs.evaluation.report.overview import (
    Latency,
    configuration,
    costs,
    disagreements,
    failures,
    overview,
    read_examples,
    read_latency,
)
from clustrs.evaluation.report.scores import csv_table, figures, kinds, mean_table, scores
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.results import FAILED, MISSING, UNJUDGED, Run, load_run

__all__ = ["analyze", "replace_files", "terminal_table", "write_report"]


def write_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> Path:
    """Write report.html, .md, .csv, and .tex with its figures as PDF, into a run's folder.

    The same results give the same bytes. The files replace those of an earlier report together: if anything fails, the
    earlier ones stay.

    Args:
        folder: folder of the run.
        judge: whose verdicts count, where several judges scored the run.
        compare_with: model whose published numbers are shown next to the run's; by default the run's own, where there
            are some.

    Returns:
        Path of report.html.

    Raises:
        ValueError: the run cannot be read, or a file cannot be written.
    """
    folder = Path(folder)
    summary = Summary(load_run(folder, judge), compare_with)
    document = analyze(summary, read_latency(folder), read_examples(folder))
    contents = {
        "report.csv": csv_table(summary),
        "report.tex": latex(document),
        "report.md": markdown(document),
        "report.html": page(document),
    }
    texts = {name: content.encode(errors="replace") for name, content in contents.items()}
    replace_files(folder, {**texts, **pdf_figures(document.figures)})
    return folder / "report.html"


def analyze(summary: Summary, latency: Latency | None = None, examples: tuple[DrawnExample, ...] = ()) -> Document:
    """Build all sections of a report; `latency` and `examples` were measured and drawn after the run."""
    config = summary.run.config
    sections = (
        conclusions(summary),
        overview(summary),
        costs(summary, latency),
        scores(summary),
        figures(summary),
        paired(summary),
        disagreements(examples),
        robustness(summary),
        kinds(summary),
        failures(summary),
        configuration(summary),
    )
    title = f"{config['model']} on {config['task']}"
    return Document(title, tuple(section for section in sections if section is not None))


def terminal_table(run: Run, compare_with: str | None = None, width: int | None = None) -> str:
    """Render the means as text, with a row per corruption and budget and a column per method.

    Args:
        run: the run.
        compare_with: as in `write_report`; published numbers stand in brackets.
        width: columns of the terminal; a table that is too wide is transposed or divided.

    Returns:
        The table and its legend.
    """
    summary = Summary(run, compare_with)
    table = mean_table(summary)
    values = [value for row in table.rows for value in row.values]
    bounds = "; \N{PLUS-MINUS SIGN} half of its 95 % interval" if any(value.interval for value in values) else ""
    legend = [f"mean score ({summary.unit}){bounds}; * best pruning method at that budget"]
    if summary.reference is not None and any(value.paper for value in values):
        legend.append(summary.reference.text.replace('marked "paper"', "in brackets"))
    counts = ((MISSING, "missing"), (FAILED, "failed"), (UNJUDGED, "not judged"))
    incomplete = [f"{run.count(state)} {name}" for state, name in counts if run.count(state)]
    if incomplete:
        legend.append(f"of {run.expected} answers: {', '.join(incomplete)}")
    if width is not None:
        legend = [line for text in legend for line in wrap(text, width)]
    return "\n".join([table.terminal(width), *legend]) + "\n"


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace some files of a folder, all or none: first all new ones are written, then they take their names."""
    partial = {name: folder / f".{name}.partial" for name in contents}
    previous = {name: folder / f".{name}.previous" for name in contents}
    name = ""
    try:
        for name, content in contents.items():
            with partial[name].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in contents:
            _keep(folder / name, previous[name])
        replaced: list[str] = []
        try:
            for name in contents:
                os.replace(partial[name], folder / name)
                replaced.append(name)
        except OSError:
            for earlier in replaced:
                _restore(folder / earlier, previous[earlier])
            raise
    except OSError as error:
        raise ValueError(f"{str(folder / name)!r} could not be written: {error.strerror}") from None
    finally:
        for path in (*partial.values(), *previous.values()):
            with suppress(OSError):
                path.unlink()


def _keep(path: Path, previous: Path) -> None:
    """Give a file a second name, so that it can be restored; where that is not possible, copy it."""
    previous.unlink(missing_ok=True)
    if path.is_file():
        try:
            os.link(path, previous)
        except OSError:
            shutil.copy2(path, previous)


def _restore(path: Path, previous: Path) -> None:
    if previous.exists():
        os.replace(previous, path)
    else:
        path.unlink()
