"""What a run found, for people: a page, Markdown, LaTeX, CSV, and a table for the terminal."""

from clustrs.evaluation.report.terminal import terminal_table
from clustrs.evaluation.report.writing import write_report

__all__ = ["terminal_table", "write_report"]
