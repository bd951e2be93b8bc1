"""Which tokens of which images: budgets over whole images or single crops, batched where sizes agree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from clustrs.models.adapters.base import VisualTokens
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import EncoderStates, Layout, Selection
from clustrs.validation import Scope


def select_tokens(method: Pruner, images: Sequence[VisualTokens], scope: Scope) -> list[tuple[Selection, bool]]:
    """A selection for each image, and whether nothing had to go.

    With scope "image" one budget covers all crops of an image, with "crop" each crop has its own. A video has one.
    """
    for need, words in (("hidden", "hidden states"), ("keys", "keys")):
        for image in images:
            if need in method.requirements() and getattr(image, need) is None:
                raise ValueError(
                    f"{method.name} needs the {words} of the vision tower's tokens: {image.missing_states_reason}"
                )
    groups: list[tuple[int, Tensor | None, int]] = []
    for i, image in enumerate(images):
        if scope == "image" or image.modality == "video" or len(image.grids) == 1:
            groups.append((i, None, 0))
        else:
            tile = image.layout.tile
            tiles = dict.fromkeys(tile.tolist())  # as their tokens stand in the prompt, which tile 0 may end
            groups += [(i, (tile == t).nonzero()[:, 0], t) for t in tiles]
    selections = _select_groups(method, images, groups)
    results = []
    for i, image in enumerate(images):
        parts = [(g[1], s) for g, s in zip(groups, selections, strict=True) if g[0] == i]
        n = len(image.candidates)
        everything = all(
            len(s.indices) == (n if members is None else len(members)) and s.merged is None for members, s in parts
        )
        results.append((_joined(parts, n), everything))
    return results


def _select_groups(
    method: Pruner, images: Sequence[VisualTokens], groups: list[tuple[int, Tensor | None, int]]
) -> list[Selection]:
    """Select in each group of candidates; groups of one size go together."""
    results: dict[int, Selection] = {}
    sizes: dict[int, list[int]] = {}
    for g, (i, members, _) in enumerate(groups):
        sizes.setdefault(len(images[i].candidates if members is None else members), []).append(g)
    for batch in sizes.values():
        parts = [_inputs(images[groups[g][0]], groups[g][1], groups[g][2]) for g in batch]
        tokens, scores, tile, y, x, hidden, keys = (
            None if part[0] is None else torch.stack(part) for part in zip(*parts, strict=True)
        )
        assert tokens is not None
        assert tile is not None
        assert y is not None
        assert x is not None
        cls = any(part is not None and part.shape[1] > tokens.shape[1] for part in (hidden, keys))
        states = EncoderStates(hidden, keys, images[groups[batch[0]][0]].project, cls)
        selection = method.select(tokens, scores, states, layout=Layout(tile, y, x))
        for b, g in enumerate(batch):
            results[g] = selection.image(b)
    return [results[g] for g in range(len(groups))]


def _inputs(image: VisualTokens, members: Tensor | None, tile: int) -> tuple[Tensor | None, ...]:
    """Tokens, scores, layout, hidden states and keys of some candidates, with the CLS token of one tile in front."""
    layout = image.layout

    def some(part: Tensor) -> Tensor:
        return part if members is None else part[members]

    def with_cls(cls: Tensor | None, part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return some(part) if cls is None else torch.cat([cls[tile], some(part)])

    hidden, keys = with_cls(image.cls_hidden, image.hidden), with_cls(image.cls_keys, image.keys)
    return some(image.tokens), some(image.scores), some(layout.tile), some(layout.y), some(layout.x), hidden, keys


def _joined(parts: list[tuple[Tensor | None, Selection]], n: int) -> Selection:
    """The selections of an image's groups as one, with indices and labels over all its n candidates."""
    if parts[0][0] is None:
        return parts[0][1]
    indices, start = [], 0
    labels = torch.full((n,), -1, device=parts[0][0].device)
    shares = None if parts[0][1].shares is None else parts[0][1].shares.new_zeros(n)
    for group, selection in parts:
        assert group is not None
        indices.append(torch.where(selection.indices < 0, -1, group[selection.indices.clamp(min=0)]))
        if selection.labels is not None:
            labels[group] = torch.where(selection.labels < 0, -1, selection.labels + start)
        if shares is not None and selection.shares is not None:
            shares[group] = selection.shares
        start += len(selection.indices)

    def cat(name: str) -> Tensor | None:
        values = [getattr(selection, name) for _, selection in parts]
        return None if any(value is None for value in values) else torch.cat(values)

    tokens = cat("tokens")
    assert tokens is not None
    grouped = parts[0][1].labels is not None
    return Selection(
        tokens, torch.cat(indices), labels if grouped else None, cat("centroids"), cat("alpha"), cat("merged"), shares
    )


def shrink_planes(planes: Tensor, selection: Selection) -> Tensor:
    """The rows [L, k, D] of the kept tokens in further planes [L, N, D] of features, shrunk as the tokens were: with
    their factors, towards the means of the same clusters with the same weights. What no method shrinks stays."""
    kept = planes[:, selection.indices.clamp(min=0)]
    if selection.alpha is None:
        return kept
    if selection.shares is None or selection.labels is None:
        raise ValueError("deepstack='shrunk': the method does not say how its centres are weighted; give 'raw'")
    weighted = planes.float() * selection.shares[:, None]
    means = torch.zeros_like(kept, dtype=weighted.dtype).index_add_(1, selection.labels, weighted)
    alpha = selection.alpha[:, None].to(weighted.dtype)
    return (alpha * kept + (1 - alpha) * means).to(planes.dtype)
