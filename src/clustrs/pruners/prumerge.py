"""PruMerge+: attended and evenly spaced tokens, each with its nearest ones added."""

from dataclasses import dataclass, field

import torch

from clustrs import validation
from clustrs.ops.distances import gather_tokens, map_images, stable_topk, upcast_half
from clustrs.ops.diversity import nearest_cosines
from clustrs.pruners.base import Pruner, accepts
from clustrs.pruners.inputs import PrunerInputs, Selection, check_finite
from clustrs.pruners.registry import register
from clustrs.pruners.visionzip import evenly_spaced


@register
@dataclass(frozen=True)
class PruMergePlus(Pruner):
    """Keep attended and evenly spaced tokens, and add to each its nearest ones, weighted by attention.

    PruMerge+ (https://arxiv.org/abs/2403.15388) with a fixed budget. Works before the projector: x_i + sum_j a_j x_j
    over the tokens j whose keys have the largest cosines with that of i. Attention and keys are of all heads as one.

    Args:
        keep: Budget, a count (int) or a fraction (float).
        neighbors: Number of tokens that are added to each.

    Examples:
        >>> import torch
        >>> from clustrs import PruMergePlus
        >>> states = {"joint_scores": torch.rand(9), "joint_keys": torch.rand(9, 4), "hidden": torch.rand(1 + 9, 4)}
        >>> PruMergePlus(keep=4).select(torch.rand(9, 8), projector=torch.nn.Linear(4, 8), **states).tokens.shape
        torch.Size([4, 8])
    """

    name = "prumerge-plus"
    label = "PruMerge+"
    paper = "https://arxiv.org/abs/2403.15388"
    needs = ("joint_scores", "joint_keys", "hidden", "projector")
    merges = True

    neighbors: int = field(default=32, metadata=accepts(validation.integer, 1))

    def _select(self, inputs: PrunerInputs, k: int, check: bool) -> Selection:
        hidden, scores, keys = inputs["patch_hidden"], inputs["joint_scores"], inputs["joint_keys"]
        assert inputs.projector is not None
        if check:
            check_finite("tokens", inputs.tokens)
        with torch.no_grad():
            rank = stable_topk(scores, hidden.shape[1])
            attended, rest = rank.tensor_split([k - k // 2], -1)
            even, _ = evenly_spaced(rest.sort(-1).values, k // 2)
            indices = torch.cat([attended, even], -1).sort(-1).values
            near = nearest_cosines(gather_tokens(keys, indices), keys, min(self.neighbors, keys.shape[1] - 1), indices)
            own = scores.to(upcast_half(hidden).dtype).unsqueeze(1).expand(-1, k, -1)
            weights = torch.zeros_like(own).scatter(-1, near, own.gather(-1, near))
        added = map_images(torch.matmul, weights, upcast_half(hidden))
        merged = (upcast_half(gather_tokens(hidden, indices)) + added).to(hidden.dtype)
        tokens = inputs.projector(merged).to(inputs.tokens.dtype)
        return Selection(tokens, indices, merged=torch.ones_like(indices, dtype=torch.bool))
