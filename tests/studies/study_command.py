"""A study as the command line calls it."""

import argparse
from pathlib import Path
from typing import Any

from clustrs.studies.outcome import Outcome


def outcomes(study: Any, model: Path, *words: Any) -> list[Outcome]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(model))
    parser.add_argument("--output", type=Path)
    study.add_options(parser)
    found: list[Outcome] = study.study(parser.parse_args([str(word) for word in words]))
    return found
