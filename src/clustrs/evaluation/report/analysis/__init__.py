"""The numbers of a report, in a form that every renderer can show."""

from clustrs.evaluation.report.analysis.comparisons import paired, robustness
from clustrs.evaluation.report.analysis.overview import configuration, failures, overview
from clustrs.evaluation.report.analysis.scores import figures, kinds, scores
from clustrs.evaluation.report.analysis.summary import Summary
from clustrs.evaluation.report.blocks import Document

__all__ = ["Summary", "analyse"]


def analyse(summary: Summary) -> Document:
    """Work out all sections of a report."""
    config = summary.run.config
    sections = (
        overview(summary),
        scores(summary),
        figures(summary),
        paired(summary),
        robustness(summary),
        kinds(summary),
        failures(summary),
        configuration(summary),
    )
    title = f"{config['model']} on {config['task']}"
    return Document(title, tuple(section for section in sections if section is not None))
