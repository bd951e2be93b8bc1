"""Small random models of Qwen's families, and pruning done by hand: the oracle, which shares no code with the adapters.

A patch has 4 x 4 pixels and a token 2 x 2 patches, so an image of 40 x 56 pixels has 5 x 7 tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_models
from clustrs import Pruner, PrunerInputs, Selection
from clustrs.models.processors import IMAGE_ONLY
from clustrs.pruners.inputs import Layout

FAMILIES: tuple[str, ...] = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "qwen2_vl", "qwen3_vl_moe", "qwen3_5_moe")
CONFIGS = {
    "qwen3_vl": tf.Qwen3VLConfig,
    "qwen2_5_vl": tf.Qwen2_5_VLConfig,
    "qwen3_5": tf.Qwen3_5Config,
    "qwen2_vl": tf.Qwen2VLConfig,
    "qwen3_vl_moe": tf.Qwen3VLMoeConfig,
    "qwen3_5_moe": tf.Qwen3_5MoeConfig,
}
PATCH, MERGE = 4, 2
TOKEN = PATCH * MERGE
WINDOW = 2
"""Tokens along the side of a window of Qwen2.5-VL's tower."""


def vision_config(family: str) -> dict[str, Any]:
    shared = {"depth": 3, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": MERGE, "in_channels": 3}
    if family == "qwen2_vl":
        return {**shared, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    shared |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
    if family == "qwen2_5_vl":  # the last block attends within windows, so the scores are those of the one before
        return {**shared, "window_size": WINDOW * TOKEN, "fullatt_block_indexes": [0, 1], "tokens_per_second": 2}
    shared |= {"num_position_embeddings": 36}
    return {**shared, "deepstack_visual_indexes": [0, 1]} if family.startswith("qwen3_vl") else shared


def text_config(family: str, vocabulary: int) -> dict[str, Any]:
    partial = family.startswith("qwen3_5")
    sections = [4, 2, 2]
    config: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4 if partial else 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64 if partial else 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family.startswith("qwen2"):
        del config["head_dim"]
        config |= {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    if partial:
        config["rope_parameters"]["partial_rotary_factor"] = 0.25
        linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        config |= {**linear, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if family.endswith("moe"):
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config |= {"shared_expert_intermediate_size": 32} if partial else {}
    return config


def build(family: str, folder: Path) -> None:
    """Save a model and its processor. The weights are large, so that outputs depend on the images."""
    words = tiny_models.tokenizer()
    config = CONFIGS[family](
        vision_config=vision_config(family),
        text_config=text_config(family, len(words)),
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.unk_token_id,
        vision_end_token_id=words.unk_token_id,
    )
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 if "visual" in name and "qkv" in name else 4)
    images = tf.Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": TOKEN**2, "longest_edge": 100 * TOKEN**2}
    )
    processor = IMAGE_ONLY[family](images, words, chat_template=tiny_models.TEMPLATE)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


SERVED: dict[str, tuple[Any, ...]] = {
    "qwen2_vl": (tf.Qwen2VLConfig, tf.Qwen2VLProcessor, tf.Qwen2VLVideoProcessor),
    "qwen2_5_vl": (tf.Qwen2_5_VLConfig, tf.Qwen2_5_VLProcessor, tf.Qwen2VLVideoProcessor),
    "qwen3_vl": (tf.Qwen3VLConfig, tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
    "qwen3_vl_moe": (tf.Qwen3VLMoeConfig, tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
    "qwen3_5": (tf.Qwen3_5Config, tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
    "qwen3_5_moe": (tf.Qwen3_5MoeConfig, tf.Qwen3VLProcessor, tf.Qwen3VLVideoProcessor),
}


def served_tokenizer() -> Any:
    """The tokenizer with the special tokens that vLLM looks for."""
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    names |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    names |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    special = ["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(names.values())]
    return tiny_models.byte_tokenizer(special, names)


def served_config(family: str, words: Any) -> Any:
    vision: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE}
    vision |= {"in_channels": 3, "hidden_size": 64, "intermediate_size": 64, "out_hidden_size": 64}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    text: dict[str, Any] = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 64}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
    if family == "qwen2_5_vl":  # the last block attends within windows, so the scores are those of the one before
        vision |= {"window_size": WINDOW * TOKEN, "fullatt_block_indexes": [0, 1], "tokens_per_second": 2}
    elif family == "qwen2_vl":
        vision |= {"embed_dim": 64, "mlp_ratio": 2}
    else:
        vision |= {"num_position_embeddings": 36}
        text |= {"head_dim": 32}
        rope |= {"mrope_interleaved": True}
        if family.startswith("qwen3_vl"):
            vision |= {"deepstack_visual_indexes": [0, 1]}
        else:  # linear attention, and full attention in every fourth layer
            text |= {"num_hidden_layers": 4, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
            text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            rope |= {"partial_rotary_factor": 0.25}
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
        text |= {"shared_expert_intermediate_size": 32} if family == "qwen3_5_moe" else {}
    ids = {f"{name}_id": getattr(words, f"{name}_id") for name in ("image_token", "video_token")}
    ids |= {f"{name}_id": getattr(words, f"{name}_id") for name in ("vision_start_token", "vision_end_token")}
    return SERVED[family][0](vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)


def build_served(family: str, folder: Path) -> Path:
    """Save a model with its whole processor, videos included, as vLLM loads them; needs torchvision."""
    words = served_tokenizer()
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(served_config(family, words))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 if "visual" in name and "qkv" in name else 4)
    sizes = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "size": {"shortest_edge": TOKEN**2, "longest_edge": 100 * TOKEN**2},
    }
    _, processor, videos = SERVED[family]
    parts = {"image_processor": tf.Qwen2VLImageProcessor(**sizes)}
    if videos is tf.Qwen3VLVideoProcessor:  # bounded are all frames together
        sizes["size"] = {"shortest_edge": TOKEN**2, "longest_edge": 800 * TOKEN**2}
        mean = {name: getattr(parts["image_processor"], name) for name in ("image_mean", "image_std")}
        sizes |= mean  # vLLM normalizes videos as images; published checkpoints have one mean
    parts["video_processor"] = videos(**sizes)
    processor(tokenizer=words, chat_template="{{ messages }}", **parts).save_pretrained(folder)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    return folder


def transpose_experts(file: Path) -> None:
    """Write experts as published checkpoints have them, [experts, from, to]: transformers turns them when it loads, but
    not when it saves a model that it has not loaded."""
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def bright_square(height: int, width: int, y: int, x: int) -> Image.Image:
    """A dark image of some tokens, with one token bright."""
    pixels = np.full((height * TOKEN, width * TOKEN, 3), 10, np.uint8)
    pixels[y * TOKEN : (y + 1) * TOKEN, x * TOKEN : (x + 1) * TOKEN] = 250
    return Image.fromarray(pixels)


def video_inputs(config: Any, sizes: Sequence[tuple[int, int, int]], timestamps: bool) -> dict[str, Tensor]:
    """A prompt with videos of (frames, height, width) in tokens, as the processors write it: Qwen3's with words before
    each frame, Qwen2's frame after frame."""
    ids: list[int] = [1]
    for frames, height, width in sizes:
        for frame in range(frames):
            ids += [60 + frame] if timestamps or frame == 0 else []
            ids += [config.video_token_id] * (height * width)
        ids += [70]
    ids += [50, 51]
    grids = torch.tensor([(frames, MERGE * height, MERGE * width) for frames, height, width in sizes])
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": 2 * (tokens == config.video_token_id).long(),
        "pixel_values_videos": torch.randn(
            int(grids.prod(1).sum()), 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(0)
        ),
        "video_grid_thw": grids,
    }


def plane_by_hand(plane: Tensor, selection: Selection) -> Tensor:
    """The kept tokens' rows of a plane of deepstack features; where a token is a mean, the same mean of the rows."""
    rows = plane[selection.indices].clone()
    if selection.merged is not None and selection.shares is not None:
        assert selection.labels is not None
        for j in selection.merged.nonzero()[:, 0].tolist():
            members = (selection.labels == j).nonzero()[:, 0].tolist()
            rows[j] = torch.stack([selection.shares[i].double() * plane[i].double() for i in members]).sum(0)
    return rows


class Oracle:
    """One prompt, alone and without padding, pruned by hand from what eager attention and the tower report. `text` is
    its question; None stands for all tokens that are not special."""

    def __init__(
        self, model: Any, inputs: dict[str, Any], modality: str = "image", text: str | None = "anddiffer how?"
    ) -> None:
        self.model, self.inner, self.modality = model, model.model, modality
        self.text = text
        self.ids = inputs["input_ids"][0]
        self.placeholder = getattr(model.config, f"{modality}_token_id")
        pixels = inputs["pixel_values" if modality == "image" else "pixel_values_videos"]
        self.grids = inputs[f"{modality}_grid_thw"].tolist()
        sizes = [t * h * w for t, h, w in self.grids]
        self.parts = [self.tower(p, g) for p, g in zip(pixels.split(sizes), self.grids, strict=True)]
        self.inputs = inputs

    @torch.no_grad()
    def tower(self, pixels: Tensor, grid: list[int]) -> dict[str, Any]:
        """One image alone: its features, planes, pooled scores, and the states before the merger."""
        visual = self.inner.visual
        before = visual.config._attn_implementation
        visual.set_attn_implementation("eager")
        full = {"qwen2_5_vl": 1}.get(self.model.config.model_type, -1)
        frames: list[Tensor] = []
        keys: list[Tensor] = []
        joint: list[Tensor] = []
        middle: list[Tensor] = []

        def record(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            hidden, (cos, sin) = args[0] if args else kwargs["hidden_states"], kwargs["position_embeddings"]
            q, k, _ = module.qkv(hidden).unflatten(-1, (3, module.num_heads, -1)).unbind(1)
            rotated = []
            for part in (q, k):
                first, second = part.chunk(2, -1)
                rotated.append(part * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None])
            first = module is visual.blocks[0].attn
            if not first:
                keys.append(rotated[1].mean(1))
                joint.append(rotated[1].flatten(1))
            size = grid[1] * grid[2]
            for t in range(grid[0]):
                some = slice(t * size, (t + 1) * size)
                logits = torch.einsum("qhd,khd->hqk", rotated[0][some], rotated[1][some]) * q.shape[-1] ** -0.5
                (middle if first else frames).append(logits.softmax(-1))

        # the first of three layers is early, and that of objects
        hooks = [visual.blocks[i].attn.register_forward_hook(record, with_kwargs=True) for i in (0, full)]
        out = visual(pixels, grid_thw=torch.tensor([grid]), return_dict=True)
        for hook in hooks:
            hook.remove()
        visual.set_attn_implementation(before)
        received, early = (torch.cat([frame.mean((0, 1)) for frame in part]) for part in (frames, middle))
        order = self.window_order(grid)
        scores = torch.stack([received[4 * i : 4 * i + 4].mean() for i in order])
        objects = torch.stack([early[4 * i : 4 * i + 4].mean() for i in order])
        return {
            "more": {
                **dict.fromkeys(("received", "joint_scores"), scores),
                **dict.fromkeys(("object_scores", "early_scores"), objects),
                "joint_keys": torch.stack([joint[0][4 * i : 4 * i + 4].mean(0) for i in order]),
            },
            "features": out.pooler_output,
            "planes": getattr(out, "deepstack_features", None) or [],
            "scores": scores,
            "hidden": torch.stack([out.last_hidden_state[4 * i : 4 * i + 4].flatten() for i in order]),
            "keys": torch.stack([keys[0][4 * i : 4 * i + 4].mean(0) for i in order]),
        }

    def window_order(self, grid: list[int]) -> list[int]:
        """At which index the tower has each token, in raster order."""
        frames, height, width = grid[0], grid[1] // MERGE, grid[2] // MERGE
        raster = [(t, y, x) for t in range(frames) for y in range(height) for x in range(width)]
        if self.model.config.model_type != "qwen2_5_vl":
            return list(range(len(raster)))
        walk = [
            (t, y, x)
            for t in range(frames)
            for top in range(0, height, WINDOW)
            for left in range(0, width, WINDOW)
            for y in range(top, min(top + WINDOW, height))
            for x in range(left, min(left + WINDOW, width))
        ]
        return [walk.index(cell) for cell in raster]

    def select(self, method: Pruner) -> list[Selection]:
        """What the method keeps of each image."""

        def merger(hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1] // 4)
            return self.inner.visual.merger(rows).reshape(*hidden.shape[:-1], -1)

        if self.text is None:
            question = self.model.get_input_embeddings()(self.ids[self.ids > self.model.config.video_token_id]).detach()
        else:
            question = tiny_models.asked(self.model, self.text)
        selections = []
        for part, (frames, height, width) in zip(self.parts, self.grids, strict=True):
            axes = [torch.arange(n) for n in (frames, height // MERGE, width // MERGE)]
            tile, y, x = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
            layout = Layout(tile, y, x, tile if self.modality == "video" else None)
            states = (part["hidden"], part["keys"], merger, False, question)
            given = PrunerInputs(part["features"], part["scores"], layout, *states, **part["more"])
            with torch.no_grad():
                selections.append(method.select(given))
        return selections

    def positions(self) -> Tensor:
        """Time, height and width [3, S] of every token of the whole prompt."""
        found: list[tuple[int, int, int]] = []
        cells, start, text = self.cells(), 0, 0
        for token in self.ids.tolist():
            if token == self.placeholder:
                time, y, x, extent = cells.pop(0)
                if extent:
                    start, text = text, text + extent
                found.append((start + time, start + y, start + x))
            else:
                found.append((text, text, text))
                text += 1
        return torch.tensor(found).T

    def cells(self) -> list[tuple[int, int, int, int]]:
        """Time, y and x of every placeholder, counted within its image; and how far the count moves on, at the first.

        Qwen3 counts every frame as an image. Qwen2.5 counts two positions per second; others one per frame.
        """
        kind, found = self.model.config.model_type, []
        seconds = self.inputs.get("second_per_grid_ts", torch.ones(len(self.grids))).tolist()
        for (frames, height, width), second in zip(self.grids, seconds, strict=True):
            rows, columns = height // MERGE, width // MERGE
            for frame in range(frames):
                time = {"qwen2_vl": frame, "qwen2_5_vl": int(frame * 2 * second)}.get(kind, 0)
                first = frame == 0 or kind.startswith("qwen3")
                extents = [max(rows, columns) if first else 0] + [0] * (rows * columns - 1)
                found += [(time, i // columns, i % columns, extent) for i, extent in enumerate(extents)]
        return found

    def compacted(self, selections: list[Selection]) -> dict[str, Any]:
        """Arguments of the untouched model: short ids, features, and positions with a row for the text in front."""
        slots = (self.ids == self.placeholder).nonzero()[:, 0]
        keep = self.ids != self.placeholder
        own = torch.arange(len(self.ids))
        start = 0
        for part, selection in zip(self.parts, selections, strict=True):
            indices = selection.indices
            mine = slots[start : start + len(part["features"])]
            columns = mine[indices.sort().values]
            keep[columns] = True
            own[columns] = mine[indices]
            start += len(part["features"])
        ids = self.ids[keep][None]
        counted = torch.arange(ids.shape[1])[None, None]
        positions = torch.cat([counted, self.positions()[:, own[keep]][:, None]])
        return {
            "input_ids": ids,
            "position_ids": positions,
            "mm_encoder_outputs": {self.modality: self.out(selections)},
        }

    def out(self, selections: list[Selection]) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        planes = [
            [plane_by_hand(part["planes"][i], s) for part, s in zip(self.parts, selections, strict=True)]
            for i in range(len(self.parts[0]["planes"]))
        ]
        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=[selection.tokens for selection in selections], deepstack_features=planes or None
        )

    @torch.no_grad()
    def logits(self, selections: list[Selection]) -> Tensor:
        arguments = self.compacted(selections)
        mask = torch.ones_like(arguments["input_ids"])
        return self.model(**arguments, attention_mask=mask).logits

    @torch.no_grad()
    def new_tokens(self, selections: list[Selection], count: int = 6, **way: Any) -> Tensor:
        arguments = self.compacted(selections)
        width = arguments["input_ids"].shape[1]
        torch.manual_seed(0)
        return self.model.generate(**arguments, max_new_tokens=count, **way)[:, width:]
