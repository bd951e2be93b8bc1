"""`clustrs samples`, `methods`, `models`, `tasks` and `corruptions`: what there is, with other packages' additions."""

import argparse
import json
from dataclasses import MISSING, asdict, fields
from typing import Any

from clustrs.embedded import samples

TESTED = (
    "Tested on models of these classes with small random weights, with transformers 5.18 and 5.22; not on published "
    "checkpoints. For each, every method runs with clustrs ask, compare and eval, and its cost can be counted; studies "
    "were tested with one family per adapter."
)


def add_commands(commands: Any) -> None:
    listings: dict[str, tuple[Any, str, str]] = {
        "samples": (
            run_samples,
            "sample images",
            "List the images that come with the package, with questions for the drawn ones and the right answers. "
            "Give sample:NAME wherever an image is asked for.",
        ),
        "methods": (run_methods, "pruning methods", "List the methods and their parameters."),
        "models": (
            run_models,
            "families of models",
            "List the families of models that a method can be attached to: the model_type of their config, their class "
            "in transformers, and what was tested.",
        ),
        "tasks": (run_tasks, "tasks of clustrs eval", "List the tasks that clustrs eval --task takes."),
        "corruptions": (
            run_corruptions,
            "corruptions",
            "List the corruptions, the levels they are measured at, and those they accept. Give NAME:LEVEL to "
            "--corrupt.",
        ),
    }
    for name, (run, what, description) in listings.items():
        command = commands.add_parser(name, help=f"list the {what}", description=description)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)


def run_samples(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([{**asdict(sample), "path": str(sample.path)} for sample in samples()], indent=2))
        return
    for sample in samples():
        print(f"sample:{sample.name}  ({sample.licence})  {sample.path}")
        for question, answer in sample.questions:
            print(f"    {question}  {answer}")


def run_methods(options: argparse.Namespace) -> None:
    from clustrs.pruners import list_methods

    listed = [describe(name) for name in list_methods()]
    if options.json:
        print(json.dumps(listed, indent=2))
        return
    width = max(len(method["name"]) for method in listed)
    for method in listed:
        parameters = [
            key if value == "required" else f"{key}={json.dumps(value)}" for key, value in method["parameters"].items()
        ]
        print(f"{method['name']:{width}} {method['summary']}")
        print(f"{'':{width}} {', '.join(parameters)}")
        if method["paper"]:
            print(f"{'':{width}} {method['paper']}")


def describe(name: str) -> dict[str, Any]:
    """A method's name, what it does, its parameters with defaults ("required" if there is none), its paper."""
    from clustrs.pruners import method_class

    method = method_class(name)
    defaults = {f.name: "required" if f.default is MISSING else f.default for f in fields(method)}
    summary = (method.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, "parameters": defaults, "paper": method.paper}


def run_models(options: argparse.Namespace) -> None:
    from clustrs.models.adapters import list_model_types

    listed = [describe_family(model_type) for model_type in list_model_types()]
    if options.json:
        print(json.dumps(listed, indent=2))
        return
    columns = ("model_type", "class", "tokens_per_image", "tested")
    widths = {key: max(len(family[key]) for family in listed) for key in columns}
    for family in listed:
        print(" ".join(f"{family[key]:{widths[key]}}" for key in columns).rstrip())
    print(f"\n{TESTED}")


def describe_family(model_type: str) -> dict[str, str]:
    """A family's model type, its class in transformers ("" if transformers has none), what it is, what was tested."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    from clustrs.models.adapters import adapter_class

    adapter = adapter_class(model_type)
    summary = (adapter.__doc__ or "").strip().partition("\n")[0]
    return {
        "model_type": model_type,
        "class": CLASSES.get(model_type, ""),
        "summary": summary,
        "tokens_per_image": adapter.tokens_per_image,
        "tested": adapter.tested,
    }


def run_tasks(options: argparse.Namespace) -> None:
    from clustrs.evaluation.tasks import list_tasks

    names = list_tasks()
    print(json.dumps([{"name": name} for name in names], indent=2) if options.json else "\n".join(names))


def run_corruptions(options: argparse.Namespace) -> None:
    from clustrs.images.corruptions import corruption_rule, list_corruptions

    rules = {name: corruption_rule(name) for name in list_corruptions()}
    if options.json:
        listed = [
            {"name": name, "group": rule.group, "levels": list(rule.levels), "accepted": rule.accepted}
            for name, rule in rules.items()
        ]
        print(json.dumps(listed, indent=2))
        return
    width = max(map(len, rules))
    for name, rule in rules.items():
        print(f"{name:{width}} {' '.join(f'{level:g}' for level in rule.levels)}  ({rule.accepted})")
