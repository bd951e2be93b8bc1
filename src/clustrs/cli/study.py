"""`clustrs study`: the paper's studies, on any model and images."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from clustrs.embedded import DEFAULT

STUDIES = {
    "stability": "how the ranking by attention, and what each method keeps, move under noise",
    "manifold": "the tokens of an image in two dimensions, clean and noisy, and which of them each method keeps",
    "movement": "where the shrinkage moves the kept tokens",
    "overhead": "milliseconds of the vision tower, of scoring and of selection, for each method and budget",
    "ablation": "Clustering, C+H and ClustRS, over noise and budgets",
    "sensitivity": "tau, the clip interval, and the centroid",
    "denoising": "how far noisy kept tokens are from the clean ones, before and after shrinkage",
}


def add_commands(commands: Any) -> None:
    study = commands.add_parser(
        "study",
        help="the paper's studies",
        description="Each study draws a figure (PNG, SVG) and writes its numbers (CSV).",
    )
    names = study.add_subparsers(title="studies", metavar="STUDY", required=True)
    for name, summary in STUDIES.items():
        command = names.add_parser(name, help=summary, description=f"Shows {summary}.")
        command.add_argument(
            "--model", default=DEFAULT, help=f"a folder, a Hugging Face id, or an embedded model (default: {DEFAULT})"
        )
        command.add_argument(
            "-o",
            "--output",
            type=Path,
            default=Path("out") / name,
            help="a folder for the files (default: %(default)s)",
        )
        module = importlib.import_module(f"clustrs.studies.{name}")
        module.add_options(command)
        command.set_defaults(run=run_study, study=module)


def run_study(options: argparse.Namespace) -> None:
    from clustrs.cli.ask import quiet_transformers

    quiet_transformers()
    for outcome in options.study.study(options):
        print(outcome.reading)
        for path in outcome.save(options.output):
            print(path)
