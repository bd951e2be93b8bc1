"""Graphs for other runtimes: pixels in, k visual tokens out, without Python.

`export_onnx` writes the vision part of a model with its pruning as one ONNX file, `export_selection` the selection
alone. `PrunedVision` and `TokenSelection` are the modules behind them, for `torch.export` and what builds on it.
"""

from clustrs.export.onnx import OPSET, GraphInfo, export_onnx, export_selection
from clustrs.export.vision import PrunedVision, TokenSelection, trace

__all__ = ["OPSET", "GraphInfo", "PrunedVision", "TokenSelection", "export_onnx", "export_selection", "trace"]
