"""All commands, and the call of one."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from clustrs import __version__, validation
from clustrs.cli.commands import PARSE_ONLY, Root, app
from clustrs.plugins import install_hint

COMMANDS = (
    "ask",
    "compare",
    "web",
    "evaluate",
    "report",
    "exchange",
    "corrupt",
    "serve",
    "onnx_graph",
    "catalog",
    "doctor",
)
"""The modules that declare commands, in the order of the help."""
NAME = "clustrs"
EXAMPLES = """\
start here:
  clustrs samples                                               images to try, and questions to ask about them
  clustrs ask sample:photo-3 "What is at the top right?"
  clustrs compare sample:photo-3 "What is at the top right?" --corrupt gaussian:0.1
  clustrs eval --limit 24 --methods none clustrs fastervlm      measure accuracy, and write a report
  clustrs study stability                                       what noise does to the ranking of tokens

a model of yours:
  clustrs ask cat.jpg "What is this?" --model llava-hf/llava-1.5-7b-hf --keep 64

lists are given with spaces or commas, everywhere: --keep 16 50 is --keep 16,50
exit codes: 0 is success, 2 a mistake that is told in one line on standard error, 130 stopped with Ctrl-C
"""


def print_version(given: bool) -> None:
    if given:
        print(f"clustrs {__version__}")
        raise typer.Exit


@app.callback(cls=Root, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
def describe(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Fewer visual tokens for vision-language models, without training."""


def call(words: Sequence[str], parse_only: bool = False) -> Any:
    """Run the command that the words name; what it returns. A ValueError in one line says what is wrong with them."""
    for module in COMMANDS:
        import_module(f"clustrs.cli.{module}")
    root = typer.main.get_command(app)
    if f"_{NAME.upper()}_COMPLETE" in os.environ:
        root.main(prog_name=NAME)  # a shell asks for completions
    try:
        with root.make_context(NAME, list(words), obj=PARSE_ONLY if parse_only else None) as context:
            return root.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.TyperException as error:
        raise ValueError(usage_message(error)) from None


PACKAGES = {"study": "clustrs-paper"}
"""Commands of our other packages: the package to install where one is missing."""


def usage_message(error: typer.TyperException) -> str:
    """What is wrong with the words, and where help is."""
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    path = NAME if context is None else context.command_path
    option = getattr(error, "option_name", None)
    if context is not None and option and message.startswith("No such option"):
        known = [flag.lstrip("-") for param in context.command.get_params(context) for flag in param.opts]
        near = validation.nearest(option.lstrip("-"), known).replace("mean '", "mean '--")
        message = f"no such option: {option}{near}"
    if context is not None and message.startswith("No such command"):
        missing = next((name for name in PACKAGES if message.startswith(f"No such command '{name}'")), None)
        if missing is not None:
            package = PACKAGES[missing]
            return f"clustrs {missing} is in the package {package}: {install_hint('cli', package=package)}"
    return f"{message[:1].lower()}{message[1:]} (see {path} --help)"


def parse(words: Sequence[str]) -> Any:
    """The options that the words of a command stand for."""
    return call(words, parse_only=True)
