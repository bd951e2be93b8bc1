"""Declare torchvision's operators by name, for an environment where its compiled part does not load.

vLLM's CPU build asks for a torchvision whose compiled operators belong to another build of torch. `import torchvision`
then fails while it registers shapes for operators that do not exist. Declared without an implementation, they let the
import pass; what vLLM and transformers use of torchvision is written in Python. `make test-vllm` copies this file into
its environment, where a .pth file imports it at every start of Python; torch is imported only once torchvision is asked
for. It does not belong to the package.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)


class DeclareOperators(MetaPathFinder):
    """Finds nothing, but declares the operators when torchvision is about to be imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(f"{operator}() -> ()")


finder = DeclareOperators()
sys.meta_path.insert(0, finder)
