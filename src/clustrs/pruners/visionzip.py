"""VisionZip: dominant tokens by attention, the rest merged into contextual ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.ops.geometry import cosines
from clustrs.ops.picking import rows_at, top
from clustrs.pruners import checks
from clustrs.pruners.base import Pruner, single
from clustrs.pruners.registry import register
from clustrs.pruners.selection import EncoderStates, Selection


@register
@dataclass(frozen=True)
class VisionZip(Pruner):
    """Keep the CLS token and the most attended patches; add the others up around evenly spaced targets.

    Works before the projector. The rows come in the order [CLS,] dominant, contextual.
    """

    name = "visionzip"
    paper = "https://arxiv.org/abs/2412.04467"
    needs = ("attention", "hidden", "keys", "projector")

    @staticmethod
    def split(k: int) -> tuple[int, int]:
        """How many of k tokens are dominant (the CLS token among them), and how many contextual."""
        contextual = max(1, 10 * k // 64) if k > 1 else 0
        return k - contextual, contextual

    def _select(
        self, tokens: Tensor, attention: Tensor | None, states: EncoderStates, k: int, check: bool
    ) -> Selection:
        if check:
            checks.finite("tokens", tokens)
        assert attention is not None
        assert states.hidden is not None
        assert states.keys is not None
        assert states.projector is not None
        first = int(states.cls)
        hidden, keys = states.hidden[:, first:], states.keys[:, first:]
        batch, n, _ = tokens.shape
        dominant, contextual = self.split(k)
        patches = dominant - first
        rank = top(attention, n)
        best, rest = rank[:, :patches].sort(-1).values, rank[:, patches:].sort(-1).values

        rows = [states.hidden[:, :first], rows_at(hidden, best)]
        indices = [torch.full_like(rank[:, :first], -1), best]
        labels = torch.full_like(rank, -1)
        labels = labels.scatter(-1, best, torch.arange(first, dominant, device=rank.device).expand_as(best))
        if contextual:
            targets, others = spaced(rest, contextual)
            with torch.no_grad():
                alike = cosines(rows_at(single(keys), others), rows_at(single(keys), targets))
                goal = alike.argmax(-1)
            indices.append(targets)
            labels = labels.scatter(-1, targets, torch.arange(dominant, k, device=rank.device).expand_as(targets))
            labels = labels.scatter(-1, others, goal + dominant)
            rows.append(add_means(rows_at(hidden, targets), rows_at(hidden, others), goal))
        kept = states.projector(torch.cat(rows, 1))
        merged = torch.arange(k, device=rank.device).expand(batch, k) >= dominant
        return Selection(kept.to(tokens.dtype), torch.cat(indices, -1), labels, merged=merged)


def spaced(rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split [B, M] into `count` evenly spaced targets, the first of them at 0, and the others."""
    step = max(1, rest.shape[1] // count)
    targets = torch.arange(count, device=rest.device) * step
    place = torch.arange(rest.shape[1] - count, device=rest.device)
    before = (place // (step - 1) + 1).clamp(max=count) if step > 1 else count
    return rest[:, targets], rest[:, place + before]


def add_means(targets: Tensor, others: Tensor, goal: Tensor) -> Tensor:
    """Each target [B, C, H] plus the mean of the others [B, M, H] whose `goal` [B, M] it is (plus 0 if none)."""
    share = (goal[:, None] == torch.arange(targets.shape[1], device=goal.device)[:, None]).to(single(targets).dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    return (single(targets) + share @ single(others)).to(targets.dtype)
