"""Select the tokens of a call's images: one budget for each image or crop, batched where sizes agree. Long videos: in
chunks of frames, then once more from what those have left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clustrs.models.adapters.base import Adapter, Modality, Source, VisualTokens
from clustrs.models.prompt import PrunedImage, rows_of_images, take_slots
from clustrs.models.scoring import StageTimer
from clustrs.pruners.base import Pruner, count_sizes
from clustrs.pruners.inputs import FURTHER, Layout, PrunerInputs, Selection
from clustrs.validation import Crops, Deepstack, Scope


@dataclass(frozen=True)
class ImageSelection:
    """Kept tokens of one image or video, and where they lie. N is the number of tokens that could be kept; of a video
    in chunks, those that the chunks have left.

    Attributes:
        selection: Tokens [k, D] and indices [k] of the survivors, labels and centroids where a method has clusters.
        scores: [N], attention scores.
        layout: Tile, row and column of each of the N tokens.
        grids: Height and width of each tile in tokens; tile 0 is the whole image, or the first frame.
        placeholders: Number of visual tokens without pruning.
        kept: Number of visual tokens that the language model read.
        columns: How many of the tiles after the first lie side by side, where the family says so.
        modality: "image" or "video".
        average: Visual tokens as a mean over the layers of the language model, where a method prunes inside it; `kept`
            and `selection` are then those of its last layer.
        entered: Number of visual tokens in the prompt that it read, if not `kept`.
    """

    selection: Selection
    scores: Tensor
    layout: Layout
    grids: list[tuple[int, int]]
    placeholders: int
    kept: int
    columns: int | None = None
    modality: Modality = "image"
    average: float | None = None
    entered: int | None = None


def prune_images(
    method: Pruner,
    encoded: Sequence[VisualTokens],
    scope: Scope,
    deepstack: Deepstack,
    sizes: bool = False,
    questions: Sequence[Tensor] | None = None,
    rows: Sequence[int] | None = None,
    check: bool | None = None,
) -> tuple[list[PrunedImage], list[ImageSelection]]:
    """Return what each image feeds to the language model, and what was kept of it; an image that several prompts share
    is selected from once, or once for each of their `questions`. `sizes`: count what tokens stand for. With `rows`, the
    prompt of each image, images of one prompt are frames that share a budget."""
    asked = [None] * len(encoded) if questions is None else questions
    keys = [
        (id(image), id(one)) if rows is None else (i, 0)
        for i, (image, one) in enumerate(zip(encoded, asked, strict=True))
    ]
    pairs = dict(zip(keys, zip(encoded, asked, strict=True), strict=True))
    different = [image for image, _ in pairs.values()]
    given = None if questions is None else [one for _, one in pairs.values() if one is not None]
    results = {}
    if rows is None:
        selections = select_tokens(method, different, scope, sizes, given, check)
    else:
        selections = select_frames(method, different, rows, sizes, given)
    for key, image, (selection, everything) in zip(pairs, different, selections, strict=True):
        if everything:
            counts = None if image.sizes is None else selection.sizes
            pruned = PrunedImage(image.features, image.places, image.places, image.slots, image.planes, counts)
        else:
            tokens, indices, counts = selection.tokens, selection.indices, selection.sizes
            if image.runs is not None:
                order = image.runs[indices].argsort(stable=True)
                tokens, indices, counts = tokens[order], indices[order], None if counts is None else counts[order]
            slots, own = take_slots(indices, image.places[image.candidates], image.slots)
            planes = image.planes
            if planes is not None:
                planes = plane_rows(planes[:, image.candidates], selection, deepstack)
            pruned = PrunedImage(tokens, slots, own, image.slots, planes, counts)
        same = {name: getattr(image, name) for name in ("scores", "layout", "grids", "columns", "modality")}
        kept = ImageSelection(selection.map(Tensor.detach), placeholders=image.slots, kept=len(pruned.features), **same)
        results[key] = pruned, kept
    every = [results[key] for key in keys]
    return [pruned for pruned, _ in every], [kept for _, kept in every]


def survivors(
    image: VisualTokens, pruned: PrunedImage, last: ImageSelection, left: Tensor, average: float
) -> ImageSelection:
    """Narrow what was kept of an image to the tokens `left` of those that the language model read first."""
    candidate = torch.full((image.slots,), -1, device=left.device)
    candidate[image.places[image.candidates]] = torch.arange(len(image.candidates), device=left.device)
    indices = candidate[pruned.own[left]]
    known = indices >= 0  # the others end lines, or stand for the whole image
    selection = Selection(pruned.features[left[known]].detach(), indices[known])
    return replace(last, selection=selection, kept=len(left), average=average, entered=last.kept)


def select_tokens(
    method: Pruner,
    images: Sequence[VisualTokens],
    scope: Scope,
    sizes: bool = False,
    questions: Sequence[Tensor] | None = None,
    check: bool | None = None,
) -> list[tuple[Selection, bool]]:
    """Return a selection for each image, and whether nothing had to go.
    `questions` [T, D] are those of the images, for a method that reads them. `check`: as in `select`."""
    named = {"hidden": "hidden states", "received": "received attention"}
    for need in ("hidden", "keys", *FURTHER):
        for image in images:
            if need in method.requirements() and getattr(image, need, image.more.get(need)) is None:
                words = named.get(need, need.replace("_", " "))
                raise ValueError(
                    f"{method.name} needs the {words} of the vision tower's tokens: {image.missing_states_reason}"
                )
    groups: list[tuple[int, Tensor | None, int]] = []  # image, its candidates in the group (None: all), tile
    alike: dict[tuple[int, bool, bool], list[int]] = {}  # groups of one size are selected from together
    for i, image in enumerate(images):
        if scope != ("frame" if image.modality == "video" else "crop") or len(image.grids) == 1:
            groups.append((i, None, 0))
        else:
            tile = image.layout.tile
            tiles = dict.fromkeys(tile.tolist())  # as their tokens stand in the prompt, which tile 0 may end
            groups += [(i, (tile == t).nonzero()[:, 0], t) for t in tiles]
    for g, (i, members, _) in enumerate(groups):
        size = len(images[i].candidates if members is None else members)
        alike.setdefault((size, images[i].layout.frame is None, images[i].sizes is None), []).append(g)
    selected: dict[int, Selection] = {}
    for batch in alike.values():
        parts = [_inputs(images[groups[g][0]], *groups[g][1:]) for g in batch]
        inputs: dict[str, Any] = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        n, before, chosen = inputs["tokens"].shape[1], inputs.pop("sizes", None), method
        if before is not None and (scope == "frame" or isinstance(method.keep, float)):
            chosen = replace(method, keep=1.0)  # the chunks have dropped what had to go
        inputs["cls"] = any(inputs[name].shape[1] > n for name in ("hidden", "keys") if name in inputs)
        inputs["layout"] = Layout(**{name: inputs.pop(name) for name in ("tile", "y", "x", "frame") if name in inputs})
        if questions is not None:
            asked = [questions[groups[g][0]].to(inputs["tokens"].device) for g in batch]
            inputs["question"] = nn.utils.rnn.pad_sequence(asked, batch_first=True)
            real = [torch.ones_like(one[:, 0], dtype=torch.bool) for one in asked]
            inputs["question_mask"] = nn.utils.rnn.pad_sequence(real, True)
        project = images[groups[batch[0]][0]].project
        selection = chosen.select(PrunerInputs(**inputs, projector=project), sizes=sizes, check=check)
        if sizes and before is not None:
            selection = replace(selection, sizes=count_sizes(selection, inputs["tokens"], before))
        selected.update({g: selection.image(b) for b, g in enumerate(batch)})
    results = []
    for i, image in enumerate(images):
        own = [(group[1], selected[g]) for g, group in enumerate(groups) if group[0] == i]
        n = len(image.candidates)
        all_kept = [len(s.indices) == (n if some is None else len(some)) and s.merged is None for some, s in own]
        results.append((_joined(own, n), all(all_kept)))
    return results


def select_frames(
    method: Pruner,
    images: Sequence[VisualTokens],
    rows: Sequence[int],
    sizes: bool = False,
    questions: Sequence[Tensor] | None = None,
) -> list[tuple[Selection, bool]]:
    """Do `select_tokens` with one budget for all images of a prompt: they are the frames of a video. Videos have their
    own. Clusters may lie across frames: the parts have no labels and centers."""
    videos: dict[tuple[int, int], list[int]] = {}
    for i, (image, row) in enumerate(zip(images, rows, strict=True)):
        videos.setdefault((row, 0 if image.modality == "image" else 1 + i), []).append(i)
    groups = list(videos.values())
    joined = [join_frames([images[i] for i in group]) if len(group) > 1 else images[group[0]] for group in groups]
    asked = None if questions is None else [questions[group[0]] for group in groups]
    results: dict[int, tuple[Selection, bool]] = {}
    for group, (selection, everything) in zip(
        groups, select_tokens(method, joined, "image", sizes, asked), strict=True
    ):
        if len(group) == 1:
            results[group[0]] = selection, everything
            continue
        start = 0
        parts: dict[str, Any] = {
            name: getattr(selection, name) for name in ("tokens", "indices", "alpha", "merged", "sizes")
        }
        for i in group:
            stop = start + len(images[i].candidates)
            own = (selection.indices >= start) & (selection.indices < stop)
            own = own | (selection.indices < 0) if start == 0 else own  # a CLS token stands in the first frame
            part: dict[str, Any] = {name: v if v is None else v[own] for name, v in parts.items()}
            part["indices"] = torch.where(part["indices"] < 0, -1, part["indices"] - start)
            results[i] = Selection(**part), everything
            start = stop
    return [results[i] for i in range(len(images))]


def join_frames(images: Sequence[VisualTokens]) -> VisualTokens:
    """Return several images, or chunks of a video, as one video: the candidates of all, in order. A newline at the end
    of the last chunk stays if nothing was dropped."""
    first, last, tiles, frames, places, start = images[0], images[-1], [], [], [], 0
    for number, image in enumerate(images):
        tiles.append(image.layout.tile + sum(len(before.grids) for before in images[:number]))
        chunk = image.modality == "video"
        frames.append(tiles[-1] if chunk else torch.full_like(image.layout.tile, number))
        places.append(start + image.places[image.candidates])
        start += sum(height * width for height, width in image.grids)
    y, x = (torch.cat([getattr(image.layout, name) for image in images]) for name in ("y", "x"))

    def together(name: str) -> Any:
        parts = [getattr(image, name) for image in images]
        return None if any(part is None for part in parts) else torch.cat(parts)

    states = {name: together(name) for name in ("hidden", "keys", "cls_hidden", "cls_keys", "scores")}
    features = torch.cat([image.tokens for image in images])
    planes = [image.planes[:, image.candidates] for image in images if image.planes is not None]
    n, sizes = len(features), None
    if any(image.sizes is not None for image in images):
        sizes = torch.cat([torch.ones_like(i.candidates) if i.sizes is None else i.sizes for i in images])
    elif last.modality == "video" and len(last.features) > len(last.candidates):
        rest = slice(len(last.candidates), None)
        features = torch.cat([features, last.features[rest]])
        places.append(start + last.places[rest] - len(last.candidates))
    return VisualTokens(
        features=features,
        candidates=torch.arange(n, device=features.device),
        layout=Layout(torch.cat(tiles), y, x, torch.cat(frames)),
        grids=[grid for image in images for grid in image.grids],
        slots=start + last.slots - sum(height * width for height, width in last.grids),
        places=torch.cat(places),
        planes=torch.cat(planes, 1) if planes else None,
        sizes=sizes,
        more={name: torch.cat([image.more[name] for image in images]) for name in first.more},
        project=first.project,
        modality="video",
        missing_states_reason=first.missing_states_reason,
        **states,
    )


def narrow(image: VisualTokens, selection: Selection, deepstack: Deepstack) -> VisualTokens:
    """Return the tokens that a selection has left of an image, as it returned them, for a further selection: scores,
    states and place are those of the token that each stands for. CLS tokens are not among them."""
    order = selection.indices.argsort(stable=True)
    order = order[selection.indices[order] >= 0]
    rows = selection.indices[order]
    states = {name: getattr(image, name) for name in ("scores", "hidden", "keys", "runs")}
    own: dict[str, Any] = {name: part[rows] for name, part in states.items() if part is not None}
    for name in ("cls_hidden", "cls_keys"):  # not as a view that holds all tokens
        own[name] = None if getattr(image, name) is None else getattr(image, name).clone()
    layout: dict[str, Any] = {name: part if part is None else part[rows] for name, part in vars(image.layout).items()}
    planes = image.planes
    return replace(
        image,
        features=selection.tokens[order],
        candidates=torch.arange(len(rows), device=rows.device),
        places=image.places[image.candidates[rows]],
        layout=Layout(**layout),
        more={name: part[rows] for name, part in image.more.items()},
        planes=planes if planes is None else plane_rows(planes[:, image.candidates], selection, deepstack)[:, order],
        sizes=torch.ones_like(rows) if selection.sizes is None else selection.sizes[order],
        **own,
    )


def encode_chunks(
    method: Pruner,
    adapter: Adapter,
    inputs: dict[str, Any],
    timer: StageTimer,
    read: Callable[[Sequence[VisualTokens | Source]], Sequence[Tensor] | None],
    *,
    chunk: int,
    scope: Scope,
    crops: Crops,
    deepstack: Deepstack,
    sizes: bool,
) -> list[VisualTokens]:
    """Encode images and videos, videos `chunk` frames at a time: of each chunk only what the method keeps stays. Those
    of one chunk are encoded as ever, and images, unless scope="video" makes them frames. `read` returns questions."""
    stills = {name: part for name, part in inputs.items() if name != "pixel_values_videos"}
    moving = {name: part for name, part in inputs.items() if name != "pixel_values"}
    sources: list[Any] = []
    if inputs.get("pixel_values") is not None:
        sources += adapter.image_sources(stills) if scope == "video" else adapter.encode(stills, timer, crops)
    images = len(sources)
    sources += adapter.video_sources(moving)
    questions, encoded = read(sources), list(sources)

    def encode(given: dict[str, Any], owners: Sequence[int], whole: bool) -> list[VisualTokens]:
        parts = adapter.encode(given, timer, crops)
        if whole:
            return parts
        with timer.time("selection"):
            asked = None if questions is None else [questions[i] for i in owners]
            if scope == "video":
                selected = select_frames(method, parts, [0] * len(parts), sizes, asked)
            else:
                selected = select_tokens(method, parts, scope, sizes, asked)
            pairs = zip(parts, selected, strict=True)
            return [part if everything else narrow(part, kept, deepstack) for part, (kept, everything) in pairs]

    if scope == "video":
        prompts: dict[int, list[int]] = {}
        for i, row in enumerate(rows_of_images(inputs["input_ids"], adapter.placeholder("image"), sources[:images])):
            prompts.setdefault(row, []).append(i)
        for frames in prompts.values():
            for start in range(0, len(frames), chunk):
                some = frames[start : start + chunk]
                parts = encode({**stills, **adapter.take_images(stills, some)}, some, len(some) == len(frames))
                for i, part in zip(some, parts, strict=True):
                    encoded[i] = part
    for i, video in enumerate(sources[images:]):
        starts = range(0, video.frames, chunk)
        taken = [adapter.take_frames(moving, i, slice(start, start + chunk)) for start in starts]
        parts = [encode({**moving, **one}, [images + i], len(taken) == 1)[0] for one in taken]
        encoded[images + i] = parts[0] if len(parts) == 1 else join_frames(parts)
    return encoded


def _inputs(image: VisualTokens, members: Tensor | None, tile: int) -> dict[str, Tensor]:
    """Return inputs of some candidates by name; hidden states and keys have the CLS token of one tile in front."""
    parts = dict(vars(image.layout))
    parts |= {name: getattr(image, name) for name in ("tokens", "scores", "hidden", "keys", "sizes")} | image.more
    given = {name: part if members is None else part[members] for name, part in parts.items() if part is not None}
    for name, cls in (("hidden", image.cls_hidden), ("keys", image.cls_keys)):
        if name in given and cls is not None:
            given[name] = torch.cat([cls[tile], given[name]])
    return given


def _joined(parts: list[tuple[Tensor | None, Selection]], n: int) -> Selection:
    """The selections of an image's groups as one, with indices and labels over all its n candidates."""
    members, first = parts[0]
    if members is None:
        return first
    indices, start = [], 0
    labels = None if first.labels is None else torch.full((n,), -1, device=members.device)
    shares = None if first.shares is None else first.shares.new_zeros(n)
    for group, selection in parts:
        assert group is not None
        indices.append(torch.where(selection.indices < 0, -1, group[selection.indices.clamp(min=0)]))
        if labels is not None and selection.labels is not None:
            labels[group] = torch.where(selection.labels < 0, -1, selection.labels + start)
        if shares is not None and selection.shares is not None:
            shares[group] = selection.shares
        start += len(selection.indices)
    joined: dict[str, Any] = {}
    for name in ("tokens", "centroids", "alpha", "merged", "sizes"):
        values = [getattr(selection, name) for _, selection in parts]
        joined[name] = None if any(value is None for value in values) else torch.cat(values)
    return Selection(indices=torch.cat(indices), labels=labels, shares=shares, **joined)


def plane_rows(planes: Tensor, selection: Selection, deepstack: Deepstack = "raw") -> Tensor:
    """Return the rows [L, k, D] of the kept tokens in further planes [L, N, D] of features: of a merged token the mean
    of its members' rows, weighted as in the token; with "shrunk", of others a row shrunk as the token was."""
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
