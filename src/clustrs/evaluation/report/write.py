"""From a run's folder to its report, in files that are replaced together."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from clustrs.evaluation.report.analysis import Summary, analyse
from clustrs.evaluation.report.analysis.cells import cell_means
from clustrs.evaluation.report.csv import csv_table
from clustrs.evaluation.report.examples import read_examples
from clustrs.evaluation.report.html import page
from clustrs.evaluation.report.latency import read_latency
from clustrs.evaluation.report.latex import latex
from clustrs.evaluation.report.markdown import markdown
from clustrs.evaluation.report.pdf import pdf_figures
from clustrs.evaluation.results import load_run


def write_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> Path:
    """Write report.html, .md, .csv, and .tex with its figures as PDF, into a run's folder; returns the page's path.

    The same results give the same bytes. The files replace those of an earlier report together: if anything fails, the
    earlier ones stay. compare_with: show the paper's numbers for this one of its models next to the run's, whatever
    model was run; by default they are shown if the run's model is one of the paper's.
    """
    folder = Path(folder)
    summary = Summary(load_run(folder, judge), compare_with)
    document = analyse(summary, read_latency(folder), read_examples(folder))
    contents = {
        "report.csv": csv_table(cell_means(summary)),
        "report.tex": latex(document),
        "report.md": markdown(document),
        "report.html": page(document),
    }
    texts = {name: content.encode(errors="replace") for name, content in contents.items()}
    replace_files(folder, {**texts, **pdf_figures(document)})
    return folder / "report.html"


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
