"""Greedy max-min diversity."""

import torch
from torch import Tensor

NOT_A_NUMBER = 2.0
"""What a cosine that is NaN counts as: more than any other, so that its tokens come last."""


def max_min(similarity: Tensor, k: int) -> Tensor:
    """Choose k tokens, each as unlike the chosen ones as possible: [B, N, N] gives [B, k], in order of choice.

    The first is the one least similar to its nearest neighbour. A running maximum makes each further choice O(N). No
    token is chosen twice, whatever the numbers are. `similarity` is overwritten.
    """
    batch, n, _ = similarity.shape
    offset = torch.arange(batch, device=similarity.device) * n
    itself = similarity.nan_to_num_(nan=NOT_A_NUMBER).diagonal(dim1=1, dim2=2)
    itself.fill_(-torch.inf)
    chosen = [similarity.amax(-1).argmin(-1)]
    itself.fill_(torch.inf)
    rows = similarity.view(-1, n)
    closeness = similarity.new_full((batch, n), -torch.inf)
    for _ in range(k - 1):
        closeness = torch.maximum(closeness, rows.index_select(0, chosen[-1] + offset))
        chosen.append(closeness.argmin(-1))
    return torch.stack(chosen, -1)
