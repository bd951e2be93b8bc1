"""`clustrs study`: the paper's studies, on any model and images. Options follow from the fields of a study's config."""

import importlib
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import typer

from clustrs.cli import terminal, values
from clustrs.cli.arguments import list_flags, option
from clustrs.cli.commands import Command, Group, parameters
from clustrs.cli.evaluate import check_task_options
from clustrs.cli.outputs import check_folder

STUDIES = {
    "stability": "how the ranking by attention, and what each method keeps, change under noise",
    "manifold": "the tokens of an image in two dimensions, clean and noisy, and which of them each method keeps",
    "movement": "where the shrinkage moves the kept tokens",
    "overhead": "milliseconds of the vision tower, of scoring and of selection, for each method and budget",
    "ablation": "Clustering, C+H and ClustRS, over noise and budgets",
    "sensitivity": "tau, the clip interval, and the centroid",
    "variants": "switches of ClustRS beyond the paper, picked on one half of the images and compared on the other",
    "denoising": "how far noisy kept tokens are from the clean ones, before and after shrinkage",
    "levels": "what each level of a corruption costs the unpruned model, and which level costs a given share",
    "geometry": "how the tokens of a model lie: norms, distances, main direction, contrast of the attention",
}
group = typer.Typer(cls=Group, rich_help_panel="Measure")


@group.callback()
def describe() -> None:
    """Run one of the paper's studies.

    Each study draws a figure (PNG, SVG), writes its numbers (CSV), and says what they show.
    """


class StudyCommand(Command):
    """A study; its options are made when it is first used: that needs the study's module, and with it numpy."""

    def make_context(self, info_name: str | None, args: list[str], **extra: Any) -> Any:  # type: ignore[override]
        if self.options is None:
            self.options = study_options(self.name or "")
            self.run = run_study
            self.examples = epilog(self.options)
            shown = typer.Typer(add_completion=False)
            shown.command(self.name)(parameters(self.options))
            self.params = typer.main.get_command(shown).params
        return super().make_context(info_name, args, **extra)


for _name, _summary in STUDIES.items():
    group.command(_name, cls=StudyCommand, help=f"Shows {_summary}.")(lambda: None)


def epilog(options: Any) -> str:
    """Return the last lines of a study's help, on options that it has."""
    names = [one.name for one in fields(options)]
    lists = {"levels": "0.1 1", "keep": "16 50", "methods": "clustrs grid"}
    listed = [name for name in lists if f"--{name}" in list_flags(options)]
    lines = [f"{values.LIST_HELP}: --{n} {lists[n]} is --{n} {lists[n].replace(' ', ',')}" for n in listed[:1]]
    lines += ["Give images before the options."] if "images" in names else []
    return "".join(f"{line}\n" for line in lines)


def config_class(name: str) -> Any:
    return getattr(importlib.import_module(f"clustrs_paper.studies.{name}"), f"{name.capitalize()}Config")


@cache
def study_options(name: str) -> Any:
    """The options of a study: the settings of its config, and where its files go."""
    config = config_class(name)
    hints = get_type_hints(config)
    settings = [(one.name, hints[one.name], copy(one)) for one in fields(config) if "help" in one.metadata]
    output = option(Path("out") / name, "a folder for the files", "-o", "--output", metavar="FOLDER")
    return make_dataclass(
        f"{name.capitalize()}Options",
        [*settings, ("output", Path, output), ("study", str, field(default=name))],
        frozen=True,
        kw_only=True,
    )


def make_config(options: Any) -> Any:
    """The config that the options stand for."""
    config = config_class(options.study)
    given = {one.name: getattr(options, one.name) for one in fields(config) if "help" in one.metadata}
    if "task_options" in given:
        check_task_options(given["task_options"])
    if any(one.name == "folder" for one in fields(config)):
        given["folder"] = options.output / "run"
    return config(**given)


def run_study(options: Any) -> None:
    """Run a study, print what it shows, and save its files."""
    from clustrs.models.load import quiet_transformers

    config = make_config(options)
    check_folder("--output", options.output)
    quiet_transformers()
    if config.progress and terminal.is_rich(sys.stderr):
        terminal.say(f"loading {config.model} ...")
    result = importlib.import_module(f"clustrs_paper.studies.{options.study}").run(config)
    for part in result.parts:
        print(part.findings)
        for path in part.save(options.output):
            print(path)


def parse(words: Sequence[str]) -> Any:
    """The options of `clustrs study WORDS`."""
    from clustrs.cli.app import parse as parse_command

    return parse_command(["study", *words])
