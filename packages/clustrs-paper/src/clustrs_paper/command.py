"""`clustrs study`: the paper's studies, on any model and images. Options follow from the fields of a study's config."""

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from clustrs.cli import options as o
from clustrs.cli import terminal
from clustrs.cli.base import SETTINGS, Command, Group, given_options
from clustrs.cli.base import parse as parse_command
from clustrs.cli.evaluate import check_task_options
from clustrs.validation import plain_hint

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
        if not self.params:
            name = str(self.name)
            shown = typer.Typer(add_completion=False)
            shown.command(name)(study_function(name))
            made = typer.main.get_command(shown)
            self.params, self.callback = made.params, made.callback
            self.examples = epilog(config_class(name))
        return super().make_context(info_name, args, **extra)


for _name, _summary in STUDIES.items():
    group.command(_name, cls=StudyCommand, help=f"Shows {_summary}.")(lambda: None)


def epilog(config: Any) -> str:
    """Return the last lines of a study's help, on options that it has."""
    hints, names = get_type_hints(config), [one.name for one in fields(config)]
    lists = {"levels": "0.1 1", "keep": "16 50", "methods": "clustrs grid"}
    listed = [name for name in lists if name in names and get_origin(plain_hint(hints[name])) is tuple]
    lines = [f"{LIST_HELP}: --{n} {lists[n]} is --{n} {lists[n].replace(' ', ',')}" for n in listed[:1]]
    lines += ["Images come before the options."] if "images" in names else []
    return "".join(f"{line}\n" for line in lines)


def config_class(name: str) -> Any:
    """Return the config of a study."""
    return getattr(importlib.import_module(f"clustrs_paper.studies.{name}"), f"{name.capitalize()}Config")


def study_function(name: str) -> Any:
    """Return the function of a study's command; its parameters are the settings of the config, and the output."""

    def run(ctx: typer.Context, **_: Any) -> None:
        run_study(name, given_options(ctx))

    config = config_class(name)
    hints = get_type_hints(config)
    annotations: dict[str, Any] = {"ctx": typer.Context}
    annotations |= {
        one.name: SHARED.get(one.name) or annotation(one, plain_hint(hints[one.name]))
        for one in fields(config)
        if "help" in one.metadata or one.name in SHARED
    }
    help = f"a folder for the files (default: {Path('out') / name})"
    annotations["output"] = Annotated[Path | None, o.option(help, "FOLDER", None, "-o", "--output")]
    parameters = []
    for key, hint in annotations.items():
        default: Any = False if get_args(hint)[:1] == (bool,) else None
        default = inspect.Parameter.empty if key == "ctx" else default
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


SHARED: dict[str, Any] = {
    "device": o.Device,
    "dtype": o.DtypeOption,
    "attn": o.Attn,
    "load_in_8bit": o.Load8Bit,
    "load_in_4bit": o.Load4Bit,
    "device_map": o.DeviceMap,
}
"""Options of every command that loads a model."""
PANELS = {
    **dict.fromkeys(("model", "new_tokens", "prompt_template", "image_padding"), o.MODEL),
    **dict.fromkeys(("methods", "keep", "scope", "crops", "positions"), o.PRUNING),
    **dict.fromkeys(("corruption", "corruptions", "levels", "seed", "seeds", "count"), o.IMAGES),
    **dict.fromkeys(("task", "data", "task_options", "limit", "batch_size"), o.QUESTIONS),
}
COMPLETERS = {
    "model": o.complete_models,
    "task": o.complete_tasks,
    "methods": o.complete_methods,
    "corruption": o.complete_corruptions,
}
LIST_HELP = "several values may be separated by spaces or commas"


def annotation(one: "Field[Any]", kind: Any) -> Any:
    """Return the option of a setting."""
    about, flags = one.metadata, [one.metadata["flag"]] if one.metadata.get("flag") else []
    panel, complete, metavar = PANELS.get(one.name), COMPLETERS.get(one.name), about.get("metavar") or one.name.upper()
    help = about["help"] + default_text(one)
    if kind is bool:
        return Annotated[bool, o.flag(help, flags[0], panel)]
    if about.get("positional"):
        argument = typer.Argument(metavar=f"{metavar}...", help=help, autocompletion=o.complete_images)
        return Annotated[list[str] | None, argument]
    if get_origin(kind) is Literal:
        return Annotated[str | None, o.option(help, None, panel, *flags, choices=kind)]
    read: o.Reader | None
    if get_origin(kind) is Mapping:
        metavar, read = SETTINGS, o.read_settings
    elif get_origin(kind) is tuple:
        split = o.split_methods if one.name == "methods" else o.split
        metavar, read = f"{metavar}...", o.several(reader(get_args(kind)[0], about) or str, split)
    else:
        read = reader(kind, about)
    return Annotated[str | None, o.option(help, metavar, panel, *flags, read=read, complete=complete)]


def reader(kind: Any, about: Mapping[str, Any]) -> o.Reader | None:
    """Return the reader of a type; None for text."""
    if kind is int:
        return o.integer(about["low"], about["high"])
    if get_origin(kind) is Literal:
        return o.one_of(kind)
    readers: dict[Any, o.Reader] = {float: o.number, int | float: o.read_keep, Path: Path}
    return readers.get(kind)


def default_text(one: "Field[Any]") -> str:
    """Return the default in words, unless the help text has it."""
    silent = isinstance(one.default, bool) or one.default in (None, MISSING, ())
    if silent or "(default:" in one.metadata["help"]:
        return ""
    shown = " ".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
    return f" (default: {shown})"


def make_config(name: str, given: Mapping[str, Any]) -> Any:
    """Return the config that the options of a study stand for."""
    config = config_class(name)
    known = {one.name: one.default for one in fields(config)}
    chosen = {key: value for key, value in given.items() if key in known}
    chosen |= {key: not known[key] for key, value in chosen.items() if isinstance(value, bool)}  # a flag was given
    check_task_options(chosen.get("task_options") or {})
    if "folder" in known:
        chosen["folder"] = given.get("output", Path("out") / name) / "run"
    return config(**chosen)


def run_study(name: str, given: Mapping[str, Any]) -> None:
    """Run a study, print what it shows, and save its files."""
    from clustrs.models.load import quiet_transformers

    config = make_config(name, given)
    output = given.get("output", Path("out") / name)
    terminal.check_folder("--output", output)
    quiet_transformers()
    if config.progress and terminal.is_rich(sys.stderr):
        terminal.say(f"loading {config.model} ...")
    result = importlib.import_module(f"clustrs_paper.studies.{name}").run(config)
    for part in result.parts:
        print(part.findings)
        for path in part.save(output):
            print(path)


def parse(words: Sequence[str]) -> Any:
    """Return the options that `clustrs study WORDS` sets."""
    return parse_command(["study", *words])
