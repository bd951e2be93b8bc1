"""The `clustrs` command: parse arguments and dispatch to commands.

To add a command: a function with `Annotated` parameters in one of the modules of `base.MODULES`, decorated with
`@app.command("name", cls=Command, rich_help_panel=..., epilog=examples)`; `options.py` has the options that commands
share. Its docstring is the help text, its result the exit code; a ValueError is printed in one line with exit code 2.
Import inside the function what it needs: `--help` stays fast, mistyped arguments are refused before torch is loaded.

Other packages add commands by an entry point in the group `clustrs.commands`. Its name is the name of the command; its
value is a `typer.Typer` (a group of commands) or a function (one command). It is loaded when the command is called, and
when the commands are listed, so its module must not import anything heavy.
"""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from clustrs.plugins import EXTRAS, PluginWarning, install_hint
from clustrs.validation import source_date


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for an error that is described in one line."""
    words, show = sys.argv[1:] if argv is None else argv, warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):  # in one line, without the place in our code
            complain(str(message))
        else:
            show(message, category, *place, **more)

    try:
        for word in words:  # bytes that are not UTF-8 reach Python as lone surrogates, which no encoding can store
            if re.search("[\ud800-\udfff]", word):
                raise ValueError(f"argument {word!a} is not valid UTF-8 (rename the file)")
            if "\0" in word:
                raise ValueError(f"argument {word!a} contains a null character")
        source_date()
        from clustrs.cli.base import call

        with warnings.catch_warnings():
            warnings.showwarning = show_line
            return call(words) or 0
    except ValueError as error:
        return complain(str(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        return complain(f"{error.name} is not installed: {install_hint(EXTRAS[module])}")
    except KeyboardInterrupt:
        complain("stopped; what was recorded is kept, the same command resumes")
        return 130
    except BrokenPipeError:  # whoever read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a read-only folder, a name that is too long
        return complain(f"{error.filename or 'writing the output'}: {error.strerror or error}")
    except MemoryError:
        return complain("out of memory (try a smaller image, model or batch)")


def complain(message: str) -> int:
    """Print a mistake in one line, words of 300 characters and more abbreviated."""
    line = re.sub(r"(\S{100})\S{160,}(\S{40})", r"\1...\2", " ".join(message.split()))
    print("clustrs:", line, file=sys.stderr)
    return 2
