"""Graphs for other runtimes: pixels in, k visual tokens out, without Python."""

from clustrs.export.onnx import OPSET, GraphInfo, export_onnx, export_selection
from clustrs.export.vision import PrunedVision, TokenSelection, trace

__all__ = ["OPSET", "GraphInfo", "PrunedVision", "TokenSelection", "export_onnx", "export_selection", "trace"]
