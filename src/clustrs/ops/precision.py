"""The precision in which selections are computed."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def upcast_half(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave other types as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor
