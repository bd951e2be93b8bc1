"""The trained parts of smol-llava: a projector and LoRA on the language model, and questions packed per image."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from clustrs_models.smol_build import SYSTEM
from recipes.smol.questions import PLACES, Question

HIDDEN = 576
"""Width between the two layers: that of the language model, as LLaVA fixes it."""
RANK = 16
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


class Projector(nn.Module):
    """Two linear layers with GELU between them, on standardized features."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int = 768, hidden: int = HIDDEN, out: int = 576) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.linear_1, self.linear_2 = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def standardize(self, features: Tensor, norm: float) -> None:
        """Take mean and deviation from features [B, N, D], and scale the output to about `norm`."""
        flat = features.float().flatten(0, 1)
        self.mean.copy_(flat.mean(0))
        self.std.copy_(flat.std(0))
        with torch.no_grad():
            self.linear_2.weight.mul_(norm / self(features[:8].float()).norm(dim=-1).mean())

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1((features - self.mean) / self.std)))


class Lora(nn.Module):
    """A frozen linear layer plus a product of two thin matrices, which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = RANK) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))

    def merged(self) -> Tensor:
        """Return the weight of the one linear layer that computes the same."""
        return self.base.weight.float() + self.up.float() @ self.down.float()


def add_lora(language: nn.Module, rank: int = RANK) -> dict[str, Lora]:
    """Wrap q, k, v, o and the MLP of every layer in place, and return the wrappers by name."""
    wrapped: dict[str, Lora] = {}
    for name, module in list(language.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in f".{name}":
            parent = language.get_submodule(name.rpartition(".")[0])
            wrapped[name] = Lora(module, rank)
            setattr(parent, name.rpartition(".")[2], wrapped[name])
    return wrapped


class Packing:
    """Turns questions into token ids, and an image's questions into one sequence with a block mask."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before = self.ids(BEFORE)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(self, questions: Sequence[Question], visual: int) -> dict[str, Tensor]:
        """Pack questions after `visual` image tokens; each sees the image and itself, at restarted positions.

        Returns:
            ids [T] of the text after the image, mask [L, L] of allowed pairs, positions [L], targets [T] (-100 where
            no answer is predicted), weights [T], segments [T] (from 1 on), where L = before + visual + T.
        """
        prefix = len(self.before) + visual
        ids: list[int] = []
        segments: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        weights: list[float] = []
        for number, question in enumerate(questions, 1):
            asked = self.ids(f"\n{question.text}{AFTER}")
            answer = self.ids(question.answer + END)
            ids += asked + answer
            segments += [number] * (len(asked) + len(answer))
            positions += range(prefix, prefix + len(asked) + len(answer))
            targets += [-100] * (len(asked) - 1) + answer + [-100]
            weights += [len(answer) ** -0.5] * (len(asked) + len(answer))
        block = torch.tensor([0] * prefix + segments)
        same = (block[None, :] == 0) | (block[None, :] == block[:, None])
        return {
            "ids": torch.tensor(ids),
            "mask": same.tril(),
            "positions": torch.tensor([*range(prefix), *positions]),
            "targets": torch.tensor(targets),
            "weights": torch.tensor(weights),
            "segments": torch.tensor(segments),
        }


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Compute attention in the type of its inputs. In bfloat16 on a CPU a third less work than PyTorch's own."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.transpose(-1, -2) * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain", plain_attention)


def answer_logits(language: Any, before: Tensor, visual: Tensor, packed: dict[str, Tensor]) -> Tensor:
    """Run the language model over one image's packed questions; return logits [A, V] at the answers' tokens."""
    embed = language.get_input_embeddings()
    dtype = embed.weight.dtype
    inputs = torch.cat([embed(before), visual.to(dtype), embed(packed["ids"])])[None]
    mask = torch.zeros(packed["mask"].shape, dtype=dtype).masked_fill_(~packed["mask"], torch.finfo(dtype).min)
    output = language.model(
        inputs_embeds=inputs,
        attention_mask=mask[None, None],
        position_ids=packed["positions"][None],
        use_cache=False,
    )
    hidden = output.last_hidden_state[0, len(before) + len(visual) :]
    return language.lm_head(hidden[packed["targets"] >= 0]).float()


def answer_loss(logits: Tensor, packed: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of the answers' tokens; a long answer's tokens count less each."""
    asked = packed["targets"] >= 0
    weights = packed["weights"][asked]
    losses = F.cross_entropy(logits, packed["targets"][asked], reduction="none")
    return (weights * losses).sum() / weights.sum()


def exactly_right(logits: Tensor, packed: dict[str, Tensor]) -> list[bool]:
    """Return for each question whether greedy decoding gives its answer, to the last token."""
    asked = packed["targets"] >= 0
    right = logits.argmax(-1) == packed["targets"][asked]
    segments = packed["segments"][asked]
    return [bool(right[segments == number].all()) for number in range(1, int(segments.max()) + 1)]


class Alignment(nn.Module):
    """A loss that needs no pass through the language model: projected tokens lie near the words for what they show.

    A region's tokens together name what it shows (the logarithm of their mean likelihood ratio: a token of the
    background need not know it), and each token says its row and column, in directions of the word embeddings.
    """

    def __init__(self, embeddings: Tensor, names: Sequence[str], packing: Packing) -> None:
        super().__init__()
        self.names = {name: i for i, name in enumerate(names)}

        def of(words: str) -> Tensor:
            return embeddings[packing.ids(" " + words)].float().mean(0)

        kinds = torch.stack([of(name) for name in names])
        self.kinds = F.normalize(kinds - kinds.mean(0), dim=-1)
        self.row = F.normalize(of("bottom") - of("top"), dim=0)
        self.column = F.normalize(of("right") - of("left"), dim=0)
        self.norm = float(embeddings.float().norm(dim=-1).mean())
        self.scale = nn.Parameter(torch.tensor([3.0, 2.0]))

    def forward(self, visual: Tensor, names: Sequence[str]) -> tuple[Tensor, float]:
        """Return the loss of an image's projected tokens [N, D], and the share of regions named right."""
        side = math.isqrt(len(visual))
        unit = F.normalize(visual.float(), dim=-1)
        kind, place = self.scale.exp()
        half = torch.arange(side) >= side // 2
        rows, columns = half.repeat_interleave(side).float(), half.repeat(side).float()
        loss = F.binary_cross_entropy_with_logits(place * (unit @ self.row), rows)
        loss = loss + F.binary_cross_entropy_with_logits(place * (unit @ self.column), columns)
        loss = loss + (visual.float().norm(dim=-1) / self.norm).log().square().mean()
        if not names:
            return loss, math.nan
        scores = kind * (unit @ self.kinds.T)
        if len(names) == len(PLACES):
            quarter = (2 * rows + columns).long()
            named = torch.stack([scores[quarter == i].logsumexp(0) for i in range(len(PLACES))])
        else:
            named = scores.logsumexp(0)[None]
        wanted = torch.tensor([self.names[name] for name in names])
        return loss + F.cross_entropy(named, wanted), float((named.argmax(-1) == wanted).float().mean())
