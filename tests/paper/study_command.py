"""A study as the command line calls it, without writing its files."""

from pathlib import Path
from typing import Any

from clustrs_paper import command
from clustrs_paper.studies import StudyPart


def parts(study: Any, model: Path, *words: Any) -> tuple[StudyPart, ...]:
    """The parts of a study's result with these words on its command line."""
    name = study.__name__.rpartition(".")[2]
    given = [str(word) for word in words]
    options = command.parse([name, *given, *([] if "--model" in given else ["--model", str(model)]), "--quiet"])
    result: tuple[StudyPart, ...] = study.run(command.make_config(name, options)).parts
    return result
