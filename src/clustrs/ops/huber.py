"""The Huber loss."""

import torch
from torch import Tensor

_NO_REDUCTION = 0


def huber(radius: Tensor, tau: float, zero: Tensor) -> Tensor:
    """h_tau(r): r^2/2 up to tau, tau (r - tau/2) above. `zero` is a tensor that holds 0.

    The operator itself, without the checks of `torch.nn.functional`: this is called for every seed.
    """
    loss: Tensor = torch.ops.aten.huber_loss.default(radius, zero, _NO_REDUCTION, tau)
    return loss
