"""The training of projector and language model on the features of the frozen tower.

Beside the answers, two small classifiers look at the projected tokens while the model learns: what is in each quarter,
and in which quarter each token lies. No token is dropped, merged or shuffled.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clustrs.images.photos.collage import PLACES
from clustrs.images.photos.kinds import KINDS
from clustrs.images.photos.questions import QUESTION_KINDS
from recipes.data import IGNORED
from recipes.language import Asking


class PhotoAsking(Asking):
    """Answers all questions about images whose features are given."""

    def __init__(self, model: Any, words: dict[str, int]) -> None:
        super().__init__(model, None, words)

    def image(self, batch: dict[str, Tensor]) -> Tensor:
        if "visual" not in batch:
            batch["visual"] = self.projector(batch["features"].float())
        return batch["visual"]


class Heads(nn.Module):
    """Linear classifiers of projected tokens, thrown away after the training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind = nn.Linear(width, len(KINDS))
        self.quarter = nn.Linear(width, len(PLACES))


def by_quarter(tokens: Tensor) -> Tensor:
    """(B, 576, D) to (B, 4, 144, D), quarters in the order of `PLACES`."""
    half = int(tokens.shape[1] ** 0.5) // 2
    return tokens.unflatten(1, (2, half, 2, half)).permute(0, 1, 3, 2, 4, 5).flatten(3, 4).flatten(1, 2)


def quarter_losses(heads: Heads, visual: Tensor, quarters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of both classifiers, and how many quarters are named right.

    What a quarter shows is said by its tokens together (the logarithm of their mean likelihood ratio): a token of the
    background need not know it.
    """
    tokens = by_quarter(visual)
    named = heads.kind(tokens).logsumexp(2)
    kind = F.cross_entropy(named.flatten(0, 1), quarters.flatten())
    places = torch.arange(len(PLACES))[None, :, None].expand(tokens.shape[:3])
    quarter = F.cross_entropy(heads.quarter(tokens).flatten(0, 2), places.flatten())
    return kind, quarter, (named.argmax(-1) == quarters).float().mean()


def norm_penalty(visual: Tensor, words: Tensor) -> Tensor:
    """How far the norms of projected tokens are from those of the word embeddings, in logarithms."""
    usual = words.detach().norm(dim=-1).mean()
    return (visual.norm(dim=-1) / usual).log().square().mean()


def answered(asking: PhotoAsking, batch: dict[str, Tensor], smoothing: float = 0.0) -> tuple[Tensor, dict[str, float]]:
    """The loss of the answers, and how many are right by kind of question; a full stop token does not count."""
    logits = asking(batch)
    asked = batch["targets"] != IGNORED
    targets, kinds = batch["targets"][asked], batch["kinds"][asked]
    right = (logits.argmax(-1) == targets).float()
    report = {name: right[kinds == i].mean().item() for i, name in enumerate(QUESTION_KINDS)}
    report["all"] = right[kinds >= 0].mean().item()
    return F.cross_entropy(logits, targets, label_smoothing=smoothing), report


def loss(
    asking: PhotoAsking, heads: Heads, batch: dict[str, Tensor], own: dict[str, Any], language: bool = True
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of all losses, and how much is right. Without `language`, the projector's part alone."""
    visual = asking.image(batch)
    kind, quarter, named = quarter_losses(heads, visual, batch["quarters"])
    total = own["kind_weight"] * kind + own["quarter_weight"] * quarter
    total = total + own["norm_weight"] * norm_penalty(visual, asking.language.embed_tokens.weight)
    report = {"quarters": named.item()}
    if language:
        answers, right = answered(asking, batch, own["smoothing"])
        total, report = total + answers, report | right
    return total, report


@torch.no_grad()
def judged(asking: PhotoAsking, heads: Heads, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """What is right on images of photographs that training has not seen, by kind of question."""
    sums: dict[str, list[float]] = {}
    for batch in batches:
        fresh = dict(batch)
        _, right = answered(asking, fresh)
        named = quarter_losses(heads, fresh["visual"], batch["quarters"])[2].item()
        for name, value in {**right, "quarters": named}.items():
            if value == value:  # a kind that no question of this batch has is not a number
                sums.setdefault(f"{name}, unseen", []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}
