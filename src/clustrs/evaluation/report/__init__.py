"""The report on a run: its sections, and the files and the terminal table that show them."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from clustrs.evaluation.report import charts, document, scores, summary
from clustrs.evaluation.report.summary import STATES, Summary
from clustrs.evaluation.results import Run, load_run

__all__ = ["replace_files", "terminal_table", "write_report"]


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
    run = Summary(load_run(folder, judge), compare_with)
    examples = summary.read_stored(folder / summary.EXAMPLES_FILE, tuple[document.DrawnExample, ...], ())
    curves = scores.figures(run)
    sections = (
        scores.conclusions(run),
        summary.overview(run),
        summary.costs(run, summary.read_latency(folder)),
        scores.scores(run),
        document.Section("Curves", tuple(curves)) if curves else None,
        scores.paired(run),
        summary.disagreements(examples),
        scores.robustness(run),
        scores.kinds(run),
        summary.failures(run),
        summary.configuration(run),
    )
    shown = [section for section in sections if section is not None]
    title = f"{run.run.config['model']} on {run.run.config['task']}"
    contents = {
        "report.csv": scores.csv_table(run),
        "report.tex": document.latex(title, shown),
        "report.md": document.markdown(title, shown),
        "report.html": document.page(title, shown),
    }
    texts = {name: content.encode(errors="replace") for name, content in contents.items()}
    replace_files(folder, {**texts, **charts.pdf_figures(curves)})
    return folder / "report.html"


def terminal_table(run: Run, compare_with: str | None = None, width: int | None = None) -> str:
    """Render the means and a legend as text of at most `width` columns; published numbers stand in brackets."""
    found = Summary(run, compare_with)
    table = scores.mean_table(found)
    values = [value for row in table.rows for value in row.values]
    bounds = "; \N{PLUS-MINUS SIGN} half of its 95 % interval" if any(value.interval for value in values) else ""
    legend = [f"mean score ({found.unit}){bounds}; * best pruning method at that budget"]
    if found.reference is not None and any(value.paper for value in values):
        legend.append(found.reference.text.replace('marked "paper"', "in brackets"))
    incomplete = [f"{run.count(state)} {name}" for state, name in STATES.items() if run.count(state)]
    if incomplete:
        legend.append(f"of {run.expected} answers: {', '.join(incomplete)}")
    if width is not None:
        legend = [line for text in legend for line in wrap(text, width)]
    return "\n".join([table.terminal(width), *legend]) + "\n"


def replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace some files of a folder, all or none: first all new ones are written, then they take their names."""
    partial = {name: folder / f".{name}.partial" for name in contents}
    previous = {name: folder / f".{name}.previous" for name in contents}
    replaced: list[str] = []
    name = ""
    try:
        for name, content in contents.items():
            with partial[name].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in contents:
            if (folder / name).is_file():
                shutil.copy2(folder / name, previous[name])
        for name in contents:
            os.replace(partial[name], folder / name)
            replaced.append(name)
    except OSError as error:
        for earlier in replaced:
            if previous[earlier].exists():
                os.replace(previous[earlier], folder / earlier)
            else:
                (folder / earlier).unlink()
        raise ValueError(f"{str(folder / name)!r} could not be written: {error.strerror}") from None
    finally:
        for path in (*partial.values(), *previous.values()):
            with suppress(OSError):
                path.unlink()
