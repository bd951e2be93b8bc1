"""The visual tokens of each image before pruning: what the model would feed, what may be kept, and where it lies.

One function a family of models. Anyres images (several crops) are packed by the model's own code: scores and places
take the same way as the features, through unpadding and resizing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from clustrs.models import scoring as towers

REAL, CROP_BASE, Y, X, SCORE = range(5)
"""Channels of the map that is packed beside the features: a token or a newline, base crop or not, place, score."""
FIXED = 5


@dataclass(frozen=True)
class Candidates:
    """One image or video: N tokens that may be kept, out of the rows that the model would feed.

    `whole` [M, D] is what the unpruned model feeds for its `placeholders`, newlines included, or the base crop's part
    of that; `rows` [N] are the places of the candidates in it. `hidden` [N, H] and `keys` [N, K] belong to them,
    `cls_hidden` and `cls_keys` [crops, 1, ...] to the crops.
    """

    whole: Tensor
    placeholders: int
    rows: Tensor
    attention: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    crop: Tensor
    row: Tensor
    column: Tensor
    grids: list[tuple[int, int]]


@dataclass(frozen=True)
class Encoded:
    """What the tower and the scoring say of all crops: hidden states and keys, the CLS token apart."""

    scores: Tensor
    hidden: Tensor
    keys: Tensor
    cls_hidden: Tensor
    cls_keys: Tensor
    side: int


class Clock:
    """Seconds by part of the work. Waits for an accelerator, so that each part gets its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"vision": 0.0, "scoring": 0.0, "selection": 0.0}

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[part] += self._now() - start

    def _now(self) -> float:
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize()
        return perf_counter()


def setting(inner: nn.Module, arguments: dict[str, Any], name: str) -> Any:
    """An argument of the call, or the model's configured value."""
    given = arguments.get(name)
    return getattr(inner.config, name) if given is None else given


def feature_layers(inner: nn.Module, arguments: dict[str, Any]) -> list[int]:
    """The hidden states that the projector reads, side by side."""
    layer = setting(inner, arguments, "vision_feature_layer")
    return [layer] if isinstance(layer, int) else list(layer)


def encode(inner: Any, arguments: dict[str, Any], hidden_states: tuple[Tensor, ...]) -> Encoded:
    """Score the patches of all crops with the layer that the projector reads."""
    tower = inner.vision_tower
    cls = towers.has_cls(tower)
    strategy = setting(inner, arguments, "vision_feature_select_strategy")
    if (strategy == "default") != cls:
        other = "default" if cls else "full"
        raise ValueError(f"vision_feature_select_strategy={strategy!r} does not suit this tower: give {other!r}")
    chosen = feature_layers(inner, arguments)
    layer, at = towers.layer_before(tower, chosen[-1])
    scores, keys = towers.look(layer, hidden_states[at], cls)
    hidden = torch.cat([hidden_states[i] for i in chosen], -1)
    first = int(cls)
    config = inner.config.vision_config
    side = config.image_size // config.patch_size
    return Encoded(scores, hidden[:, first:], keys[:, first:], hidden[:, :first], keys[:, :first], side)


def maps(encoded: Encoded, crops: int, columns: int, start: int) -> Tensor:
    """Channels [crops, side * side, ...] of one image, to be packed as its features are.

    Crop 0 is the base, the others lie in a grid of `columns`, and have their places in that grid's coordinates.
    """
    side = encoded.side
    stop = start + crops
    place = torch.arange(side * side, device=encoded.scores.device)
    number = torch.arange(crops, device=place.device)[:, None]
    tile = (number - 1).clamp(min=0)
    y = place // side + (tile // columns) * side
    x = place % side + (tile % columns) * side
    base = (number == 0).expand_as(y)
    fixed = torch.stack([torch.ones_like(y), base, y, x], -1).float()
    scores, hidden, keys = (part[start:stop].float() for part in (encoded.scores, encoded.hidden, encoded.keys))
    return torch.cat([fixed, scores[..., None], hidden, keys], -1)


