"""Select the tokens of a call's images: one budget for each image or crop, batched where sizes agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clustrs.models.adapters.base import Modality, VisualTokens
from clustrs.models.prompt import PrunedImage, take_slots
from clustrs.pruners.base import Pruner
from clustrs.pruners.inputs import Layout, PrunerInputs, Selection
from clustrs.validation import Deepstack, Scope


@dataclass(frozen=True)
class ImageSelection:
    """Kept tokens of one image or video, and where they lie. N is the number of tokens that could be kept.

    Attributes:
        selection: Tokens [k, D] and indices [k] of the survivors, labels and centroids where a method has clusters.
        scores: [N], attention scores.
        layout: Tile, row and column of each of the N tokens.
        grids: Height and width of each tile in tokens; tile 0 is the whole image, or the first frame.
        placeholders: Number of visual tokens without pruning.
        kept: Number of visual tokens that the language model read.
        columns: How many of the tiles after the first lie side by side, where the family says so.
        modality: "image" or "video".
    """

    selection: Selection
    scores: Tensor
    layout: Layout
    grids: list[tuple[int, int]]
    placeholders: int
    kept: int
    columns: int | None = None
    modality: Modality = "image"


def prune_images(
    method: Pruner, encoded: Sequence[VisualTokens], scope: Scope, deepstack: Deepstack, sizes: bool = False
) -> tuple[list[PrunedImage], list[ImageSelection]]:
    """Prune each image; one that several prompts share is selected from once. `sizes`: count what tokens stand for.

    Returns:
        What each image feeds to the language model, and what was kept of it.
    """
    different = list({id(image): image for image in encoded}.values())
    chosen = select_tokens(method, different, scope, sizes)
    results = {
        id(image): (_pruned(image, selection, everything, deepstack), selection)
        for image, (selection, everything) in zip(different, chosen, strict=True)
    }
    kept, last = [], []
    for image in encoded:
        tokens, selection = results[id(image)]
        kept.append(tokens)
        last.append(
            ImageSelection(
                selection=selection.map(torch.Tensor.detach),
                scores=image.scores,
                layout=image.layout,
                grids=image.grids,
                placeholders=image.slots,
                kept=len(tokens.features),
                columns=image.columns,
                modality=image.modality,
            )
        )
    return kept, last


def _pruned(image: VisualTokens, selection: Selection, everything: bool, deepstack: Deepstack) -> PrunedImage:
    """Assign placeholders to the tokens that are kept."""
    if everything:
        slots = image.first_slot + torch.arange(len(image.features), device=image.features.device)
        return PrunedImage(image.features, slots, slots, image.slots, image.planes)
    tokens, indices, sizes = selection.tokens, selection.indices, selection.sizes
    if image.runs is not None:
        order = image.runs[indices].argsort(stable=True)
        tokens, indices, sizes = tokens[order], indices[order], None if sizes is None else sizes[order]
    slots, own = take_slots(indices, image.candidates + image.first_slot, image.slots)
    planes = None if image.planes is None else plane_rows(image.planes[:, image.candidates], selection, deepstack)
    return PrunedImage(tokens, slots, own, image.slots, planes, sizes)


def select_tokens(
    method: Pruner, images: Sequence[VisualTokens], scope: Scope, sizes: bool = False
) -> list[tuple[Selection, bool]]:
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
    selections = _select_groups(method, images, groups, sizes)
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
    method: Pruner, images: Sequence[VisualTokens], groups: list[tuple[int, Tensor | None, int]], sizes: bool
) -> list[Selection]:
    """Select in each group of candidates; groups of one size go together."""
    results: dict[int, Selection] = {}
    alike: dict[int, list[int]] = {}
    for g, (i, members, _) in enumerate(groups):
        alike.setdefault(len(images[i].candidates if members is None else members), []).append(g)
    for batch in alike.values():
        parts = [_inputs(images[groups[g][0]], groups[g][1], groups[g][2]) for g in batch]
        tokens, scores, tile, y, x, hidden, keys = (
            None if part[0] is None else torch.stack(part) for part in zip(*parts, strict=True)
        )
        assert tokens is not None
        assert tile is not None
        assert y is not None
        assert x is not None
        cls = any(part is not None and part.shape[1] > tokens.shape[1] for part in (hidden, keys))
        project = images[groups[batch[0]][0]].project
        inputs = PrunerInputs(tokens, scores, Layout(tile, y, x), hidden, keys, project, cls)
        selection = method.select(inputs, sizes=sizes)
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
        tokens,
        torch.cat(indices),
        labels if grouped else None,
        cat("centroids"),
        cat("alpha"),
        cat("merged"),
        shares,
        cat("sizes"),
    )


def plane_rows(planes: Tensor, selection: Selection, deepstack: Deepstack = "raw") -> Tensor:
    """Return the rows [L, k, D] of the kept tokens in further planes [L, N, D] of features.

    Where a method says how its means are weighted, a token that is a mean has the mean of its members' rows, with the
    same weights. "shrunk": other rows are shrunk as the tokens were, with their factors towards those means.
    """
    kept, alpha = planes[:, selection.indices.clamp(min=0)], selection.alpha if deepstack == "shrunk" else None
    if selection.merged is not None and selection.shares is not None:
        alpha = (~selection.merged).float()
    if alpha is None:
        return kept
    if selection.shares is None or selection.labels is None:
        raise ValueError("deepstack must be 'raw' for a method that does not say how its centers are weighted")
    weighted = planes.float() * selection.shares[:, None]
    means = torch.zeros_like(kept, dtype=weighted.dtype).index_add_(1, selection.labels, weighted)
    alpha = alpha[:, None].to(weighted.dtype)
    return (alpha * kept + (1 - alpha) * means).to(planes.dtype)
