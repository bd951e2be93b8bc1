"""Gemma 4: images of any shape within a budget of tokens, each token the mean of 3 x 3 patches; videos frame by frame.

The processor pads the patches of every image to the budget. Padding attends to nothing that counts and gets no score.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clustrs.models.adapters import base
from clustrs.models.adapters.base import Adapter, Modality, PatchGrid, Source, VisualTokens, register_adapter, required
from clustrs.models.scoring import StageTimer
from clustrs.pruners.inputs import Layout
from clustrs.validation import Crops


@register_adapter
class Gemma4Adapter(Adapter):
    """Gemma 4 with a vision tower: E2B, E4B, 26B-A4B, 31B."""

    model_types = ("gemma4",)
    auto_positions = "compact"  # trained on budgets of 70 to 1120 tokens, prompts of many lengths; as LLaVA-OneVision
    tokens_per_image = "up to a budget of 70, 140, 280, 560 or 1120"
    tested = "several images, batches, video, sound"
    takes_video = "yes"
    pixel_arguments = ("pixel_values", "pixel_values_videos")
    vision_kwargs = ("image_position_ids", "video_position_ids", "num_frames_per_video")
    takes_grid = True
    nested_images = True
    written_text = r"\d\d:\d\d"

    def scoring_layer(self) -> Any:
        if self.inner.vision_tower is None:
            raise ValueError("this Gemma 4 has no vision tower (config.vision_config is None): nothing to prune")
        encoder = self.inner.vision_tower.encoder
        return encoder.layers[encoder.config.num_hidden_layers - 1].self_attn

    def attention_layers(self) -> Any:
        encoder = self.inner.vision_tower.encoder
        return [layer.self_attn for layer in encoder.layers[: encoder.config.num_hidden_layers]]

    def encode(self, inputs: dict[str, Any], timer: StageTimer, crops: Crops = "all") -> list[VisualTokens]:
        """Encode images, then videos, whose frames come stacked (transformers 5.18), or in one row with counts."""
        encoded = []
        pixels, videos = inputs.get("pixel_values"), inputs.get("pixel_values_videos")
        if pixels is not None:
            positions = required(inputs, "image_position_ids", "pixel_values")
            encoded += self.encode_frames(pixels, positions, [1] * len(pixels), "image", timer)
        if videos is not None:
            positions = required(inputs, "video_position_ids", "pixel_values_videos")
            counts = self.frame_counts(inputs)
            if videos.dim() == 4:
                videos, positions = videos.flatten(0, 1), positions.flatten(0, 1)
            encoded += self.encode_frames(videos, positions, counts, "video", timer)
        return encoded

    def frame_counts(self, inputs: dict[str, Any]) -> list[int]:
        videos = inputs["pixel_values_videos"]
        if videos.dim() == 4:
            return [videos.shape[1]] * len(videos)
        counts = [int(n) for n in required(inputs, "num_frames_per_video", "pixel_values_videos")]
        if sum(counts) != len(videos):
            raise ValueError(f"num_frames_per_video={counts}: pixel_values_videos has {len(videos)} frames")
        return counts

    def image_sources(self, inputs: dict[str, Any]) -> list[Source]:
        positions = required(inputs, "image_position_ids", "pixel_values")
        return [Source("image", slots) for slots in self.pooled_counts(positions)]

    def video_sources(self, inputs: dict[str, Any]) -> list[Source]:
        if inputs.get("pixel_values_videos") is None:
            return []
        positions = required(inputs, "video_position_ids", "pixel_values_videos").flatten(0, -3)
        counts, slots = self.frame_counts(inputs), self.pooled_counts(positions)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [Source("video", sum(slots[i : i + n]), n) for i, n in zip(starts, counts, strict=True)]

    def pooled_counts(self, positions: Tensor) -> list[int]:
        """Return the number of tokens of each frame with patches at positions [F, P, 2]."""
        patches = (positions != -1).all(-1).sum(-1)
        return [int(n) // self.config.vision_config.pooling_kernel_size**2 for n in patches]

    def take_frames(self, inputs: dict[str, Any], video: int, frames: slice) -> dict[str, Any]:
        names, counts = ("pixel_values_videos", "video_position_ids"), self.frame_counts(inputs)
        parts = {name: inputs[name].flatten(0, -3).split(counts)[video][frames] for name in names}
        return {**parts, "num_frames_per_video": [len(parts[names[0]])]}

    def encode_frames(
        self, pixels: Tensor, positions: Tensor, counts: list[int], modality: Modality, timer: StageTimer
    ) -> list[VisualTokens]:
        """Encode patches [F, P, pixels] at positions [F, P, 2] (x, y; -1: padding); `counts` are frames per image."""
        valid, kernel = (positions != -1).all(-1), self.config.vision_config.pooling_kernel_size
        pooling = [pooling_order(frame, real, kernel) for frame, real in zip(positions, valid, strict=True)]
        with timer.time("vision"), self.recording(self.scoring_layer(), "received", timer, valid) as recorder:
            out = self.inner.get_image_features(pixels, positions, return_dict=True)
        with timer.time("scoring"):
            more = base.recorded_more(recorder)
            scores, keys, *further = (
                [part[i, order].unflatten(0, (-1, kernel**2)).mean(1) for i, (order, _) in enumerate(pooling)]
                for part in (*base.recorded(recorder), *more.values())
            )
            hidden = out.last_hidden_state.split([len(features) for features in out.pooler_output])
            images, start = [], 0
            for count in counts:
                some = slice(start, start + count)
                start += count
                grids = [grid for _, grid in pooling[some]]
                cells = [torch.arange(height * width, device=pixels.device) for height, width in grids]
                columns = torch.cat([torch.full_like(cell, w) for cell, (_, w) in zip(cells, grids, strict=True)])
                tile = torch.cat([torch.full_like(cell, i) for i, cell in enumerate(cells)])
                cell, features = torch.cat(cells), torch.cat(list(out.pooler_output[some]))
                own = {name: torch.cat(part[some]) for name, part in zip(more, further, strict=True)}
                others = {
                    "layout": Layout(tile, cell // columns, cell % columns),
                    "grids": grids,
                    "hidden": torch.cat(hidden[some]),
                    "keys": torch.cat(keys[some]),
                    "more": base.split_more(own),
                    "project": self.inner.embed_vision,
                    "modality": modality,
                }
                images.append(VisualTokens.on_grid(features, torch.cat(scores[some]), grids[0], **others))
            return images

    def projectors(self) -> list[nn.Module]:
        return [self.inner.embed_vision]

    def encode_blank(self, grid: PatchGrid | None) -> None:
        assert grid is not None
        self.scoring_layer()
        vision = self.config.vision_config
        unit, patches = vision.pooling_kernel_size**2, grid.padded
        grid.check(vision.pooling_kernel_size)
        if patches is None or patches < grid.height * grid.width or patches % unit:
            what = f"pixel_values.shape[-2], a multiple of {unit} and at least height times width"
            raise ValueError(f"grid.padded must be {what}, got {patches!r}")
        cells = torch.cartesian_prod(torch.arange(grid.height), torch.arange(grid.width)).flip(-1)
        positions = torch.full((grid.frames, patches, 2), -1)
        positions[:, : len(cells)] = cells
        pixels = torch.zeros(grid.frames, patches, 3 * vision.patch_size**2, device="meta")
        self.inner.get_image_features(pixels, positions)


def pooling_order(positions: Tensor, valid: Tensor, kernel: int) -> tuple[Tensor, tuple[int, int]]:
    """Indices of the patches at positions [P, 2], those of one token after those of another, and the grid of tokens."""
    patches = valid.nonzero()[:, 0]
    x, y = positions[patches].unbind(-1)
    columns, rows = ((int(axis.max()) + 1 if len(axis) else 0) for axis in (x, y))
    if not len(patches) or columns % kernel or rows % kernel or columns * rows != len(patches):
        found = f"{len(patches)} patches in {rows} rows and {columns} columns"
        raise ValueError(f"position ids of an image: {found}, expected a full grid, sides multiples of {kernel}")
    token = y // kernel * (columns // kernel) + x // kernel
    return patches[token.argsort(stable=True)], (rows // kernel, columns // kernel)
