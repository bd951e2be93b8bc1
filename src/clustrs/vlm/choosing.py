"""Which tokens of which pictures: budgets over whole pictures or single crops, batched where sizes agree."""

from typing import Any

import torch
from torch import Tensor

from clustrs.pruners.base import Pruner
from clustrs.pruners.selection import EncoderStates, Selection
from clustrs.vlm.candidates import Candidates

Choice = tuple[Selection, Tensor, bool]
"""A selection, the candidates it was made from (its indices count in these), and whether nothing had to go."""


def choose(method: Pruner, pictures: list[Candidates], projector: Any, *, scope: str, crops: str) -> list[Choice]:
    """One choice a picture. With scope "image" one budget covers all its crops, with "crop" each crop has its own."""
    groups: list[tuple[int, Tensor, int]] = []
    members_of = []
    for i, picture in enumerate(pictures):
        members = torch.arange(len(picture.rows), device=picture.rows.device)
        if crops == "base":
            members = members[picture.crop == 0]
        members_of.append(members)
        if scope == "image":
            groups.append((i, members, 0))
        else:
            crop = picture.crop[members]
            groups += [(i, members[crop == c], int(c)) for c in crop.unique()]
    selections = select_groups(method, pictures, groups, projector)
    choices = []
    for i, (picture, members) in enumerate(zip(pictures, members_of, strict=True)):
        mine = [(g[1], s) for g, s in zip(groups, selections, strict=True) if g[0] == i]
        everything = all(len(s.indices) == len(m) and s.merged is None for m, s in mine)
        untouched = everything and len(members) == len(picture.rows)
        choices.append((joined(mine, members), members, untouched))
    return choices


def select_groups(
    method: Pruner, pictures: list[Candidates], groups: list[tuple[int, Tensor, int]], projector: Any
) -> list[Selection]:
    """Select in each group of candidates; groups of one size go together."""
    results: dict[int, Selection] = {}
    sizes: dict[int, list[int]] = {}
    for g, (_, members, _) in enumerate(groups):
        sizes.setdefault(len(members), []).append(g)
    for these in sizes.values():
        parts = [inputs(pictures[i], members, crop) for i, members, crop in (groups[g] for g in these)]
        tokens, attention, hidden, keys = (torch.stack(part) for part in zip(*parts, strict=True))
        states = EncoderStates(hidden, keys, projector, cls=hidden.shape[1] > tokens.shape[1])
        batch = method.select(tokens, attention, states)
        for b, g in enumerate(these):
            results[g] = batch.picture(b)
    return [results[g] for g in range(len(groups))]


def inputs(picture: Candidates, members: Tensor, crop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, attention, hidden states and keys of some candidates, with the CLS token of one crop in front."""
    hidden = torch.cat([picture.cls_hidden[crop], picture.hidden[members]])
    keys = torch.cat([picture.cls_keys[crop], picture.keys[members]])
    return picture.whole[picture.rows[members]], picture.attention[members], hidden, keys


def joined(parts: list[tuple[Tensor, Selection]], members: Tensor) -> Selection:
    """The selections of a picture's groups as one, its indices and labels counted over all `members`."""
    if len(parts) == 1:
        return parts[0][1]
    place = {int(m): i for i, m in enumerate(members.tolist())}
    indices, labels, start = [], torch.full_like(members, -1), 0
    for group, selection in parts:
        at = torch.tensor([place[int(m)] for m in group.tolist()], device=members.device)
        indices.append(torch.where(selection.indices < 0, -1, at[selection.indices.clamp(min=0)]))
        if selection.labels is not None:
            labels[at] = torch.where(selection.labels < 0, -1, selection.labels + start)
        start += len(selection.indices)

    def cat(name: str) -> Tensor | None:
        found = [getattr(selection, name) for _, selection in parts]
        return None if any(part is None for part in found) else torch.cat(found)

    tokens = cat("tokens")
    assert tokens is not None
    with_labels = parts[0][1].labels is not None
    return Selection(
        tokens, torch.cat(indices), labels if with_labels else None, cat("centroids"), cat("alpha"), cat("merged")
    )
