"""The report on a run: its sections, and the files and the terminal table that show them."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap

from clustrs.evaluation.report import document, scores, summary
from clustrs.evaluation.report.summary import STATES, Summary
from clustrs.evaluation.results import Run, load_run
from clustrs.validation import write_whole

__all__ = ["replace_files", "terminal_table", "write_report"]


def write_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> Path:
    """Write report.html, .md, .csv, and .tex with its figures as PDF, into a run's folder.

    The same results give the same bytes. The files replace those of an earlier report together: if anything fails, the
    earlier ones stay.

    Args:
        folder: Folder of the run.
        judge: Judge whose verdicts count, where several scored the run.
        compare_with: Model whose published numbers are shown next to the run's; by default the run's own.

    Returns:
        Path of report.html.

    Raises:
        ValueError: The run cannot be read, or a file cannot be written.
    """
    folder = Path(folder)
    run = Summary(load_run(folder, judge), compare_with)
    examples = summary.read_stored(folder / summary.EXAMPLES_FILE, tuple[document.DrawnExample, ...])
    latency = summary.read_stored(folder / summary.LATENCY_FILE, summary.Latency)
    curves, first = scores.figures(run), scores.opening(run, latency)
    sections = (
        first,
        summary.overview(run),
        summary.costs(run, latency),
        scores.scores(run),
        document.Section("Curves", tuple(curves), folded=True) if curves else None,
        scores.paired(run),
        summary.disagreements(examples or ()),
        scores.robustness(run),
        scores.kinds(run),
        summary.failures(run),
        summary.configuration(run),
    )
    shown = [section for section in sections if section is not None]
    title = f"{run.run.config['model']} on {run.run.config['task']}"
    contents: dict[str, str | bytes] = {
        "report.csv": scores.csv_table(run),
        "report.tex": document.latex(title, shown),
        "report.md": document.markdown(title, shown),
        "report.html": document.page(title, shown),
    }
    replace_files(folder, contents | document.pdf_figures([*first.figures, *curves]))
    return folder / "report.html"


def terminal_table(run: Run, compare_with: str | None = None, width: int | None = None) -> str:
    """Render the means and a legend as text of at most `width` columns; published numbers stand in brackets."""
    found = Summary(run, compare_with)
    table = scores.mean_table(found)
    values = [value for row in table.rows for value in row.values]
    bounds = "; \N{PLUS-MINUS SIGN} half of its 95 % interval" if any(value.interval for value in values) else ""
    legend = [f"mean score ({found.unit}){bounds}; * clearly better than every other method there"]
    if found.reference is not None and any(value.paper for value in values):
        legend.append(found.reference.text.replace('marked "paper"', "in brackets"))
    incomplete = [f"{run.count(state)} {name}" for state, name in STATES.items() if run.count(state)]
    if incomplete:
        legend.append(f"of {run.expected} answers: {', '.join(incomplete)}")
    if width is not None:
        legend = [line for text in legend for line in wrap(text, width)]
    return "\n".join([table.terminal(width), *legend]) + "\n"


def replace_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Replace some files of a folder, all or none: first all new ones are written, then they take their names."""
    name, replaced = "", []
    try:
        with TemporaryDirectory(prefix=".report-", dir=folder) as scratch:
            try:
                for name, content in contents.items():
                    encoded = content.encode(errors="replace") if isinstance(content, str) else content
                    write_whole(Path(scratch, name), [encoded])
                    if (folder / name).is_file():
                        shutil.copy2(folder / name, Path(scratch, f"{name}.old"))
                for name in contents:
                    os.replace(Path(scratch, name), folder / name)
                    replaced.append(name)
            except OSError:
                for earlier in replaced:
                    saved = Path(scratch, f"{earlier}.old")
                    if saved.exists():
                        os.replace(saved, folder / earlier)
                    else:
                        (folder / earlier).unlink()
                raise
    except OSError as error:
        raise ValueError(f"{str(folder / name)!r} could not be written: {error.strerror}") from None
