"""What a tensor allows: the precision to compute in, whether one may look at its values, who is tracing it."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def upcast_half(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave other types as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor


def values_are_free(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing: it would stop a compiler and make an accelerator wait."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def exporting() -> bool:
    """Whether `torch.export` is tracing: what is quickest eagerly may be slow in another runtime, or missing there.

    torch 2.6 can only tell that something traces.
    """
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())
