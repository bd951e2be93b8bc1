"""The options of a command are the fields of a dataclass: from fields to Typer's parameters, and from words to fields.

The type of a field says how its words are read: `bool` is a flag, `tuple[...]` a list, a mapping takes KEY=VALUE. The
configs of studies declare their settings in the same form, so their options follow from them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from clustrs.cli import complete, values
from clustrs.validation import plain_hint

Options = TypeVar("Options")
SEPARATOR = "\0"
"""Between the words of a list while Typer carries them as one; no word of a user's has it (see `check_words`)."""


def option(
    default: Any,
    help: str,
    *flags: str,
    panel: str | None = None,
    metavar: str | None = None,
    low: int = 1,
    high: int = values.LARGEST,
) -> Any:
    """A field that is an option, `--its-name` unless there are `flags`; with `...` as its default it is required."""
    about = {"help": help, "flags": flags, "panel": panel, "metavar": metavar, "low": low, "high": high}
    if default is ...:
        return field(metadata=about)
    return field(default_factory=dict, metadata=about) if default == {} else field(default=default, metadata=about)


def positional(help: str, metavar: str) -> Any:
    """A field that is given by its position; one of a tuple's type takes any number of words."""
    return field(metadata={"help": help, "metavar": metavar, "positional": True})


def everything_else(help: str, metavar: str = "ARGS") -> Any:
    """A field (a tuple of strings) for all words that the command does not know, to be passed on in their order."""
    return field(metadata={"help": help, "metavar": metavar, "positional": True, "passed_on": True})


def is_positional(one: "Field[Any]") -> bool:
    return bool(one.metadata.get("positional"))


def flags_of(one: "Field[Any]") -> tuple[str, ...]:
    """The spellings of an option, the long one last."""
    named = one.metadata.get("flags") or (one.metadata.get("flag") or f"--{one.name.replace('_', '-')}",)
    return tuple(named)


def given_fields(options: type) -> list[tuple["Field[Any]", Any]]:
    """The fields that can be given on the command line, with their types."""
    hints = get_type_hints(options)
    return [(one, plain_hint(hints[one.name])) for one in fields(options) if "help" in one.metadata]


def is_settings(kind: Any) -> bool:
    return get_origin(kind) in (dict, Mapping)


def list_flags(options: type) -> set[str]:
    """The spellings of options that take several words."""
    listed = [one for one, kind in given_fields(options) if get_origin(kind) is tuple or is_settings(kind)]
    return {flag for one in listed if not is_positional(one) for flag in flags_of(one)}


def value_flags(options: type) -> set[str]:
    """The spellings of options that take a value."""
    return {flag for one, kind in given_fields(options) if kind is not bool for flag in flags_of(one)}


def signature(options: type) -> inspect.Signature:
    """What Typer needs to know: the fields as keyword parameters that hold words."""
    return inspect.Signature([parameter(one, kind) for one, kind in given_fields(options)])


def parameter(one: "Field[Any]", kind: Any) -> inspect.Parameter:
    """The Typer parameter of a field."""
    about = one.metadata
    shared: dict[str, Any] = {
        "help": about["help"] + default_text(one),
        "metavar": about.get("metavar") or metavar(one.name, kind),
        "show_default": False,
        "autocompletion": complete.BY_NAME.get(one.name) or complete.choices(kind),
    }
    required = one.default is MISSING and one.default_factory is MISSING and get_origin(kind) is not tuple
    annotation: Any
    if is_positional(one):
        annotation = Annotated[list[str] if get_origin(kind) is tuple else str, typer.Argument(**shared)]
    else:
        annotation = option_annotation(one, kind, shared)
    default = inspect.Parameter.empty if required else False if kind is bool else None
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_annotation(one: "Field[Any]", kind: Any, shared: dict[str, Any]) -> Any:
    """The type of an option, as Typer has it: everything but a flag is read as words."""
    from clustrs.cli.options import PANELS

    panel = one.metadata.get("panel") or PANELS.get(one.name)
    if kind is bool:
        shared = {name: value for name, value in shared.items() if name == "help"}
        return Annotated[bool, typer.Option(*flags_of(one), **shared, rich_help_panel=panel, show_default=False)]
    kind_of_words = list[str] if is_settings(kind) else str
    return Annotated[kind_of_words, typer.Option(*flags_of(one), **shared, rich_help_panel=panel)]


def metavar(name: str, kind: Any) -> str:
    """What stands for a value in the help: the choices, or the option's name."""
    return "|".join(map(str, get_args(kind))) if get_origin(kind) is Literal else name.upper()


def default_text(one: "Field[Any]") -> str:
    """The default in words, unless the help text has it."""
    silent = isinstance(one.default, bool) or one.default in (None, MISSING, ())
    if silent or "(default:" in one.metadata["help"]:
        return ""
    shown = " ".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
    return f" (default: {shown})"


def reader(kind: Any, about: Mapping[str, Any]) -> values.Reader:
    """How a word is read as a value of some type."""
    if get_origin(kind) is Literal:
        return values.choice(get_args(kind))
    if kind is int:
        return values.integer(about["low"], about["high"])
    readers: dict[Any, values.Reader] = {str: str, Path: Path, float: values.number, int | float: values.keep}
    return readers[kind]


def read(options: Callable[..., Options], given: Mapping[str, Any]) -> Options:
    """The options that words stand for; what was not given has its default."""
    found = {}
    for one, kind in given_fields(options):  # type: ignore[arg-type]
        words = given.get(one.name)
        if words not in (None, False, [], ()):
            found[one.name] = read_field(one, kind, words)
        elif is_positional(one) and get_origin(kind) is tuple:
            found[one.name] = ()
    return options(**found)


def read_field(one: "Field[Any]", kind: Any, words: Any) -> Any:
    """The value of a field."""
    name = flags_of(one)[-1]
    if kind is bool:
        return not one.default
    if is_positional(one):
        return tuple(words) if get_origin(kind) is tuple else reader(kind, one.metadata)(words)
    if is_settings(kind):
        return values.settings(name, [word for joined in words for word in joined.split(SEPARATOR)])
    if get_origin(kind) is tuple:
        return values.several(name, words.split(SEPARATOR), reader(get_args(kind)[0], one.metadata))
    return values.read_value(name, words, reader(kind, one.metadata))


def join_lists(words: Sequence[str], lists: set[str], valued: set[str]) -> list[str]:
    """The words of a command with those of each list joined: `--keep 16 50` becomes `--keep` and one word.

    A list ends at the next option; negative numbers belong to it.
    """
    joined: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*joined, word, *left]
        flag, equals, value = word.partition("=")
        if flag not in valued:
            joined.append(word)
            continue
        found = [value] if equals else []
        while left and not equals and not looks_like_option(left[0]) and (flag in lists or not found):
            found.append(left.pop(0))
        if not found:
            raise ValueError(f"{flag}: a value is missing, give one after it")
        joined += [flag, SEPARATOR.join(found)]
    return joined


def looks_like_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit() and not word.startswith("-.")
