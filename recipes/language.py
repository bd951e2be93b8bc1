"""The second half of the training: projector and language model, with the encoder as it is."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.data import IGNORED, NAMES

PREFIX = ("<s>", "user", ":")


class Asking(nn.Module):
    """Answers all questions about an image in one pass; each sees the image and itself, as if asked alone.

    The layers are the model's own, in an order that does no work in vain: what comes before the questions is computed
    once for all of them, and in the last layer only the questions matter.
    """

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

    def image(self, batch: dict[str, Tensor]) -> Tensor:
        """The visual tokens. In a family with a newline token, an image is itself and then, row by row, its tile."""
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
        visual = self.image(batch)
        embed = self.language.embed_tokens
        ahead = torch.cat([embed(self.prefix).expand(len(visual), -1, -1), visual], 1)
        text = embed(batch["ids"])
        length = ahead.shape[1]
        turns = self.language.rotary_emb(ahead, torch.arange(length)[None])
        text_turns = self.language.rotary_emb(text, length + batch["positions"])
        mask = visible(length, batch["segments"])
        last = self.language.layers[-1]
        for layer in self.language.layers:
            ahead_normed, text_normed = layer.input_layernorm(ahead), layer.input_layernorm(text)
            keys, values = keys_and_values(layer.self_attn, ahead_normed, turns)
            text_keys, text_values = keys_and_values(layer.self_attn, text_normed, text_turns)
            mixed = F.scaled_dot_product_attention(
                rotated(layer.self_attn.q_proj(text_normed), layer.self_attn, text_turns),
                torch.cat([keys, text_keys], 2),
                torch.cat([values, text_values], 2),
                attn_mask=mask,
            )
            text = finished(layer, text, mixed)
            if layer is not last:
                queries = rotated(layer.self_attn.q_proj(ahead_normed), layer.self_attn, turns)
                ahead = finished(layer, ahead, F.scaled_dot_product_attention(queries, keys, values, is_causal=True))
        return self.head(self.language.norm(text[batch["targets"] != IGNORED]))


def initialize(model: Any, spread: float) -> None:
    """Random weights to begin with. The usual ones are meant for widths of thousands: in a narrow model they leave the
    words so small beside the image that the first layers lose them. Here every layer gets and gives values of about
    1, and the two that write to the residual stream share it. `spread` is the standard deviation of the features."""
    inner = model.model
    language, projector = inner.language_model, inner.multi_modal_projector
    depth = (2 * len(language.layers)) ** 0.5
    with torch.no_grad():
        language.embed_tokens.weight.normal_()
        for name, weight in [*language.layers.named_parameters(), *projector.named_parameters()]:
            if weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0, weight.shape[1] ** -0.5 / (depth if writes else 1))
        projector.linear_1.weight /= spread
        model.lm_head.weight.normal_(0, model.lm_head.weight.shape[1] ** -0.5)


Turns = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary positions."""


def heads(x: Tensor, attention: Any) -> Tensor:
    return x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def rotated(x: Tensor, attention: Any, turns: Turns) -> Tensor:
    """(B, heads, T, size), turned by its positions."""
    x = heads(x, attention)
    cos, sin = turns[0][:, None], turns[1][:, None]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def keys_and_values(attention: Any, normed: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
    return rotated(attention.k_proj(normed), attention, turns), heads(attention.v_proj(normed), attention)


def finished(layer: Any, x: Tensor, mixed: Tensor) -> Tensor:
    """A layer's output, from what its attention has mixed."""
    x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


def visible(ahead: int, segments: Tensor) -> Tensor:
    """(B, 1, T, ahead + T), 0 or -inf: each question sees the image and what came before in itself."""
    length = segments.shape[1]
    own = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    hidden = torch.zeros(own.shape).masked_fill_(~own, -torch.inf)
    return torch.cat([torch.zeros(len(segments), length, ahead), hidden], 2)[:, None]


def loss(asking: Asking, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    logits = asking(batch)
    targets = batch["targets"][batch["targets"] != IGNORED]
    right = (logits.argmax(-1) == targets).float()
    kinds = batch["kinds"][batch["targets"] != IGNORED]
    report = {name: right[kinds == i].mean().item() for i, name in enumerate(NAMES)}
    return F.cross_entropy(logits, targets), report
