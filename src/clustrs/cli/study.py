"""`clustrs study`: the paper's studies, on any model and images. Options follow from the fields of a study's config."""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clustrs.cli import values
from clustrs.cli.evaluate import check_task_options

STUDIES = {
    "stability": "how the ranking by attention, and what each method keeps, change under noise",
    "manifold": "the tokens of an image in two dimensions, clean and noisy, and which of them each method keeps",
    "movement": "where the shrinkage moves the kept tokens",
    "overhead": "milliseconds of the vision tower, of scoring and of selection, for each method and budget",
    "ablation": "Clustering, C+H and ClustRS, over noise and budgets",
    "sensitivity": "tau, the clip interval, and the centroid",
    "denoising": "how far noisy kept tokens are from the clean ones, before and after shrinkage",
}
EPILOG = f"""\
{values.LIST_HELP}: --levels 0.1 1 is --levels 0.1,1
Give images before the options. A study that is stopped can be started again.
"""


def add_commands(commands: Any) -> None:
    study = commands.add_parser(
        "study",
        help="the paper's studies",
        description="Each study draws a figure (PNG, SVG), writes its numbers (CSV), and says what they show.",
    )
    names = study.add_subparsers(title="studies", metavar="STUDY", required=True, parser_class=lazy(type(study)))
    for name, summary in STUDIES.items():
        names.add_parser(
            name,
            help=summary,
            description=f"Shows {summary}.",
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ).fill = filler(name)


def lazy(parser_class: Any) -> Any:
    """A parser that adds its options when it is first used: that needs the study's module, and with it numpy."""

    class LazyParser(parser_class):  # type: ignore[misc]
        fill: Callable[[argparse.ArgumentParser], None] | None = None

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            fill, self.fill = self.fill, None
            if fill is not None:
                fill(self)
            return super().parse_known_args(args, namespace)

    return LazyParser


def filler(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """What adds the options of a study to its parser."""

    def fill(command: argparse.ArgumentParser) -> None:
        config = config_class(name)
        hints = get_type_hints(config)
        for one in fields(config):
            if "help" in one.metadata:
                add_option(command, one, hints[one.name])
        command.add_argument(
            "-o",
            "--output",
            type=Path,
            default=Path("out") / name,
            help="a folder for the files (default: %(default)s)",
        )
        command.set_defaults(run=run_study, study=name)

    return fill


def config_class(name: str) -> Any:
    return getattr(importlib.import_module(f"clustrs.studies.{name}"), f"{name.capitalize()}Config")


def add_option(command: argparse.ArgumentParser, one: "Field[Any]", hint: Any) -> None:
    """The option for a field: its name or flag, its reader by its type, its help text with the default."""
    from clustrs.studies.settings import plain_hint

    about, kind = one.metadata, plain_hint(hint)
    flag = about.get("flag") or f"--{one.name.replace('_', '-')}"
    help_text = (about["help"] + default_text(one)).replace("%", "%%")
    shared: dict[str, Any] = {"dest": one.name, "default": None, "help": help_text}
    if kind is bool:
        command.add_argument(flag, action="store_const", const=not one.default, **shared)
        return
    shared["metavar"] = about.get("metavar") or one.name.upper()
    if one.name == "images":
        command.add_argument(**shared, nargs="*")
    elif get_origin(kind) is tuple:
        command.add_argument(flag, action=values.Several, read=reader(get_args(kind)[0], about), **shared)
    elif kind in (str, int, float) or kind == int | float or get_origin(kind) is Literal:
        command.add_argument(flag, action=values.One, read=reader(kind, about), **shared)
    else:
        command.add_argument(flag, action=values.Settings, **shared)


def default_text(one: "Field[Any]") -> str:
    """The default in words, unless the help text has it."""
    if isinstance(one.default, bool) or one.default in (None, MISSING, ()) or "(default:" in one.metadata["help"]:
        return ""
    shown = " ".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
    return f" (default: {shown})"


def reader(kind: Any, about: Mapping[str, Any]) -> values.Reader:
    """How a word is read as a value of some type."""
    if get_origin(kind) is Literal:
        return values.choice(get_args(kind))
    if kind is int:
        return values.integer(about["low"], about["high"])
    readers: dict[Any, values.Reader] = {str: str, float: values.number, int | float: values.keep}
    return readers[kind]


def make_config(name: str, options: argparse.Namespace) -> Any:
    """The config that the options stand for; what was not given has the config's default."""
    config = config_class(name)
    names = {one.name for one in fields(config)}
    given = {key: value for key, value in vars(options).items() if key in names and value not in (None, [])}
    if "folder" in names:
        check_task_options(given.get("task_options", {}))
        given["folder"] = options.output / "run"
    return config(**given)


def run_study(options: argparse.Namespace) -> None:
    from clustrs.cli.ask import check_folder
    from clustrs.models.load import quiet_transformers

    config = make_config(options.study, options)
    check_folder("--output", options.output)
    quiet_transformers()
    result = importlib.import_module(f"clustrs.studies.{options.study}").run(config)
    for part in result.parts:
        print(part.findings)
        for path in part.save(options.output):
            print(path)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of `clustrs study WORDS`."""
    from clustrs.cli import parser

    return parser().parse_args(["study", *words])