def unpack(packed: Tensor, whole: Tensor, encoded: Encoded, crops: int, columns: int, start: int) -> Candidates:
    """The candidates of one image from its packed channels [M, ...]."""
    rows = (packed[:, REAL] > 0).nonzero()[:, 0]
    real = packed[rows]
    side = encoded.side
    base = real[:, CROP_BASE] > 0.5
    y, x = real[:, Y].round().long(), real[:, X].round().long()
    crop = torch.where(base, 0, 1 + (y // side) * columns + x // side)
    grids = [(side, side)] * crops
    width = encoded.hidden.shape[-1]
    return Candidates(
        whole,
        len(packed),
        rows,
        real[:, SCORE],
        real[:, FIXED : FIXED + width].to(encoded.hidden.dtype),
        real[:, FIXED + width :],
        encoded.cls_hidden[start : start + crops],
        encoded.cls_keys[start : start + crops],
        crop,
        torch.where(base, y, y % side),
        torch.where(base, x, x % side),
        grids,
    )


@contextmanager
def recorded_packing(inner: Any) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Notes the arguments with which the model packs its crops, to pack something else in the same way."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    original = inner.pack_image_features

    def pack(image_features: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((image_features, {"args": args, "kwargs": kwargs}))
        return original(image_features, *args, **kwargs)

    inner.pack_image_features = pack
    try:
        yield calls
    finally:
        del inner.pack_image_features


FEATURE_ARGUMENTS = ("image_sizes", "vision_feature_layer", "vision_feature_select_strategy", "batch_num_images")


def image_features(inner: Any, arguments: dict[str, Any]) -> Any:
    """The model's own image features, with all hidden states of the tower."""
    given = {name: arguments[name] for name in FEATURE_ARGUMENTS if arguments.get(name) is not None}
    return inner.get_image_features(pixel_values=arguments["pixel_values"], return_dict=True, **given)


def single_crop(inner: Any, arguments: dict[str, Any], clock: Clock) -> list[Candidates]:
    """LLaVA-1.5: one crop a image, no newlines."""
    with clock.time("vision"):
        out = image_features(inner, arguments)
    with clock.time("scoring"):
        encoded = encode(inner, arguments, out.hidden_states)
        every = [maps(encoded, 1, 1, i)[0] for i in range(len(out.pooler_output))]
        return [
            unpack(m, whole, encoded, 1, 1, i)
            for i, (m, whole) in enumerate(zip(every, out.pooler_output, strict=True))
        ]


def many_crops(inner: Any, arguments: dict[str, Any], clock: Clock) -> list[Candidates]:
    """LLaVA-NeXT and LLaVA-OneVision: a base crop, and a grid of crops with newlines."""
    with clock.time("vision"), recorded_packing(inner) as calls:
        out = image_features(inner, arguments)
    with clock.time("scoring"), torch.no_grad():
        encoded = encode(inner, arguments, out.hidden_states)
        ((crops_of, call),) = calls
        counts = [len(crops) for crops in crops_of]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        columns = [grid_columns(inner, size, n) for size, n in zip(arguments["image_sizes"], counts, strict=True)]
        channels = [maps(encoded, n, c, s) for n, c, s in zip(counts, columns, starts, strict=True)]
        kwargs = {**call["kwargs"], "image_newline": channels[0].new_full((channels[0].shape[-1],), -1)}
        packed, _ = inner.pack_image_features(channels, *call["args"], **kwargs)
        parts = zip(packed, out.pooler_output, counts, columns, starts, strict=True)
        return [unpack(p, whole, encoded, n, c, s) for p, whole, n, c, s in parts]


def base_crops(inner: Any, arguments: dict[str, Any], clock: Clock) -> list[Candidates]:
    """LLaVA-NeXT and LLaVA-OneVision with the base crops alone: only these go through the tower."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    config = inner.config
    counts = [
        image_size_to_num_patches(size, config.image_grid_pinpoints, config.vision_config.image_size)
        for size in arguments["image_sizes"]
    ]
    if arguments.get("batch_num_images") is not None:  # images that come together have no crops but the base
        together = [int(n) for n in arguments["batch_num_images"] for _ in range(int(n))]
        counts = [count if n == 1 else 1 for count, n in zip(counts, together, strict=True)]
    pixels = arguments["pixel_values"]
    if pixels.dim() == 4:
        starts = [sum(counts[:i]) for i in range(len(counts))]
        pixels = pixels[starts]
    else:
        pixels = pixels[:, 0]
    with clock.time("vision"):
        hidden_states = inner.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        first = int(towers.has_cls(inner.vision_tower))
        read = [hidden_states[i][:, first:] for i in feature_layers(inner, arguments)]
        features = inner.multi_modal_projector(torch.cat(read, -1))
    with clock.time("scoring"), torch.no_grad():
        encoded = encode(inner, arguments, hidden_states)
        more = {"vision_feature_select_strategy": setting(inner, arguments, "vision_feature_select_strategy")}
        if hasattr(config, "vision_aspect_ratio"):
            more = {"vision_aspect_ratio": config.vision_aspect_ratio}
        shapes = [encoded.scores.new_zeros(count, encoded.side**2, 1) for count in counts]
        _, lengths = inner.pack_image_features(
            shapes, arguments["image_sizes"], image_newline=encoded.scores.new_zeros(1), **more
        )
        images = [unpack(maps(encoded, 1, 1, i)[0], features[i], encoded, 1, 1, i) for i in range(len(counts))]
        return [replace(p, placeholders=int(n)) for p, n in zip(images, lengths, strict=True)]


def grid_columns(inner: Any, image_size: Any, crops: int) -> int:
    """How many crops lie side by side in a image of some height and width."""
    if crops == 1:
        return 1
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    _, columns = get_anyres_image_grid_shape(
        image_size, inner.config.image_grid_pinpoints, inner.config.vision_config.image_size
    )
    return int(columns)


def video_frames(inner: Any, arguments: dict[str, Any], clock: Clock) -> list[Candidates]:
    """LLaVA-OneVision's videos: pooled frames, one newline at the end. A frame stands as a crop.

    Pooling mixes places, so these are counted anew; scores, hidden states and keys are pooled as the features are.
    """
    videos = arguments["pixel_values_videos"]
    with clock.time("vision"):
        given = {n: arguments[n] for n in FEATURE_ARGUMENTS[1:3] if arguments.get(n) is not None}
        out = inner.get_video_features(videos, return_dict=True, **given)
    with clock.time("scoring"), torch.no_grad():
        encoded = encode(inner, arguments, out.hidden_states)
        count, frames = videos.shape[:2]
        result = []
        for i in range(count):
            pooled = inner.apply_pooling(maps(encoded, frames, 1, i * frames))
            side = int(pooled.shape[1] ** 0.5)
            rows = torch.arange(frames * side * side, device=pooled.device)
            flat = pooled.flatten(0, 1)
            whole = out.pooler_output[i]
            if len(whole) == len(rows):  # up to transformers 5.17 the newline is added by the model's forward
                whole = torch.cat([whole, inner.image_newline[None].to(whole)])
            width = encoded.hidden.shape[-1]
            result.append(
                Candidates(
                    whole,
                    len(whole),
                    rows,
                    flat[:, SCORE],
                    flat[:, FIXED : FIXED + width].to(encoded.hidden.dtype),
                    flat[:, FIXED + width :],
                    encoded.cls_hidden[i * frames : (i + 1) * frames],
                    encoded.cls_keys[i * frames : (i + 1) * frames],
                    rows // (side * side),
                    rows % (side * side) // side,
                    rows % side,
                    [(side, side)] * frames,
                )
            )
        return result


FAMILIES: dict[str, Callable[[Any, dict[str, Any], Clock], list[Candidates]]] = {
    "llava": single_crop,
    "llava_next": many_crops,
    "llava_onevision": many_crops,
}
"""How to open the images of a model, by `config.model_type`."""


def opener(kind: str, crops: str) -> Callable[[Any, dict[str, Any], Clock], list[Candidates]]:
    """How the images of a family of models are opened: with "all" crops, or with the "base" ones alone."""
    return base_crops if crops == "base" and kind != "llava" else FAMILIES[kind]
