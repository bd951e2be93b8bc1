"""`clustrs samples`, `methods`, `models`, `tasks` and `corruptions`: what there is, with other packages' additions."""

from dataclasses import MISSING, asdict, fields
from json import dumps
from typing import Annotated, Any

from clustrs.cli import base
from clustrs.cli.base import Command, app
from clustrs.cli.options import AsJson, flag
from clustrs.embedded import DEFAULT, EMBEDDED, INSTALL, SAMPLE, data_package, samples

PANEL = "What there is"
TESTED = (
    "Tested on models of these classes with small random weights, with transformers 5.18 and 5.23; not on published "
    "checkpoints. For each, every method runs with clustrs ask, compare and eval, and its cost can be counted; studies "
    "were tested with one family per adapter."
)
MATRIX = {
    "model_type": "family",
    "class": "transformers",
    "vllm": "vLLM",
    "onnx": "ONNX",
    "video": "video",
    "published_weights": "tested with published weights",
    "gpu": "tested on a GPU",
}
"""Columns of the support matrix: keys of a row, and their heads."""


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
def list_methods_command(json: AsJson = False) -> None:
    """List the pruning methods and their parameters."""
    from clustrs.pruners import list_methods, list_presets

    listed = [describe_method(name) for name in list_methods()]
    if json:
        base.print_json(listed)
        return
    rows = []
    for method in listed:
        parameters = [
            key if value == "required" else f"{key}={dumps(value)}" for key, value in method["parameters"].items()
        ]
        rows.append([method["name"], method["summary"], ", ".join(parameters), method["paper"] or ""])
    base.print_table(["method", "what it keeps", "parameters", "paper"], rows)
    print("\nPresets, each a method with some of its parameters:")
    for name in list_presets():
        print(f"  {name}: {describe_method(name)['summary']}")


def describe_method(name: str) -> dict[str, Any]:
    """A method's name, what it does, its parameters with defaults ("required" if there is none), its paper."""
    from clustrs.pruners import list_presets, method_class

    method = method_class(name)
    if name in list_presets():
        preset = {key: value for key, value in list_presets()[name].items() if key != "name"}
        given = " ".join(f"{key}={dumps(value, separators=(',', ':'))}" for key, value in preset.items())
        return {"name": name, "summary": f"{method.name} {given}", "parameters": preset, "paper": method.paper}
    defaults = {f.name: "required" if f.default is MISSING else f.default for f in fields(method)}
    summary = (method.__doc__ or "").strip().partition("\n")[0]
    return {"name": name, "summary": summary, "parameters": defaults, "paper": method.paper}


@app.command("models", cls=Command, rich_help_panel=PANEL)
def list_models_command(
    matrix: Annotated[bool, flag("only the table of families and where they run", "--matrix")] = False,
    json: AsJson = False,
) -> None:
    """List the families of models that a method can be attached to, and the embedded models.

    Prints the model_type of their config, their class in transformers, and what was tested; where each family runs
    (--matrix prints this table alone); then the models that clustrs-models brings.
    """
    from clustrs.models.adapters import list_model_types

    listed = [describe_family(model_type) for model_type in list_model_types()]
    if json:
        base.print_json(listed)
        return
    support = [[row[key] for key in MATRIX] for row in listed]
    if matrix:
        base.print_table(list(MATRIX.values()), support)
        return
    columns = ["model_type", "class", "tokens_per_image", "tested"]
    base.print_table(columns, [[family[key] for key in columns] for family in listed])
    print(f"\n{TESTED}\n")
    base.print_table(list(MATRIX.values()), support)
    print()
    rows = [[model.name, model.family, model.knows, model.task, model.question] for model in EMBEDDED]
    base.print_table(["embedded model", "model_type", "knows", "task", "a question it understands"], rows)
    missing = "" if data_package() else f"; their weights are not installed: {INSTALL}"
    print(f"\nThe default is {DEFAULT}{missing}")


def describe_family(model_type: str) -> dict[str, Any]:
    """Describe a family: its model type, its class in transformers ("" if there is none), where it runs, what was
    tested, and the embedded models of that family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    from clustrs.export.vision import ENCODERS
    from clustrs.models.adapters import adapter_class
    from clustrs.serving.plugin import ARCHITECTURES

    adapter = adapter_class(model_type)
    summary = (adapter.__doc__ or "").strip().partition("\n")[0]
    name = CLASSES.get(model_type, "")
    return {
        "model_type": model_type,
        "class": name,
        "summary": summary,
        "tokens_per_image": adapter.tokens_per_image,
        "tested": adapter.tested,
        "vllm": "yes" if name in ARCHITECTURES else "no",
        "onnx": "yes" if model_type in ENCODERS else "no",
        "video": adapter.takes_video,
        "published_weights": adapter.published_weights,
        "gpu": adapter.gpu,
        "embedded": [asdict(model) for model in EMBEDDED if model.family == model_type],
    }


def support_matrix() -> str:
    """Return the support matrix in Markdown: one row per family, from what adapters, serving and export declare."""
    from clustrs.models.adapters import list_model_types

    rows = [describe_family(model_type) for model_type in list_model_types()]
    return base.markdown_table(list(MATRIX.values()), [[row[key] for key in MATRIX] for row in rows])


@app.command("tasks", cls=Command, rich_help_panel=PANEL)
def list_tasks_command(json: AsJson = False) -> None:
    """List the tasks that clustrs eval --task takes."""
    from clustrs.evaluation.tasks import describe_task, list_tasks

    listed = {name: describe_task(name) for name in list_tasks()}
    if json:
        base.print_json([{"name": name, **asdict(task)} for name, task in listed.items()])
        return
    rows = [[name, task.measures, task.scoring, task.data] for name, task in listed.items()]
    base.print_table(["task", "questions", "score", "data"], rows)


@app.command("corruptions", cls=Command, rich_help_panel=PANEL)
def list_corruptions_command(json: AsJson = False) -> None:
    """List the corruptions, the levels they are measured at, and those they accept.

    Give NAME:LEVEL to --corrupt.
    """
    from clustrs.corruptions import corruption_rule, list_corruptions, missing_reason

    rules = {name: corruption_rule(name) for name in list_corruptions()}
    if json:
        base.print_json(
            [
                {"name": name, "group": rule.group, "levels": list(rule.levels), "accepted": rule.accepted}
                for name, rule in rules.items()
            ]
        )
        return
    rows = [[name, " ".join(f"{level:g}" for level in rule.levels), rule.accepted] for name, rule in rules.items()]
    base.print_table(["corruption", "levels", "accepted"], rows)
    for name in list_corruptions(usable=False):
        print(end=f"not available: {missing_reason(name)}\n" if name not in rules else "")
