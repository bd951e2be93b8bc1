"""VisionZip: dominant tokens by attention, the rest merged into contextual ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.distances import gather_tokens, stable_topk, upcast_half
from clustrs.ops.diversity import nearest_cosines
from clustrs.ops.kmeans import membership
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class VisionZip(Pruner):
    """Keep the CLS token and the most attended patches; add the others up around evenly spaced targets.

    VisionZip (https://arxiv.org/abs/2412.04467). Works before the projector. The tokens come in the order [CLS,]
    dominant, contextual: 10 in 64 are contextual.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> states = {"hidden": torch.rand(1 + 9, 4), "keys": torch.rand(1 + 9, 2), "projector": torch.nn.Linear(4, 8)}
        >>> VisionZip(keep=4).select(torch.rand(9, 8), torch.rand(9), **states).indices[0]  # the CLS token
        tensor(-1)
    """

    name = "visionzip"
    paper = "https://arxiv.org/abs/2412.04467"
    needs = ("scores", "hidden", "keys", "projector")
    merges = True

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        if check:
            check_finite("tokens", inputs.tokens)
        hidden, keys = inputs["patch_hidden"], inputs["patch_keys"]
        assert inputs.projector is not None
        first = int(inputs.cls)
        contextual = max(1, 10 * k // 64) if k > 1 else 0
        dominant = k - contextual  # with the CLS token
        rank = stable_topk(inputs["scores"], inputs.tokens.shape[1])
        best, rest = (part.sort(-1).values for part in rank.tensor_split([dominant - first], -1))
        parts = [inputs["hidden"][:, :first], gather_tokens(hidden, best)]
        targets, others = evenly_spaced(rest, contextual)
        indices = torch.cat([torch.full_like(rank[:, :first], -1), best, targets], -1)
        outputs = torch.arange(k, device=rank.device).expand(len(rank), k)
        labels = torch.full_like(rank, -1).scatter(-1, indices[:, first:], outputs[:, first:])
        if contextual:
            with torch.no_grad():
                goal = nearest_cosines(gather_tokens(keys, others), gather_tokens(keys, targets))[..., 0]
            labels = labels.scatter(-1, others, goal + dominant)
            parts.append(add_means(gather_tokens(hidden, targets), gather_tokens(hidden, others), goal))
        kept = inputs.projector(torch.cat(parts, 1)).to(inputs.tokens.dtype)
        return Selection(kept, indices, labels, merged=outputs >= dominant)


def evenly_spaced(rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split [B, M] into `count` evenly spaced targets, the first of them at 0, and the others."""
    step = max(1, rest.shape[1] // max(1, count))
    targets = torch.arange(count, device=rest.device) * step
    position = torch.arange(rest.shape[1] - count, device=rest.device)
    before = (position // (step - 1) + 1).clamp(max=count) if step > 1 else count
    return rest[:, targets], rest[:, position + before]


def add_means(targets: Tensor, others: Tensor, goal: Tensor) -> Tensor:
    """Add to each target [B, C, H] the mean of the others [B, M, H] whose `goal` [B, M] it is (0 if none)."""
    share = membership(goal, targets.shape[1]).to(upcast_half(targets).dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    return (upcast_half(targets) + share @ upcast_half(others)).to(targets.dtype)
