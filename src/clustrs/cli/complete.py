"""What the shell offers when a value is completed: methods, corruptions, samples, tasks, models, choices."""

from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

Completion = list[tuple[str, str]]
"""Values with a word on each."""
Completer = Callable[[str], Completion]


def methods(incomplete: str) -> Completion:
    """Pruning methods, also as the last of several that commas separate."""
    from clustrs.cli.catalog import describe
    from clustrs.pruners import list_methods, list_presets

    before, comma, _ = incomplete.rpartition(",")
    return [(before + comma + name, describe(name)["summary"]) for name in (*list_methods(), *list_presets())]


def corruptions(incomplete: str) -> Completion:
    """Corruptions at the levels they are measured at, also as the last of several."""
    from clustrs.corruptions import corruption_rule, list_corruptions

    before, comma, _ = incomplete.rpartition(",")
    rules = {name: corruption_rule(name) for name in list_corruptions()}
    return [
        (f"{before}{comma}{name}:{level:g}", rule.accepted) for name, rule in rules.items() for level in rule.levels
    ]


def images(incomplete: str) -> Completion:
    """Sample images; files are the shell's own."""
    from clustrs.embedded import SAMPLE, samples

    return [(f"{SAMPLE}{sample.name}", sample.licence) for sample in samples()]


def models(incomplete: str) -> Completion:
    """The embedded models."""
    from clustrs.embedded import EMBEDDED

    return [(model.name, f"embedded, {model.knows}") for model in EMBEDDED]


def tasks(incomplete: str) -> Completion:
    """The tasks of `clustrs eval`."""
    from clustrs.evaluation.tasks import list_tasks

    return [(name, "") for name in list_tasks()]


def choices(kind: Any) -> Completer | None:
    """The values of a choice."""
    if get_origin(kind) is not Literal:
        return None
    listed = [(str(value), "") for value in get_args(kind)]

    def complete(incomplete: str) -> Completion:
        return listed

    return complete


BY_NAME: dict[str, Completer] = {
    "method": methods,
    "methods": methods,
    "corrupt": corruptions,
    "image": images,
    "images": images,
    "model": models,
    "task": tasks,
}
"""By the names of options."""
