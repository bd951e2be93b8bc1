"""Write ONNX graphs, each with a JSON file that describes it."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
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
OUTPUTS = ("image_features", "indices")
"""Names of the outputs. The first, and the input `pixel_values`, are those that onnxruntime-genai has by default."""
FOLDED_BYTES = 2**24
"""Constants of up to this size are computed when the file is written: the draws of the seeding, above all."""


@dataclass(frozen=True)
class GraphInfo:
    """Contents of the JSON file beside a graph.

    `tokens` is N, how many tokens the graph chooses from, `kept` is k. `inputs` and `outputs` have the shape of each,
    as strings for JSON: "batch" stands for any number of images.
    """

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
    returns `image_features` [batch, k, D], which the language model reads in place of all N tokens, and `indices`
    [batch, k] of the tokens they stand for.
    """
    module = PrunedVision(model, method)
    return _write(module, Path(path), module.model_type)


def export_selection(
    method: Pruner,
    path: str | Path,
    *,
    tokens: int,
    dim: int,
    hidden_dim: int | None = None,
    cls: bool = True,
) -> GraphInfo:
    """Write the selection alone as an ONNX graph, and PATH with .json beside it.

    The graph takes `tokens` [batch, N, D], where the method needs it `attention` [batch, N], and for VisPruner
    `hidden_states` [batch, N, H]; it returns what that of `export_onnx` does. All are float32.
    """
    return _write(TokenSelection(method, tokens, dim, hidden_dim=hidden_dim, cls=cls), Path(path), None)


def _write(module: PrunedVision | TokenSelection, path: Path, model_type: str | None) -> GraphInfo:
    _require_onnx()
    if path.suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    info = describe(module, model_type)
    program = to_onnx(module)
    program.save(path)
    path.with_suffix(".json").write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def to_onnx(module: PrunedVision | TokenSelection) -> Any:
    """The module as an `ONNXProgram` of opset 18, with its constants folded and nothing of this machine in it."""
    from onnxscript import optimizer

    with _quiet_exporter():
        program: Any = torch.onnx.export(
            trace(module),
            (),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(module.example_inputs()),
            output_names=list(OUTPUTS),
            custom_translation_table=_translations(),
            optimize=False,
            verbose=False,
        )
        optimizer.optimize_ir(program.model, input_size_limit=FOLDED_BYTES, output_size_limit=FOLDED_BYTES)
    _tidy(program.model)
    return program


def _translations() -> dict[Any, Any]:
    """Operators that `torch.onnx` does not know. ONNX says that TopK puts the lower index first among equals."""
    from onnxscript import opset18 as op

    def stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    return {torch.ops.aten.sort.stable: stable_sort}


def _tidy(model: Any) -> None:
    """Call the batch dimension `batch`, and drop notes about the code that was traced: they hold paths."""
    symbol = model.graph.inputs[0].shape[0]
    nodes = list(model.graph)
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(out for node in nodes for out in node.outputs)]
    for value in values:
        value.metadata_props.clear()
        for axis, size in enumerate(value.shape or ()):
            if size == symbol and not isinstance(size, int):
                value.shape[axis] = "batch"
    for holder in (model, model.graph, *nodes):
        holder.metadata_props.clear()
    model.producer_name, model.producer_version = "clustrs", __version__


def describe(module: PrunedVision | TokenSelection, model_type: str | None) -> GraphInfo:
    """Describe a graph for the JSON file beside it, from one run with the example inputs."""
    inputs = module.example_inputs(1)
    if isinstance(module, PrunedVision):
        with torch.no_grad():
            shape = module.encode(**inputs).tokens.shape
        n, dim = int(shape[1]), int(shape[2])
    else:
        n, dim = module.tokens, module.dim
    kept = module.method.count(n)
    dtype = str(next(iter(inputs.values())).dtype).removeprefix("torch.")
    packages = ("torch", "onnx", "onnxscript", *(("transformers",) if model_type else ()))
    return GraphInfo(
        method=module.method.to_dict(),
        tokens=n,
        kept=kept,
        dim=dim,
        dtype=dtype,
        inputs={name: ["batch", *value.shape[1:]] for name, value in inputs.items()},
        outputs=dict(zip(OUTPUTS, (["batch", kept, dim], ["batch", kept]), strict=True)),
        model_type=model_type,
        opset=OPSET,
        versions={"clustrs": __version__, **{name: version(name) for name in packages}},
    )


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: {install_hint('onnx')}") from None


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep remarks about operators that are not used here, and about folding, out of the way."""
    names = ("torch.onnx", "onnxscript", "onnx_ir")
    before = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
