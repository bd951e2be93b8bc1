"""Options for the words and the pixels that a model is given, shared by `eval`, `ask` and `compare`."""

import argparse


def add_protocol_options(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options. Without a default they may come from a configuration file."""
    command.add_argument(
        "--prompt-template",
        default=default,
        help='"checkpoint", the model\'s own chat template, or "vicuna_v1", LLaVA-1.5\'s with its system line '
        "(default: checkpoint)",
    )
    command.add_argument(
        "--image-padding",
        default=default,
        help='"checkpoint", as the model\'s processor has it, or "square", pad with the mean colour instead of '
        "cropping, as LLaVA-1.5 is evaluated (default: checkpoint)",
    )
