"""The encoder's training: what each patch shows, and what CLS knows of the whole image."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clustrs_models.drawing import COLORS, MOST, SHAPES
from recipes.data import IGNORED, PLACES, SIZES

SEEN, MEASURED = ("shape", "color", "digit"), ("column", "row", "size")
"""Labels of the classifiers of patches: in every stage, and in those that spread the features."""
SHARPNESS = 1.5
"""Factor of the cosine of a feature and a class in the stages that spread the features, times the norm."""


def normalized(pixels: Tensor) -> Tensor:
    """Bytes (B, side, side, 3) to (B, 3, side, side) between -1 and 1."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def sines(grid: int, width: int) -> Tensor:
    """(grid * grid, width): sines and cosines of row and column, to begin with."""
    rates = 1 / 100 ** (torch.arange(width // 4) / (width // 4))
    angles = torch.arange(grid)[:, None] * rates
    waves = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = waves[:, None].expand(-1, grid, -1), waves[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], 2).reshape(grid * grid, width)


def places(corner: Tensor, side: int, grid: int) -> Tensor:
    """(B, patches): where the patches of a small image lie in the full grid, when its corner is at `corner`."""
    steps = torch.arange(side)
    rows, columns = corner[:, 0, None] + steps, corner[:, 1, None] + steps
    return (rows[:, :, None] * grid + columns[:, None, :]).flatten(1)


class Clip(nn.Module):
    """CLIP's tower on images of any size up to the full one. A smaller image is a window of the full grid: it takes
    the position embeddings of the place where it lies, so what is learnt on small images holds on large ones."""

    def __init__(self, tower: Any, fresh: bool = True) -> None:
        super().__init__()
        self.tower = tower
        self.grid = tower.config.image_size // tower.config.patch_size
        if fresh:
            with torch.no_grad():
                tower.embeddings.patch_embedding.weight.normal_(0, 192**-0.5)
                tower.embeddings.position_embedding.weight.zero_()
                tower.embeddings.position_embedding.weight[1:] = 0.3 * sines(self.grid, tower.config.hidden_size)

    def forward(self, pixels: Tensor, corner: Tensor) -> Tensor:
        """Hidden states that the projector reads, CLS first."""
        embeddings = self.tower.embeddings
        patches = embeddings.patch_embedding(normalized(pixels))
        side = patches.shape[-1]
        positions = embeddings.position_embedding.weight
        patches = patches.flatten(2).transpose(1, 2) + positions[1 + places(corner, side, self.grid)]
        cls = (embeddings.class_embedding + positions[0]).expand(len(patches), 1, -1)
        hidden = self.tower.pre_layrnorm(torch.cat([cls, patches], 1))
        for layer in self.tower.encoder.layers[:-1]:
            hidden = layer(hidden, attention_mask=None)
        return hidden

    def summaries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """CLS as the projector's layer has it, and after the last layer."""
        return hidden[:, 0], self.tower.post_layernorm(cls_only(self.tower.encoder.layers[-1], hidden))

    def features(self, pixels: Tensor, corner: Tensor) -> Tensor:
        """Return the projector's input, one row per patch."""
        return self(pixels, corner)[:, 1:]


class Siglip(nn.Module):
    """SigLIP's tower, likewise. There is no CLS: the mean over the patches has to know the whole image."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        self.grid = tower.config.image_size // tower.config.patch_size

    def start_from(self, clip: Any, pixels: Tensor) -> None:
        """Take over what a CLIP tower of this width has learnt. CLIP has a norm before the first layer: its mean and
        its gain go into the embeddings, what it divides by is replaced by its average over some images."""
        old = clip.embeddings
        places = old.position_embedding.weight[1:]
        norm, side = clip.pre_layrnorm, int(len(places) ** 0.5)
        with torch.no_grad():
            embedded = old.patch_embedding(normalized(pixels)).flatten(2).transpose(1, 2) + places
            gain = norm.weight / embedded.std(-1).mean()
            grown = (
                F.interpolate(
                    places.T.reshape(1, -1, side, side), (self.grid, self.grid), mode="bicubic", align_corners=True
                )[0]
                .flatten(1)
                .T
            )
            filters = old.patch_embedding.weight
            new = self.tower.embeddings
            new.patch_embedding.weight.copy_((filters - filters.mean(0)) * gain[:, None, None, None])
            new.patch_embedding.bias.copy_(norm.bias)
            new.position_embedding.weight.copy_((grown - grown.mean(1, keepdim=True)) * gain)
        for mine, theirs in zip(self.tower.encoder.layers, clip.encoder.layers, strict=False):
            mine.load_state_dict(theirs.state_dict())

    def forward(self, pixels: Tensor, corner: Tensor) -> Tensor:
        embeddings = self.tower.embeddings
        patches = embeddings.patch_embedding(normalized(pixels))
        positions = embeddings.position_embedding.weight[places(corner, patches.shape[-1], self.grid)]
        hidden = patches.flatten(2).transpose(1, 2) + positions
        for layer in self.tower.encoder.layers:
            hidden = layer(hidden, attention_mask=None)
        return hidden

    def summaries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.mean(1), self.tower.post_layernorm(hidden).mean(1)

    def features(self, pixels: Tensor, corner: Tensor) -> Tensor:
        return self(pixels, corner)


def cls_only(layer: Any, hidden: Tensor) -> Tensor:
    """The last layer for CLS alone; nobody reads what it makes of the patches."""
    attention, normed = layer.self_attn, layer.layer_norm1(hidden)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)

    q = heads(attention.q_proj(normed[:, :1]))
    mixed = F.scaled_dot_product_attention(q, heads(attention.k_proj(normed)), heads(attention.v_proj(normed)))
    cls = hidden[:, :1] + attention.out_proj(mixed.transpose(1, 2).flatten(2))
    return (cls + layer.mlp(layer.layer_norm2(cls)))[:, 0]


class Heads(nn.Module):
    """Small classifiers that are thrown away after the encoder's training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shape = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + len(SHAPES)))
        self.color = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + len(COLORS)))
        self.digit = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 11))
        self.geometry = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3))
        whole = len(SHAPES) * len(COLORS) + MOST
        self.read = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, whole))
        self.last = nn.Linear(width, whole)
        self.column = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + PLACES))
        self.row = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + PLACES))
        self.size = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1 + SIZES))


