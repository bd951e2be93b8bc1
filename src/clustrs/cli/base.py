"""The Typer application: commands, their help, plugins that add some, the call of one; and what commands print."""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from clustrs import __version__, validation
from clustrs.plugins import install_hint, leave_out, load_entry, plugin_entries
from clustrs.validation import ImagePadding, LoadOptions

NAME = "clustrs"
# they declare the commands, in the order of the help
MODULES = ("ask", "evaluate", "tune", "bench", "deploy", "catalog", "doctor")
PACKAGES = dict.fromkeys(("export-answers", "import-answers", "study"), "clustrs-paper")  # commands of other packages
LOADING = "Loading the model"
SEPARATOR = "\0"  # between the words of a list while Typer carries them as one; no argument contains it
SETTINGS = "KEY=VALUE..."  # metavar of options that add up when they are repeated
PARSE_ONLY = "parse only"  # as a context's object: return the parameters and run nothing
EXAMPLES = """\
start here:
  clustrs samples                       images to try, and questions about them
  clustrs ask sample:photo-3 "What is at the top right?"
  clustrs compare sample:photo-3 "What is at the top right?"
  clustrs eval --limit 24               measure accuracy, and write a report
  clustrs study stability               noise and the ranking of tokens

your own model:
  clustrs ask cat.jpg "What?" --model llava-hf/llava-1.5-7b-hf --keep 64
  clustrs tune --model llava-hf/llava-1.5-7b-hf --images photos
  clustrs bench --model llava-hf/llava-1.5-7b-hf --keep 64

separate the values of a list by spaces or commas: --keep 16 50 is --keep 16,50
exit codes: 0 success, 2 an error, described in one line on standard error,
130 stopped with Ctrl-C
"""

app = typer.Typer(add_completion=True, pretty_exceptions_enable=False)


