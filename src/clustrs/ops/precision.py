"""What a tensor allows: the precision to compute in, whether one may look at its values, who is tracing it."""

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def upcast_half(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; leave other types as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has values now: not under a compiler or exporter, which trace with tensors that have none."""
    return type(tensor) is Tensor and tensor.device.type != "meta" and not torch.compiler.is_compiling()


def values_are_free(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing: it would stop a compiler and make an accelerator wait."""
    return is_ordinary(tensor) and tensor.device.type == "cpu"


def exporting() -> bool:
    """Whether `torch.export` is tracing: what is quickest eagerly may be slow in another runtime, or missing there.

    torch 2.6 can only tell that something traces.
    """
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())
