"""The `clustrs` command: words to calls, nothing else.

Building the parser imports nothing heavy: what a command needs is imported when it runs.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from clustrs import __version__
from clustrs.cli import ask, catalog, evaluate, study

EPILOG = """\
start here:
  clustrs samples                                               images to try, and questions to ask about them
  clustrs ask sample:scene-1 "How many objects are there?"
  clustrs compare sample:scene-1 "How many objects are there?" --corrupt gaussian:0.5
  clustrs eval --methods none clustrs --corrupt clean gaussian  measure accuracy under noise, and write a report
  clustrs study stability                                       what noise does to the ranking of tokens

what there is, with other packages' additions:
  clustrs methods                                               pruning methods and their parameters
  clustrs models                                                families of models that methods attach to
  clustrs corruptions                                           ways to corrupt an image, and their levels
  clustrs tasks                                                 tasks for clustrs eval

a model of yours:
  clustrs ask cat.jpg "What is this?" --model llava-hf/llava-1.5-7b-hf --keep 64

lists are given with spaces or commas, everywhere: --keep 16 50 is --keep 16,50
exit codes: 0 is success, 2 a mistake that is told in one line on standard error, 130 stopped with Ctrl-C
"""
OPTIONAL = ("transformers", "PIL", "matplotlib", "tqdm", "yaml", "ray")
LONGEST_WORD = 300
"""Longer words (paths, names, numbers) are abbreviated in error messages."""


class Parser(argparse.ArgumentParser):
    """A parser that leaves it to `main` to say what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 2 a mistake of the user's, told in one line. A command may have codes of its own."""
    words = sys.argv[1:] if argv is None else argv
    try:
        check_words(words)
        options = parser().parse_args(words)
        return options.run(options) or 0
    except ValueError as error:
        return complain(str(error))
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] not in OPTIONAL:
            raise
        extra = "ray" if error.name.startswith("ray") else "cli"
        return complain(f"{error.name} is not installed: pip install 'clustrs[{extra}]'")
    except KeyboardInterrupt:
        complain("stopped; what was recorded is kept, the same command resumes")
        return 130
    except BrokenPipeError:  # whoever read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a read-only folder, a name that is too long
        return complain(f"{error.filename or 'writing the output'}: {error.strerror or error}")
    except MemoryError:
        return complain("out of memory: give a smaller image, model or batch")


def check_words(words: Sequence[str]) -> None:
    """Refuse words that no encoding can store: bytes that are not UTF-8 reach Python as lone surrogates."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"argument {word!a} is not valid UTF-8: give it in UTF-8, or rename the file") from None
        if "\0" in word:
            raise ValueError(f"argument {word!a} has a null character in it: leave it out")


def complain(message: str) -> int:
    """Print a mistake in one line, very long words abbreviated."""

    def abbreviated(word: re.Match[str]) -> str:
        return f"{word[0][:100]}...{word[0][-40:]}"

    line = re.sub(rf"\S{{{LONGEST_WORD},}}", abbreviated, " ".join(message.split()))
    print("clustrs:", line, file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="clustrs",
        description="Fewer and cleaner visual tokens for vision-language models, without training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"clustrs {__version__}", help="print the version and stop")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (ask, evaluate, study, catalog):
        module.add_commands(commands)
    return top
