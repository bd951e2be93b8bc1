"""Lists on the command line: values with commas between them."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def read_list(option: str, text: str, read: Callable[[str], T]) -> list[T]:
    """Every value as `read` understands it; none may come twice."""
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise ValueError(f"{option} {text}: give values with commas between them")
    values = [read(word) for word in words]
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{option} {text}: give each once")
    return values


def read_keeps(text: str) -> list[int | float]:
    """Budgets, counts or fractions; whether a method can have them is for the method to say."""
    from clustrs import validation

    return read_list("--keep", text, validation.read_keep)


def read_counts(option: str, text: str, low: int = 1) -> list[int]:
    """Integers of at least `low`."""

    def read(word: str) -> int:
        if not word.isdecimal() or int(word) < low:
            raise ValueError(f"{option} {word}: give integers of at least {low}, with commas between them")
        return int(word)

    return read_list(option, text, read)
