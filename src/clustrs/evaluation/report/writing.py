"""From a run's folder to its report."""

from pathlib import Path

from clustrs.evaluation.report.blocks import Document
from clustrs.evaluation.report.comparisons import paired, robustness
from clustrs.evaluation.report.html import page
from clustrs.evaluation.report.latex import latex
from clustrs.evaluation.report.markdown import markdown
from clustrs.evaluation.report.overview import configuration, failures, overview
from clustrs.evaluation.report.scores import figures, kinds, scores
from clustrs.evaluation.report.summary import Summary
from clustrs.evaluation.report.tidy import tidy
from clustrs.evaluation.results import load_run


def write_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> Path:
    """Write report.html, .md, .tex and .csv into a run's folder; gives the path of the page.

    The same record gives the same bytes. compare_with: show the paper's numbers for this one of its models beside the
    run's, whatever model was run; by default they are shown if the run's model is one of the paper's.
    """
    summary = Summary(load_run(folder, judge), compare_with)
    document = _document(summary)
    contents = {
        "report.csv": tidy(summary),
        "report.tex": latex(document),
        "report.md": markdown(document),
        "report.html": page(document),
    }
    for name, content in contents.items():
        try:
            (folder / name).write_bytes(content.encode(errors="replace"))
        except OSError as error:
            raise ValueError(f"{str(folder / name)!r} could not be written: {error.strerror}") from error
    return folder / "report.html"


def _document(summary: Summary) -> Document:
    config = summary.run.config
    parts = (
        overview(summary),
        scores(summary),
        figures(summary),
        paired(summary),
        robustness(summary),
        kinds(summary),
        failures(summary),
        configuration(summary),
    )
    return Document(f"{config['model']} on {config['task']}", tuple(part for part in parts if part is not None))
