"""The `clustrs` command: words to calls, nothing else."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from clustrs.cli import ask
from clustrs.cli import evaluate as evaluating
from clustrs.cli import study as studying

TOP_EXAMPLES = """\
examples:
  clustrs samples                                               images to try, and questions to ask about them
  clustrs ask sample:scene-1 "How many objects are there?"
  clustrs compare sample:scene-1 "How many objects are there?" --corrupt gaussian:0.5
  clustrs methods                                               what there is, and with which parameters
  clustrs ask cat.jpg "What is this?" --model llava-hf/llava-1.5-7b-hf --keep 64
"""


OPTIONAL = ("transformers", "PIL", "matplotlib", "tqdm", "yaml", "ray")


class Parser(argparse.ArgumentParser):
    """Leaves it to `main` to say what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 2 a mistake of the user's, told in one line. A command may have codes of its own."""
    try:
        options = parser().parse_args(argv)
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


def complain(message: str) -> int:
    print("clustrs:", " ".join(message.split()), file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="clustrs",
        description="Fewer and cleaner visual tokens for vision-language models, without training.",
        epilog=TOP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=Version, nargs=0, help="print the version and stop")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ask.add_commands(commands)
    evaluating.add_commands(commands)
    studying.add_commands(commands)
    return top


class Version(argparse.Action):
    """Looks the version up only when it is asked for: that needs torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import clustrs

        print(f"clustrs {clustrs.__version__}")
        parser.exit()
