"""Options for the words and the pixels that a model is given, shared by `eval`, `ask` and `compare`."""

import argparse
from typing import get_args

from clustrs.cli import values
from clustrs.options import ImagePadding, PromptTemplate

TEMPLATES, PADDINGS = get_args(PromptTemplate), get_args(ImagePadding)


def add_protocol_options(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options. Without a default they may come from a configuration file."""
    command.add_argument(
        "--prompt-template",
        action=values.One,
        read=values.choice(TEMPLATES),
        default=default,
        metavar="|".join(TEMPLATES),
        help="the model's own chat template, or LLaVA-1.5's with its system line (default: checkpoint)",
    )
    command.add_argument(
        "--image-padding",
        action=values.One,
        read=values.choice(PADDINGS),
        default=default,
        metavar="|".join(PADDINGS),
        help="as the model's processor has it, or padded to a square with the mean colour instead of cropped, as "
        "LLaVA-1.5 is evaluated (default: checkpoint)",
    )
