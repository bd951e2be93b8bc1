"""VidCom2: a budget for each frame by how unique it is, then its most unusual tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.distances import is_ordinary, map_images, stable_topk, upcast_half
from clustrs.ops.kmeans import cluster_sizes, weighted_sums
from clustrs.pruners.base import Pruner
from clustrs.pruners.holov import UNIT, divide
from clustrs.pruners.inputs import PrunerInputs, count_frames
from clustrs.pruners.registry import register

WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
TEMPERATURE = 0.01
STEP = 2.0**-36  # likenesses are rounded to multiples of it, so that those of equal tokens are equal
PART = 2048  # tokens that are compared at a time


@register
@dataclass(frozen=True)
class VidCom2(Pruner):
    """Share the budget between frames by how unlike the video they are; keep the most unusual tokens of each.

    VidCom2 (https://arxiv.org/abs/2505.14454). On the half of the channels that vary least, normalized to length 1:
    G(v, c) = sum_b exp(-|v - c|^2 / 2b), b = 1/8 ... 2. A token's likeness is G to the mean of the video plus G to that
    of its frame. Frames whose mean G to the video is small get more of the budget, by a softmax.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> import torch
        >>> from clustrs import VidCom2
        >>> tokens = torch.ones(4, 6)
        >>> tokens[2, :2] = -1
        >>> VidCom2(keep=2).select(tokens + torch.tensor([0.0, 0, 0, 5, 5, 5]) * torch.arange(4)[:, None]).indices
        tensor([0, 2])
    """

    name = "vidcom2"
    paper = "https://arxiv.org/abs/2505.14454"
    servable = False  # vLLM has its own, for videos

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        frame, n = count_frames(inputs.layout, inputs.tokens), inputs.tokens.shape[1]
        sizes = cluster_sizes(frame, n)  # frames that there are not have none
        rows = map_images(steady_rows, upcast_half(inputs.tokens))
        everything, ones = torch.zeros_like(frame), torch.ones_like(rows[..., 0])
        to_video = likeness(rows, everything, torch.full_like(sizes[:, :1], n))
        to_frame = likeness(rows, frame, sizes)
        usual = weighted_sums(to_video.unsqueeze(-1), frame, ones, sizes).squeeze(-1) / sizes.clamp(min=1)
        usual = (usual / STEP).round() * STEP
        unique = torch.softmax((-usual / TEMPERATURE).masked_fill(sizes == 0, -torch.inf), -1)
        share = (1 + unique - 1 / (sizes > 0).sum(-1, keepdim=True)) * sizes
        share = (share / share.sum(-1, keepdim=True) * UNIT).round().long()
        budget = divide(share, sizes, k)
        order = (to_video + to_frame).argsort(dim=-1, stable=True)
        order = order.gather(-1, frame.gather(-1, order).argsort(dim=-1, stable=True))
        own = frame.gather(-1, order)
        rank = torch.arange(n, device=frame.device) - (sizes.cumsum(-1) - sizes).gather(-1, own)
        kept = torch.zeros_like(ones).scatter_(-1, order, (rank < budget.gather(-1, own)).to(ones.dtype))
        return stable_topk(kept, k)


def steady_rows(tokens: Tensor) -> Tensor:
    """Return the half of the channels of [N, D] that vary least, in float64, each row of length 1 (or zeros)."""
    moved = tokens - tokens[:1]
    variance = moved.double().var(0, correction=0).float()
    few = variance.sort(stable=True).indices[: max(1, tokens.shape[-1] // 2)].sort().values
    rows = tokens.index_select(-1, few).double()
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1)


def likeness(rows: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """Return G [B, N] of each row of [B, N, H] and the mean of its group."""
    means = weighted_sums(rows, groups, torch.ones_like(rows[..., 0]), sizes) / sizes.clamp(min=1).unsqueeze(-1)
    part = PART if is_ordinary(rows) else rows.shape[1]

    def of_image(image: Tensor, own: Tensor, centers: Tensor) -> Tensor:
        pairs = zip(image.split(part), own.split(part), strict=True)
        far = torch.cat([(some - centers.index_select(0, label)).square_().sum(-1) for some, label in pairs])
        total = sum((torch.exp(-far / (2 * width)) for width in WIDTHS), torch.zeros_like(far))
        return (total / STEP).round() * STEP

    return map_images(of_image, rows, groups, means)
