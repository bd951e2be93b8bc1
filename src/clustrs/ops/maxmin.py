"""Greedy max-min diversity."""

import torch
from torch import Tensor


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Choose k tokens, each as unlike the chosen ones as possible: [B, N, N] gives [B, k], in order of choice.

    The first is the one least similar to its nearest neighbour. A running maximum makes each further choice O(N).
    """
    batch, n, _ = similarity.shape
    offset = torch.arange(batch, device=similarity.device) * n
    others = similarity.diagonal_scatter(similarity.new_full((batch, n), -torch.inf), dim1=1, dim2=2)
    chosen = [others.amax(-1).argmin(-1)]
    closeness = similarity.new_full((batch, n), -torch.inf)
    rows = similarity.diagonal_scatter(similarity.new_full((batch, n), torch.inf), dim1=1, dim2=2).view(-1, n)
    for _ in range(k - 1):
        closeness = torch.maximum(closeness, rows.index_select(0, chosen[-1] + offset))
        chosen.append(closeness.argmin(-1))
    return torch.stack(chosen, -1)
