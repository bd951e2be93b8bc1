"""The second half of the training: projector and language model, with the encoder as it is."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.data import IGNORED, NAMES

PREFIX = ("<s>", "user", ":")


class Asking(nn.Module):
    """Answers all questions about a picture in one pass; each sees the picture and itself, as if asked alone."""

    def __init__(self, model: Any, encoder: Any, words: dict[str, int]) -> None:
        super().__init__()
        self.projector, self.language, self.head = (
            model.model.multi_modal_projector,
            model.model.language_model,
            model.lm_head,
        )
        self.newline = getattr(model.model, "image_newline", None)
        self.encoder = [encoder]
        self.prefix = torch.tensor([words[word] for word in PREFIX])

    def picture(self, batch: dict[str, Tensor]) -> Tensor:
        """The visual tokens. In a family with a newline token, a picture is itself and then, row by row, its tile."""
        with torch.no_grad():
            features = self.encoder[0].features(batch["pixels"], batch["corner"])
        visual = self.projector(features)
        if self.newline is None:
            return visual
        side = int(visual.shape[1] ** 0.5)
        newline = self.newline.expand(len(visual), side, 1, -1)
        tile = torch.cat([visual.unflatten(1, (side, side)), newline], 2).flatten(1, 2)
        return torch.cat([visual, tile], 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits where an answer is predicted, (answers, words)."""
        visual = self.picture(batch)
        size, ahead = len(visual), len(self.prefix) + visual.shape[1]
        embed = self.language.embed_tokens
        sequence = torch.cat([embed(self.prefix).expand(size, -1, -1), visual, embed(batch["ids"])], 1)
        positions = torch.cat([torch.arange(ahead).expand(size, -1), ahead + batch["positions"]], 1)
        out = self.language(
            inputs_embeds=sequence,
            position_ids=positions,
            attention_mask=visible(ahead, batch["segments"]),
            use_cache=False,
        ).last_hidden_state[:, ahead:]
        return self.head(out[batch["targets"] != IGNORED])


def visible(ahead: int, segments: Tensor) -> Tensor:
    """(B, 1, T, T): the picture in order; each question the picture and what came before in itself."""
    segment = torch.cat([segments.new_full((len(segments), ahead), -2), segments], 1)
    shared = (segment[:, None, :] == -2) | (segment[:, :, None] == segment[:, None, :])
    return (shared & torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril())[:, None]


def loss(asking: Asking, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    logits = asking(batch)
    targets = batch["targets"][batch["targets"] != IGNORED]
    right = (logits.argmax(-1) == targets).float()
    kinds = batch["kinds"][batch["targets"] != IGNORED]
    report = {name: right[kinds == i].mean().item() for i, name in enumerate(NAMES)}
    return F.cross_entropy(logits, targets), report
