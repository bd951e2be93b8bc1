"""Write ONNX graphs, each with a JSON file that describes it."""

import json
import logging
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from clustrs import __version__
from clustrs.export.vision import PrunedVision, TokenSelection, trace
from clustrs.plugins import install_hint
from clustrs.pruners import Pruner

OPSET = 18
OUTPUTS = ("image_features", "indices", "sizes")  # the first, like `pixel_values`, is onnxruntime-genai's default
FOLDED_BYTES = 2**24  # larger constants are not computed when the file is written: the draws of the seeding, above all
LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # they remark on unused operators, and on folding


@dataclass(frozen=True)
class GraphInfo:
    """Contents of the JSON file beside a graph that keeps k (`kept`) of N `tokens`; "batch" is any number of images."""

    method: dict[str, Any]
    tokens: int
    kept: int
    dim: int
    dtype: str
    inputs: dict[str, list[str | int]]
    outputs: dict[str, list[str | int]]
    model_type: str | None
    opset: int
    versions: dict[str, str]


def export_onnx(model: Any, method: Pruner, path: str | Path) -> GraphInfo:
    """Write tower, scoring, projector and selection of a model as one ONNX graph, and PATH with .json beside it.

    The graph takes `pixel_values` [batch, 3, H, W], as the model's processor prepares one crop, in the model's type; it
    returns `image_features` [batch, k, D], which the language model reads in place of all N tokens, `indices`
    [batch, k] of the tokens they stand for, and `sizes` [batch, k], how many tokens each stands for.
    """
    return _write(PrunedVision(model, method), Path(path))


def export_selection(
    method: Pruner, path: str | Path, *, tokens: int, dim: int, hidden_dim: int | None = None, cls: bool = True
) -> GraphInfo:
    """Write the selection alone as an ONNX graph, and PATH with .json beside it.

    The graph takes `tokens` [batch, N, D], where the method needs it `attention` [batch, N], and for VisPruner
    `hidden_states` [batch, N, H]; it returns what that of `export_onnx` does. All are float32.
    """
    return _write(TokenSelection(method, tokens, dim, hidden_dim=hidden_dim, cls=cls), Path(path))


def _write(module: PrunedVision | TokenSelection, path: Path) -> GraphInfo:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: {install_hint('onnx')}") from None
    if path.suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    info = _describe(module)
    _convert(module).save(path)
    path.with_suffix(".json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def _describe(module: PrunedVision | TokenSelection) -> GraphInfo:
    """Describe a graph from one run with the example inputs."""
    inputs = module.example_inputs(1)
    vision = module if isinstance(module, PrunedVision) else None
    with torch.no_grad():
        _, n, dim = (inputs["tokens"] if vision is None else vision.encode(**inputs).tokens).shape
    kept = module.method.count(n)
    packages = ("torch", "onnx", "onnxscript", *(("transformers",) if vision else ()))
    return GraphInfo(
        method=module.method.to_dict(),
        tokens=n,
        kept=kept,
        dim=dim,
        dtype=str(next(iter(inputs.values())).dtype).removeprefix("torch."),
        inputs={name: ["batch", *value.shape[1:]] for name, value in inputs.items()},
        outputs=dict(zip(OUTPUTS, (["batch", kept, dim], ["batch", kept], ["batch", kept]), strict=True)),
        model_type=None if vision is None else vision.model_type,
        opset=OPSET,
        versions={"clustrs": __version__, **{name: version(name) for name in packages}},
    )


def _convert(module: PrunedVision | TokenSelection) -> Any:
    """Convert to an `ONNXProgram` with its constants folded and nothing of this machine in it."""
    from onnxscript import opset18 as op
    from onnxscript import optimizer

    def stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        """An operator that `torch.onnx` does not know. ONNX says that TopK puts the lower index first among equals."""
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        program: Any = torch.onnx.export(
            trace(module),
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(module.example_inputs()),
            output_names=list(OUTPUTS),
            custom_translation_table={torch.ops.aten.sort.stable: stable_sort},
            optimize=False,
            verbose=False,
        )
        optimizer.optimize_ir(program.model, input_size_limit=FOLDED_BYTES, output_size_limit=FOLDED_BYTES)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    model, graph = program.model, program.model.graph
    symbol, nodes = graph.inputs[0].shape[0], list(graph)
    values = [*graph.inputs, *graph.initializers.values(), *(out for node in nodes for out in node.outputs)]
    for holder in (model, graph, *nodes, *values):  # notes about the code that was traced hold paths
        holder.metadata_props.clear()
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if size == symbol and not isinstance(size, int):
                value.shape[axis] = "batch"
    model.producer_name, model.producer_version = "clustrs", __version__
    return program