class HelpMixin:
    """Panels and examples in the help: with boxes on a terminal, as plain sections anywhere else."""

    def format_options(self: Any, context: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            usual = "Arguments" if param.param_type_name == "argument" else "Options"
            if record := param.get_help_record(context):
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        for name in sorted(sections, key=lambda name: (name != "Arguments", name == LOADING)):  # few need the last
            with formatter.section(name):
                formatter.write_dl(sections[name])
        if isinstance(self, TyperGroup):
            self.format_commands(context, formatter)

    def format_help(self: Any, context: Any, formatter: Any) -> None:
        self.rich_markup_mode = "rich" if is_rich(sys.stdout) else None
        examples, self.epilog = self.epilog, None
        super().format_help(context, formatter)  # type: ignore[misc]
        if examples and self.rich_markup_mode:
            from rich.console import Console
            from rich.text import Text

            text = Text(examples, style="dim")
            text.highlight_regex(r"(?m)^  clustrs .*?(?=  |$)", "not dim cyan")
            Console().print(text, soft_wrap=True)
        elif examples:
            formatter.write(f"\n{examples}")


class Command(HelpMixin, TyperCommand):  # type: ignore[misc]
    """A command with lists: an option whose metavar ends in "..." takes all words up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        options = [param for param in self.params if isinstance(param, TyperOption) and not param.is_flag]
        valued = {flag: str(param.metavar or "") for param in options for flag in param.opts}
        values: dict[str, list[str]] = {}
        left, others = list(args), list[str]()
        while left and left[0] != "--":
            word = left.pop(0)
            flag, equals, value = word.partition("=")
            if flag not in valued:
                others.append(word)
                continue
            found, several = [value] if equals else [], valued[flag].endswith("...")
            while left and not equals and not re.match(r"-[^\d.]", left[0]) and (several or not found):
                found.append(left.pop(0))  # a negative number is a value
            if not found:
                raise ValueError(f"{flag} needs a value (see {NAME} {self.name} --help)")
            before = values.pop(flag, [])
            values[flag] = before + found if valued[flag] == SETTINGS else found
        joined = [word for flag, found in values.items() for word in (flag, SEPARATOR.join(found))]
        return super().parse_args(ctx, [*joined, *others, *left])

    def invoke(self, ctx: Any) -> Any:
        return given_options(ctx) if ctx.obj == PARSE_ONLY else super().invoke(ctx)


def given_options(ctx: typer.Context) -> dict[str, Any]:
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name: ctx.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


class Group(HelpMixin, TyperGroup):  # type: ignore[misc]
    """A group of commands; without a word it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class Root(Group):
    """The `clustrs` command: its own commands, and those of other packages by entry points in `clustrs.commands`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in self.plugins() if self.get_command(ctx, name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if entry := self.plugins().get(cmd_name):
            try:
                self.add_command(as_command(cmd_name, load_entry(entry)), cmd_name)
            except ValueError as error:
                leave_out(str(error))
        return super().get_command(ctx, cmd_name)

    def plugins(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in plugin_entries("clustrs.commands") if entry.name not in self.commands}


def as_command(name: str, value: Any) -> Any:
    """Make a command of an entry point's value: a `typer.Typer` or a function."""
    if isinstance(value, typer.Typer):
        value._add_completion = False
        found: Any = typer.main.get_group(value)
    elif callable(value):
        plugin = typer.Typer(add_completion=False)
        plugin.command(name, cls=Command)(value)
        found = typer.main.get_command(plugin)
    else:
        raise ValueError(f"the command {name} must be a typer.Typer or a function, got {value!r}")
    found.name = name
    found.rich_help_panel = getattr(found, "rich_help_panel", None) or "From other packages"
    return found


def print_version(given: bool) -> None:
    if given:
        print(f"{NAME} {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version and stop.")

PLUGIN = typer.Option(metavar="FILE.py", help="Load your own methods from a file; any command takes it, anywhere.")


@app.callback(cls=Root, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
def describe(version: Annotated[bool, VERSION] = False, plugin: Annotated[str, PLUGIN] = "") -> None:
    """Fewer visual tokens for vision-language models, without training."""


def call(words: Sequence[str], mode: str | None = None) -> Any:
    """Run the command that the words name and return its result; a ValueError in one line says what is wrong."""
    for module in MODULES:
        import_module(f"clustrs.cli.{module}")
    words, root = load_files(words, load=mode != PARSE_ONLY), typer.main.get_command(app)
    if f"_{NAME.upper()}_COMPLETE" in os.environ:
        root.main(prog_name=NAME)  # a shell asks for completions
    try:
        with root.make_context(NAME, list(words), obj=mode) as context:
            return root.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        raise ValueError(usage_message(error)) from None


def load_files(words: Sequence[str], load: bool = True) -> list[str]:
    """Run the files of --plugin, which register methods, and return the other words."""
    left, others = list(words), list[str]()
    while left and left[0] != "--":
        word = left.pop(0)
        flag, equals, file = word.partition("=")
        if flag != "--plugin":
            others.append(word)
            continue
        if not equals and not left:
            raise ValueError(f"--plugin needs a file (see {NAME} --help)")
        path = Path(file if equals else left.pop(0))
        if load:
            load_file(path)
    return others + left


def load_file(path: Path) -> None:
    """Import a file as a module; whatever it raises is an error of one line."""
    if not path.is_file():
        raise ValueError(f"--plugin must be a Python file, got {str(path)!r}: there is no such file")
    loader = SourceFileLoader(f"clustrs_plugin_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses look it up
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a file may do anything, `sys.exit` included
        raise ValueError(f"--plugin {str(path)!r} failed: {type(error).__name__}: {error}") from None


def parse(words: Sequence[str]) -> Any:
    """Return the parameters that the words of a command set, by name, and run nothing."""
    return call(words, PARSE_ONLY)


def usage_message(error: typer.TyperException) -> str:
    """Describe in one line what is wrong with the words, and where help is."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    message, given = error.format_message().rstrip("."), getattr(error, "message", "")
    if param is not None and given:  # the reader of a value says "must be ..."
        name = max(param.opts, key=len) if isinstance(param, TyperOption) else param.metavar or param.name
        return f"{name} {given}"
    if context is None:
        return f"{message[:1].lower()}{message[1:]} (see {NAME} --help)"
    if message.startswith("No such option"):
        option = getattr(error, "option_name", "")
        known = [flag.lstrip("-") for one in context.command.get_params(context) for flag in one.opts]
        near = validation.nearest(option.lstrip("-"), known).replace("mean '", "mean '--")
        message = f"no such option: {option}{near}"
    elif unknown := re.match("No such command '(.*?)'", message):
        if package := PACKAGES.get(unknown[1]):
            return f"{NAME} {unknown[1]} is in the package {package}: {install_hint('cli', package=package)}"
        message = f"{unknown[0]}{validation.nearest(unknown[1], context.command.list_commands(context))}"
    return f"{message[:1].lower()}{message[1:]} (see {context.command_path} --help)"


def is_rich(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> None:
    """Print a table of text: drawn on a terminal, in Markdown elsewhere, one line per row."""
    if not is_rich(sys.stdout):
        print(markdown_table(heads, rows, numbers))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, header_style="bold cyan", pad_edge=False, collapse_padding=True)
    for head in heads:
        table.add_column(head, overflow="fold", justify="right" if head in numbers else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a Markdown table, aligned but for its last column, which may be long; `numbers` are aligned right."""
    cells = [list(heads), *([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads) - 1)] + [len(heads[-1])]
    pad = [str.rjust if head in numbers else str.ljust for head in heads]
    rules = [p(":", w, "-") for p, w in zip(pad, widths, strict=True)]
    lines = [[p(cell, w) for p, cell, w in zip(pad, row, widths, strict=True)] for row in [cells[0], rules, *cells[1:]]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def status(text: str) -> AbstractContextManager[Any]:
    """Show on a terminal's standard error what is being done, for as long as it takes."""
    if not is_rich(sys.stderr):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"{text} ...")


def load_model(model: str, options: LoadOptions, padding: ImagePadding = "checkpoint") -> tuple[Any, Any]:
    """Load a model and its processor, without the messages of transformers."""
    from clustrs.models import load

    load.quiet_transformers()
    with status(f"loading {model}"):
        loaded, processor = load.load_model(model, options)
    return loaded, load.apply_image_padding(processor, padding)


def say(text: str) -> None:
    """Print a line to standard error, above any progress bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def check_folder(option: str, folder: Path) -> None:
    """Check that files can be written to a folder that may not exist yet."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        problem = "" if os.access(existing, os.W_OK | os.X_OK) else f"{str(existing)!r} is read-only"
        problem = problem if existing.is_dir() else f"{str(existing)!r} is not a folder"
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise ValueError(f"{option} must be a folder that can be written to, got {str(folder)!r} ({problem})")


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written, as far as its name and its folder tell."""
    try:
        problem = "a folder" if path.is_dir() else ""
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise ValueError(f"{option} must be the name of a file, got {str(path)!r} ({problem})")
    check_folder(option, path.parent)


def print_report(folder: Path, judge: str | None = None, compare_with: str | None = None) -> None:
    """Write the report of a run; print its table and where the report is."""
    from clustrs.evaluation.report import terminal_table, write_report
    from clustrs.evaluation.results import load_run

    print(terminal_table(load_run(folder, judge), compare_with, width()))
    print(f"\nreport: {write_report(folder, judge, compare_with)}")
