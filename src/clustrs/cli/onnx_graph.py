"""`clustrs export-onnx`: a vision encoder with its pruning, or a selection alone, as a graph for other runtimes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clustrs.cli.arguments import option, positional
from clustrs.cli.commands import command
from clustrs.cli.options import PRUNING
from clustrs.cli.outputs import check_file
from clustrs.cli.question import check_settings, make_method

EXAMPLES = """\
examples:
  clustrs export-onnx mini-llava --keep 16 -o vision-16.onnx            tower, scoring, projector and selection
  clustrs export-onnx --tokens 576 --dim 4096 --keep 16 -o select.onnx  the selection alone
"""


@dataclass(frozen=True, kw_only=True)
class ExportOnnxOptions:
    """The options of `clustrs export-onnx`."""

    model: tuple[str, ...] = positional("a folder, a Hugging Face id, or an embedded model", "[MODEL]")
    method: str = option("clustrs", "how to choose the tokens", metavar="METHOD")
    keep: tuple[int | float, ...] | None = option(None, "a count (16) or a fraction (0.25) (default: 16)", metavar="K")
    set: dict[str, Any] = option({}, "parameters of the method, see clustrs methods", metavar="KEY=VALUE")
    dtype: Literal["float32", "float16"] = option("float32", "type of the weights, the pixels and the features")
    tokens: int | None = option(None, "without a model: how many tokens an image has", metavar="N", panel=PRUNING)
    dim: int | None = option(None, "without a model: width of the tokens", metavar="D", panel=PRUNING)
    hidden_dim: int | None = option(
        None, "without a model: width of the hidden states, for vispruner", metavar="H", panel=PRUNING
    )
    output: Path = option(..., "the .onnx file; what is in it goes to a .json file beside it", "-o", metavar="FILE")


@command("export-onnx", panel="Deploy", examples=EXAMPLES)
def run_export_onnx(options: ExportOnnxOptions) -> None:
    """Write a vision encoder with its pruning as one ONNX graph.

    Pixels in, k visual tokens out; without a model, the selection alone.
    """
    check_settings(options.set)
    check_file("--output", options.output)
    alone = check_source(options)
    budgets = options.keep or (None,)
    if len(budgets) > 1:
        raise ValueError(f"--keep {' '.join(map(str, budgets))}: a graph has one budget, give one")
    method = make_method(options.method, budgets[0], options.set)
    if alone is not None:
        from clustrs.export import export_selection

        info = export_selection(method, options.output, **alone)
    else:
        from clustrs.export import export_onnx
        from clustrs.models.load import load_model, quiet_transformers

        quiet_transformers()
        model, _ = load_model(options.model[0])
        info = export_onnx(model.cpu().half() if options.dtype == "float16" else model.cpu(), method, options.output)
    print(
        f"{options.output}: {method.name} keeps {info.kept} of {info.tokens} tokens of {info.dim} numbers, {info.dtype}"
    )
    print(f"{options.output.with_suffix('.json')}: method, parameters, inputs, outputs, versions")


def check_source(options: ExportOnnxOptions) -> dict[str, Any] | None:
    """The sizes of a selection alone, or None for a model; one of the two must be given."""
    sizes = {"tokens": options.tokens, "dim": options.dim, "hidden_dim": options.hidden_dim}
    given = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is not None]
    if len(options.model) > 1:
        raise ValueError(f"{' '.join(options.model)}: give one model")
    if options.model and given:
        raise ValueError(f"{given[0]}: a model says this itself, leave it or the model out")
    if options.model:
        return None
    if options.tokens is None or options.dim is None:
        raise ValueError("give a model, or --tokens and --dim for the selection alone")
    if options.dtype != "float32":
        raise ValueError(f"--dtype {options.dtype}: the selection alone takes float32")
    return sizes
