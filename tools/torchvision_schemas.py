"""Declare torchvision's operators by name, for an environment where its compiled part does not load.

vLLM's CPU build asks for a torchvision whose compiled operators belong to another build of torch. `import torchvision`
then fails while it registers shapes for operators that do not exist. Declared without an implementation, they let the
import pass; what vLLM and transformers use of torchvision is written in Python. `make test-vllm` copies this file into
its environment, where a .pth file imports it at every start. It is no part of the package.
"""

import torch

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

library = torch.library.Library("torchvision", "DEF")
for operator in OPERATORS:
    library.define(f"{operator}() -> ()")
