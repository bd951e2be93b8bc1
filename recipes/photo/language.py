"""The training of projector and language model on the features of the frozen tower.

Beside the answers, two linear classifiers look at the projected tokens while the model learns: what is in each quarter,
and in which quarter each token lies. No token is dropped, merged or shuffled.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clustrs_models.photographs import KINDS, PLACES, QUESTION_KINDS
from recipes.data import IGNORED
from recipes.language import Asking

SHARPNESS = 10.0
"""Factor between a cosine and a logit."""


WORD_SIDE = 8
"""Tokens in a row and in a column of images made of words."""


class PhotoAsking(Asking):
    """Answers all questions about images whose features are given."""

    def __init__(self, model: Any, words: dict[str, int]) -> None:
        super().__init__(model, None, words)

    def image(self, batch: dict[str, Tensor]) -> Tensor:
        if "visual" not in batch:
            batch["visual"] = self.projector(batch["features"].float())
        return batch["visual"]


class Heads(nn.Module):
    """Linear classifiers of projected tokens: what a token shows, and in which quarter it lies.

    Their weights are the word embeddings themselves, so that image and words come to speak of a thing by the same
    direction: of a quarter, the sum of its two words ("top" and "left"). They see cosines only: what they tell apart
    must fill the tokens, or a small language model never learns to look for it. The biases are thrown away after the
    training.
    """

    def __init__(self, embeddings: nn.Embedding, words: dict[str, int]) -> None:
        super().__init__()
        self.embeddings = [embeddings]  # in a list, because they are the model's and not this module's
        self.kinds = torch.tensor([words[kind.name] for kind in KINDS])
        self.places = torch.tensor([[words[word] for word in place.split()] for place in PLACES])
        self.kind_bias = nn.Parameter(torch.zeros(len(KINDS)))
        self.quarter_bias = nn.Parameter(torch.zeros(len(PLACES)))

    def kind(self, tokens: Tensor) -> Tensor:
        return SHARPNESS * cosines(tokens, self.embeddings[0](self.kinds)) + self.kind_bias

    def quarter(self, tokens: Tensor) -> Tensor:
        return SHARPNESS * cosines(tokens, self.embeddings[0](self.places).sum(1)) + self.quarter_bias


def cosines(tokens: Tensor, directions: Tensor) -> Tensor:
    return F.linear(F.normalize(tokens, dim=-1), F.normalize(directions, dim=-1))


def images_of_words(embeddings: nn.Embedding, heads: Heads, batch: dict[str, Tensor], seed: int) -> Tensor:
    """Images that show the same kinds at the same places, made of words (B, WORD_SIDE ** 2, D).

    A token is the sum of the words for its place, of that for what it shows if it lies on the thing (an ellipse), and
    of noise. From such images the language model learns to look things up, as a large one has learnt from text.
    """
    draw = torch.Generator().manual_seed(seed)
    unit = (torch.arange(WORD_SIDE) + 0.5) / WORD_SIDE
    y, x = torch.meshgrid(unit, unit, indexing="ij")
    quarter = (2 * (y >= 0.5).long() + (x >= 0.5).long()).flatten()
    count = len(batch["quarters"])
    extent = torch.where(batch["single"], 1.0, 0.5)[:, None]
    corner = torch.where(
        batch["single"][:, None, None], 0.0, torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.5, 0.0], [0.5, 0.5]])
    )
    middle = corner + extent[..., None] * (0.35 + 0.3 * torch.rand(count, 4, 2, generator=draw))
    radius = extent[..., None] * (0.2 + 0.25 * torch.rand(count, 4, 2, generator=draw))
    middle, radius = (torch.where(batch["single"][:, None, None], part[:, :1], part) for part in (middle, radius))
    point = torch.stack([y.flatten(), x.flatten()], -1)
    shown = (((point - middle[:, quarter]) / radius[:, quarter]).square().sum(-1) <= 1)[..., None]
    kind = F.normalize(embeddings(heads.kinds[batch["quarters"][:, quarter]]), dim=-1)
    place = F.normalize(embeddings(heads.places).sum(1), dim=-1)[quarter]
    noise = F.normalize(torch.randn(kind.shape, generator=draw), dim=-1)
    usual = embeddings.weight.detach().norm(dim=-1).mean()
    return usual * F.normalize(place + shown * kind + noise, dim=-1)


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
    """Return the distance of the norms of projected tokens from those of the word embeddings, in logarithms."""
    usual = words.detach().norm(dim=-1).mean()
    return (visual.norm(dim=-1) / usual).log().square().mean()


def expected_everywhere(batch: dict[str, Tensor]) -> Tensor:
    """The targets, with the answer to a question as the target of all its words."""
    answers = torch.where(batch["kinds"] >= 0, batch["targets"], 0)
    own = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    said = (own * answers[:, None, :]).amax(2)
    return torch.where((batch["targets"] == IGNORED) & (batch["segments"] >= 0), said, batch["targets"])


def answered(
    asking: PhotoAsking, batch: dict[str, Tensor], smoothing: float = 0.0, every_word: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the answers, and how many are right by kind of question; a full stop token does not count.

    With `every_word`, the answer is expected at every word of a question, too, with that weight: a word then learns to
    look for what it means in the image, where otherwise only the last token learns, once it knows all words.
    """
    given = batch["targets"] != IGNORED
    batch = {**batch, "targets": expected_everywhere(batch)} if every_word else batch
    logits = asking(batch)
    asked = batch["targets"] != IGNORED
    targets, kinds = batch["targets"][asked], batch["kinds"][asked]
    right = (logits.argmax(-1) == targets).float()
    report = {name: right[kinds == i].mean().item() for i, name in enumerate(QUESTION_KINDS)}
    report["all"] = right[kinds >= 0].mean().item()
    weights = torch.where(given[asked], 1.0, every_word)
    losses = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    return (weights * losses).sum() / weights.sum(), report


def loss(
    asking: PhotoAsking,
    heads: Heads,
    batch: dict[str, Tensor],
    own: dict[str, Any],
    language: bool = True,
    every_word: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """The weighted sum of all losses, and how much is right. Without `language`, the projector's part alone."""
    visual = asking.image(batch)
    kind, quarter, named = quarter_losses(heads, visual, batch["quarters"])
    total = own["kind_weight"] * kind + own["quarter_weight"] * quarter
    total = total + own["norm_weight"] * norm_penalty(visual, asking.language.embed_tokens.weight)
    report = {"quarters": named.item()}
    if language:
        answers, right = answered(asking, batch, own["smoothing"], every_word)
        total, report = total + answers, report | right
    return total, report


@torch.no_grad()
def judged(asking: PhotoAsking, heads: Heads, batches: list[dict[str, Tensor]]) -> dict[str, float]:
    """Return the accuracy on photographs that training has not seen, by kind of question."""
    sums: dict[str, list[float]] = {}
    for batch in batches:
        fresh = dict(batch)
        _, right = answered(asking, fresh)
        named = quarter_losses(heads, fresh["visual"], batch["quarters"])[2].item()
        for name, value in {**right, "quarters": named}.items():
            if value == value:  # a kind that no question of this batch has is not a number
                sums.setdefault(f"{name}, unseen", []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}