def spread(head: Any, patches: Tensor) -> Tensor:
    """A classifier's logits when it may not choose how strongly to look: its classes are unit vectors, and all features
    are normalized. To be separable, classes must differ much in the features, which the projector reads as they are:
    what is a small part of their variance is learnt late by the language model, or never."""
    classes = F.normalize(head[1].weight, dim=1)
    return SHARPNESS * F.linear(F.layer_norm(patches, patches.shape[-1:]), classes)


def balanced(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in which objects and background count alike, however little of the image the objects cover."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    labels = labels.flatten()
    objects, ground = labels > 0, labels == 0
    return each[objects].sum() / objects.sum().clamp(min=1) + 0.5 * each[ground].sum() / ground.sum().clamp(min=1)


def loss(
    tower: Clip | Siglip, heads: Heads, batch: dict[str, Tensor], spreading: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """The sum of all losses, and how much is right."""
    hidden = tower(batch["pixels"], batch["corner"])
    patches = hidden[:, -batch["shape"].shape[1] :]
    cls, last = tower.summaries(hidden)
    report, total = {}, torch.zeros(())
    for name in (*SEEN, *MEASURED) if spreading else SEEN:
        head = getattr(heads, name)
        logits = spread(head, patches) if spreading else head(patches)
        total = total + balanced(logits, batch[name])
        objects = batch[name] > 0
        report[name] = (logits.argmax(-1)[objects] == batch[name][objects]).float().mean().item()
    objects = batch["shape"] > 0
    total = total + F.smooth_l1_loss(heads.geometry(patches)[objects], batch["geometry"][objects], beta=0.2)
    for name, whole in (("read", heads.read(cls)), ("last", heads.last(last))):
        present, count = whole[:, :-MOST], whole[:, -MOST:]
        total = total + 5 * F.binary_cross_entropy_with_logits(present, batch["present"])
        total = total + 0.5 * F.cross_entropy(count, batch["count"])
        there = batch["present"] > 0
        report[f"present, {name}"] = (present[there] > 0).float().mean().item()
        report[f"count, {name}"] = (count.argmax(-1) == batch["count"]).float().mean().item()
    return total, report
