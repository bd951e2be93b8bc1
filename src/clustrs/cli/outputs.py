"""Where output goes: checked before a model has run, and what is printed of a run."""

import os
from pathlib import Path


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written to a folder that may not exist yet."""
    try:
        existing = folder
        while not existing.exists():
            existing = existing.parent
        problem = "" if existing.is_dir() else f"{str(existing)!r} is not a folder"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{str(existing)!r} is read-only"
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise ValueError(f"{option} {str(folder)!r}: {problem}, give a folder that can be written to")


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written, as far as its name and its folder tell."""
    try:
        folder = path.is_dir()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r}: {error.strerror}, give another name") from None
    if folder:
        raise ValueError(f"{option} {str(path)!r}: this is a folder, give the name of a file")
    check_folder(option, path.parent)


def print_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> None:
    """Write the report of a run; print its table and where the report is."""
    from clustrs.cli import terminal
    from clustrs.evaluation.report import terminal_table, write_report
    from clustrs.evaluation.results import load_run

    run = load_run(folder, judge)
    print(terminal_table(run, compare_with, terminal.width()))
    print(f"\nreport: {write_report(folder, judge, compare_with)}")
