"""Which tokens of which images: budgets over whole images or single crops, batched where sizes agree."""

from typing import Any

import torch
from torch import Tensor

from clustrs.models.candidates import Candidates
from clustrs.pruners.base import Pruner
from clustrs.pruners.selection import EncoderStates, Selection


def choose(method: Pruner, images: list[Candidates], projector: Any, *, scope: str) -> list[tuple[Selection, bool]]:
    """A selection for each image, and whether nothing had to go.

    With scope "image" one budget covers all crops of a image, with "crop" each crop has its own.
    """
    groups: list[tuple[int, Tensor, int]] = []
    for i, image in enumerate(images):
        members = torch.arange(len(image.rows), device=image.rows.device)
        if scope == "image":
            groups.append((i, members, 0))
        else:
            groups += [(i, members[image.crop == c], int(c)) for c in image.crop.unique()]
    selections = select_groups(method, images, groups, projector)
    choices = []
    for i, image in enumerate(images):
        mine = [(g[1], s) for g, s in zip(groups, selections, strict=True) if g[0] == i]
        everything = all(len(s.indices) == len(members) and s.merged is None for members, s in mine)
        choices.append((joined(mine, len(image.rows)), everything))
    return choices


def select_groups(
    method: Pruner, images: list[Candidates], groups: list[tuple[int, Tensor, int]], projector: Any
) -> list[Selection]:
    """Select in each group of candidates; groups of one size go together."""
    results: dict[int, Selection] = {}
    sizes: dict[int, list[int]] = {}
    for g, (_, members, _) in enumerate(groups):
        sizes.setdefault(len(members), []).append(g)
    for these in sizes.values():
        parts = [inputs(images[i], members, crop) for i, members, crop in (groups[g] for g in these)]
        tokens, attention, hidden, keys = (torch.stack(part) for part in zip(*parts, strict=True))
        states = EncoderStates(hidden, keys, projector, cls=hidden.shape[1] > tokens.shape[1])
        batch = method.select(tokens, attention, states)
        for b, g in enumerate(these):
            results[g] = batch.image(b)
    return [results[g] for g in range(len(groups))]


def inputs(image: Candidates, members: Tensor, crop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, attention, hidden states and keys of some candidates, with the CLS token of one crop in front."""
    hidden = torch.cat([image.cls_hidden[crop], image.hidden[members]])
    keys = torch.cat([image.cls_keys[crop], image.keys[members]])
    return image.whole[image.rows[members]], image.attention[members], hidden, keys


def joined(parts: list[tuple[Tensor, Selection]], n: int) -> Selection:
    """The selections of a image's groups as one, with indices and labels over all its n candidates."""
    if len(parts) == 1:
        return parts[0][1]
    indices, start = [], 0
    labels = torch.full((n,), -1, device=parts[0][0].device)
    for group, selection in parts:
        indices.append(torch.where(selection.indices < 0, -1, group[selection.indices.clamp(min=0)]))
        if selection.labels is not None:
            labels[group] = torch.where(selection.labels < 0, -1, selection.labels + start)
        start += len(selection.indices)

    def cat(name: str) -> Tensor | None:
        found = [getattr(selection, name) for _, selection in parts]
        return None if any(part is None for part in found) else torch.cat(found)

    tokens = cat("tokens")
    assert tokens is not None
    grouped = parts[0][1].labels is not None
    return Selection(
        tokens, torch.cat(indices), labels if grouped else None, cat("centroids"), cat("alpha"), cat("merged")
    )
