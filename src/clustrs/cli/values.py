"""Values on the command line: numbers within bounds, choices, and one grammar for lists.

A list is given with spaces or with commas: `--keep 16 50` is `--keep 16,50`. Commas inside brackets belong to a value,
as in `--methods "clustrs clip=[0.2,0.9]" none`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from clustrs import validation

LARGEST = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LIST_HELP = "several values may be separated by spaces or commas"
Reader = Callable[[str], Any]
"""Makes a value of a word; a ValueError says what would be accepted."""


def integer(low: int = 1, high: int = LARGEST) -> Reader:
    """A reader of integers from `low` to `high`."""

    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?\d{1,20}", text, re.ASCII) and low <= int(text) <= high:
            return int(text)
        raise ValueError(f"give an integer from {low} to {high}")

    return read


def seed(text: str) -> int:
    """The seed of what is random."""
    return int(integer(0, LARGEST_SEED)(text))


def number(text: str) -> float:
    """Any number that is finite."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not validation.is_number(value):
        raise ValueError("give a number, for example 0.5")
    return value


def keep(text: str) -> int | float:
    """A count or a fraction of the visual tokens."""
    try:
        value = int(text) if re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII) else float(text)
        validation.keep(value)
    except ValueError:
        raise ValueError("give a count (16) or a fraction (0.25)") from None
    return value


def choice(options: Sequence[str]) -> Reader:
    """A reader of one of `options`."""

    def read(text: str) -> str:
        if text not in options:
            listed = ", ".join(options)
            raise ValueError(f"give one of {listed}{validation.nearest(text, options)}")
        return text

    return read


def key_value(text: str) -> tuple[str, Any]:
    """KEY=VALUE; a value that is not JSON is a string."""
    return validation.key_value(text, "give KEY=VALUE, for example tau=2")


def split(values: Sequence[str]) -> list[str]:
    """The values of a list that was given with spaces, commas or both."""
    parts: list[str] = []
    for value in values:
        parts.append("")
        depth = 0
        for sign in value:
            depth += (sign == "[") - (sign == "]")
            if sign == "," and depth <= 0:
                parts.append("")
            else:
                parts[-1] += sign
    stripped = [part.strip() for part in parts]
    if "" in stripped:
        raise ValueError("a value is empty, give values separated by spaces or commas")
    return stripped


def split_methods(values: Sequence[str]) -> list[str]:
    """As `split`, for methods: commas inside the values of their parameters stay."""
    if not any("=" in value for value in values):
        return split(values)
    from clustrs.pruners import registry

    return [spec for value in values for spec in registry.split_methods(value)]


def several(option: str, given: Sequence[str], read: Reader) -> tuple[Any, ...]:
    """The values of a list, none of them twice."""
    words = read_value(option, given, split_methods if option == "--methods" else split)
    values = tuple(read_value(option, word, read) for word in words)
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{option} {' '.join(given)}: give each once")
    return values


def settings(option: str, given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; the last one wins where a key comes twice."""
    return dict(read_value(option, word, key_value) for word in given)


def read_value(option: str, given: Any, read: Callable[[Any], Any]) -> Any:
    """Read a value; the error names the option, the value, and what would be accepted."""
    try:
        return read(given)
    except ValueError as error:
        shown = given if isinstance(given, str) else " ".join(given)
        raise ValueError(f"{option} {shown}: {error}") from None
