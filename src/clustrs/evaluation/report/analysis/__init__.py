"""The numbers of a report, in a form that every renderer can show."""

from clustrs.evaluation.report.analysis.comparisons import paired, robustness
from clustrs.evaluation.report.analysis.conclusions import conclusions
from clustrs.evaluation.report.analysis.costs import costs
from clustrs.evaluation.report.analysis.overview import configuration, failures, overview
from clustrs.evaluation.report.analysis.scores import figures, kinds, scores
from clustrs.evaluation.report.blocks import Document, Example, Gallery, Section, Text
from clustrs.evaluation.report.latency import Latency
from clustrs.evaluation.report.summary import Summary

__all__ = ["Summary", "analyse"]


def analyse(summary: Summary, latency: Latency | None = None, examples: tuple[Example, ...] = ()) -> Document:
    """Work out all sections of a report. What was measured or drawn after the run, `latency` and `examples`, is shown
    where there is some."""
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


def disagreements(examples: tuple[Example, ...]) -> Section | None:
    """What two methods kept of the images of some questions that only one of them answered well."""
    if not examples:
        return None
    text = (
        "Some questions that one method answered well and another did not, drawn from either side in turn. Kept tokens "
        "are lit and outlined (dashed: others were merged into them), dropped ones dimmed."
    )
    return Section("Where methods disagree", (Text(text), Gallery(examples)))
