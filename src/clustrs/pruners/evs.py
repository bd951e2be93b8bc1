"""EVS (efficient video sampling): the tokens that differ most from the frame before."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.distances import gather_tokens, map_images, stable_topk
from clustrs.ops.diversity import paired_cosines
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import PrunerInputs, count_frames, grid_layout
from clustrs.pruners.registry import register


@register
@dataclass(frozen=True)
class EVS(Pruner):
    """Keep the tokens of a video that changed most since the frame before.

    Efficient Video Sampling (https://arxiv.org/abs/2510.14624). d = 1 - cos(v, v'), v' the token at the same place of
    the frame before. Tokens of the first frame come before all others, in raster order: an image is one frame.

    Args:
        keep: Budget, a count (int) or a fraction (float).

    Examples:
        >>> import torch
        >>> from clustrs import EVS, Layout
        >>> frame, zero = torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.long)
        >>> layout = Layout(tile=frame, y=zero, x=torch.tensor([0, 1, 0, 1]), frame=frame)
        >>> tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> EVS(keep=3).select(tokens, layout=layout).indices
        tensor([0, 1, 3])
    """

    name = "evs"
    paper = "https://arxiv.org/abs/2510.14624"
    servable = False  # vLLM has its own, for videos

    def _choose(self, inputs: PrunerInputs, k: int) -> Tensor:
        tokens, layout = inputs.tokens, inputs.layout or grid_layout(inputs.tokens)
        frame = count_frames(inputs.layout, tokens)
        order = frame.argsort(dim=-1, stable=True)
        for key in (layout.x, layout.y):
            order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
        y, x, time = (part.gather(-1, order) for part in (layout.y, layout.x, frame))
        follows = (y[:, 1:] == y[:, :-1]) & (x[:, 1:] == x[:, :-1]) & (time[:, 1:] > time[:, :-1])
        later, before = order[:, 1:], order[:, :-1]
        alike = map_images(paired_cosines, gather_tokens(tokens, later), gather_tokens(tokens, before))
        change = torch.where(follows, 1 - alike, torch.inf)
        change = torch.nn.functional.pad(change, (1, 0), value=torch.inf)
        change = torch.empty_like(change).scatter_(-1, order, change)
        by_time = frame.argsort(dim=-1, stable=True)
        return by_time.gather(-1, stable_topk(change.gather(-1, by_time), k))
