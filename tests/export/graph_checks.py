"""What every exported graph must keep to, and how it is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from torch import Tensor

from clustrs.export import OPSET

CONTROL_FLOW = {"Loop", "Scan", "If", "SequenceMap"}


def session(path: Path) -> Any:
    """A session of onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(graph: Any, **inputs: Tensor) -> tuple[NDArray[Any], ...]:
    """The features, indices and sizes that a session gives."""
    return tuple(graph.run(["image_features", "indices", "sizes"], {name: x.numpy() for name, x in inputs.items()}))


def check_graph(path: Path) -> None:
    """Plain operators of opset 18: no control flow, functions or vendors' domains, and no size but the batch's open."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert not model.functions
    assert not {node.op_type for node in model.graph.node} & CONTROL_FLOW
    for node in model.graph.node:
        assert node.domain == ""
        assert onnx.defs.get_schema(node.op_type, OPSET).since_version <= OPSET
        assert not any(attribute.HasField("g") for attribute in node.attribute)
    for value in (*model.graph.input, *model.graph.output):
        first, *rest = value.type.tensor_type.shape.dim
        assert first.dim_param == "batch"
        assert all(size.dim_value > 0 for size in rest)
    assert b"/clustrs/" not in model.SerializeToString()


def assert_same(outputs: Sequence[NDArray[Any]], expected: Sequence[Tensor | None]) -> None:
    """The same indices and sizes, and every token within 1e-4 of the mean length of its image's tokens."""
    features, indices, sizes = outputs
    tokens, *whole = (part.numpy() for part in expected if part is not None)
    for name, got, wanted in zip(("indices", "sizes"), (indices, sizes), whole, strict=True):
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, wanted, name)
    error = np.linalg.norm(features - tokens, axis=-1)
    length = np.linalg.norm(tokens, axis=-1).mean(-1, keepdims=True)
    assert (error <= 1e-4 * length).all(), (error / length).max()
