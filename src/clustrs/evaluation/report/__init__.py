"""The report on a run: an analysis, and one renderer each for HTML, Markdown, LaTeX, CSV and the terminal."""

from clustrs.evaluation.report.terminal import terminal_table
from clustrs.evaluation.report.write import write_report

__all__ = ["terminal_table", "write_report"]
