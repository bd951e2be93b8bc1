"""Small Gemma 4 models of the real classes, and pruning done by hand on them without anything of the library."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image
from torch import Tensor
from torch.nn.functional import embedding, linear

from clustrs import Pruner, PrunerInputs, Selection
from clustrs.models.processors import Gemma4Processor
from clustrs.pruners.inputs import Layout
from tiny_models import TEMPLATE, asked, byte_tokenizer, make_image

PATCH, KERNEL, MOST = 2, 3, 70
QUESTION = "what is this?"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<boi>", "<eoi>", "<audio>", "<boa>", "<eoa>", "<|video|>"]
IMAGE, VIDEO = SPECIAL.index("<image>"), SPECIAL.index("<|video|>")
AUDIO = SPECIAL.index("<audio>")
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {  # as E2B: per-layer embeddings, shared keys and values, causal attention to images
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "large": {  # as 31B: images attend both ways in sliding layers, keys are values in the others
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "experts": {  # as 26B-A4B
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}


def tokenizer() -> Any:
    """Bytes as tokens."""
    names = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    names |= {"audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>"}
    basic = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return byte_tokenizer(SPECIAL, names, **basic)


def configure(variant: str, words: int, audio: bool = False, **more: Any) -> Any:
    text = {
        "vocab_size": words,
        "vocab_size_per_layer_input": words,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        **VARIANTS[variant],
        **more,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": PATCH,
        "pooling_kernel_size": KERNEL,
        "position_embedding_size": 256,
        "default_output_length": MOST,
        "standardize": variant == "large",
        "use_clipped_linears": variant == "small",
    }
    listening = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 24}
    return tf.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=listening if audio else None,
        image_token_id=IMAGE,
        boi_token_id=SPECIAL.index("<boi>"),
        eoi_token_id=SPECIAL.index("<eoi>"),
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        boa_token_id=SPECIAL.index("<boa>"),
        eoa_token_index=SPECIAL.index("<eoa>"),
    )


def build(variant: str, folder: Path, audio: bool = False) -> None:
    """Save a model and its processor."""
    words = tokenizer()
    save_model(configure(variant, len(words), audio), folder)
    images = tf.Gemma4ImageProcessorPil(patch_size=PATCH, max_soft_tokens=MOST, pooling_kernel_size=KERNEL)
    sounds = tf.Gemma4AudioFeatureExtractor()
    Gemma4Processor(sounds, images, words, chat_template=TEMPLATE).save_pretrained(folder)


def build_served(variant: str, folder: Path) -> None:
    """Save a model with its whole processor, and heads as wide as vLLM's kernels take; needs torchvision."""
    words = tokenizer()
    save_model(configure(variant, len(words), hidden_size=64, head_dim=32, global_head_dim=64), folder)
    shape = {"patch_size": PATCH, "max_soft_tokens": MOST, "pooling_kernel_size": KERNEL}
    parts = (
        tf.Gemma4AudioFeatureExtractor(),
        tf.Gemma4ImageProcessor(**shape),
        words,
        tf.Gemma4VideoProcessor(**shape),
    )
    tf.Gemma4Processor(*parts, chat_template=TEMPLATE).save_pretrained(folder)


def save_model(config: Any, folder: Path) -> None:
    """Save a model whose weights are large, so that outputs depend on the images."""
    torch.manual_seed(0)
    model = tf.Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("position_embedding_table"):
                parameter.normal_(std=0.3)
            elif parameter.dim() > 1:
                parameter.mul_(8)
        for name, buffer in model.named_buffers():
            if name.endswith("std_bias"):
                buffer.normal_()
            elif name.endswith("std_scale"):
                buffer.uniform_(0.5, 2)
    model.save_pretrained(folder)


def prepare(processor: Any, texts: list[str], images: list[list[Image.Image]]) -> dict[str, Any]:
    """Inputs for a batch of prompts, each with its own images."""
    given = images if any(images) else None
    return dict(processor(images=given, text=texts, padding=True, return_tensors="pt"))


def ask(processor: Any, text: str = f"<bos>user: <image> {QUESTION}", **shape: int) -> dict[str, Any]:
    return prepare(processor, [text], [[make_image(**shape)]])


def patches(inputs: dict[str, Any], index: int) -> tuple[Tensor, Tensor]:
    """The pixels [1, P, 12] and positions [1, P, 2] of one image without the processor's padding."""
    positions = inputs["image_position_ids"][index]
    real = positions[:, 0] >= 0
    return inputs["pixel_values"][index][real][None], positions[real][None]


def cells(positions: Tensor) -> list[list[int]]:
    """For each token, row by row: the indices of its nine patches."""
    spots = positions[0].tolist()
    columns = (max(x for x, _ in spots) + 1) // KERNEL
    rows = (max(y for _, y in spots) + 1) // KERNEL
    return [
        [i for i, (x, y) in enumerate(spots) if (x // KERNEL, y // KERNEL) == (column, row)]
        for row in range(rows)
        for column in range(columns)
    ]


@dataclass(frozen=True)
class Seen:
    """One image by hand: features [N, 32], eager scores [N], pooled hidden states [N, 32] and keys [N, 8]."""

    features: Tensor
    scores: Tensor
    hidden: Tensor
    keys: Tensor
    middle: Tensor
    joint_keys: Tensor

    def select(self, model: Any, method: Pruner, layout: Layout | None = None) -> Selection:
        projector = partial(project, model)
        more = {"received": self.scores, "joint_scores": self.scores, "joint_keys": self.joint_keys}
        more |= dict.fromkeys(("object_scores", "early_scores"), self.middle) | {"question": asked(model, QUESTION)}
        given = PrunerInputs(self.features, self.scores, layout, self.hidden, self.keys, projector, cls=False, **more)
        return method.select(given)


@torch.no_grad()
def look(model: Any, pixels: Tensor, positions: Tensor) -> Seen:
    """Look at one image without padding, with eager attention."""
    tower, config = model.model.vision_tower, model.config.vision_config
    states, keys = [], []
    hooks = [
        tower.encoder.register_forward_hook(lambda module, args, out: states.append(out.last_hidden_state[0])),
        tower.encoder.layers[-1].self_attn.k_norm.register_forward_hook(lambda module, args, out: keys.append(out[0])),
    ]
    before = config._attn_implementation
    tower.set_attn_implementation("eager")
    try:
        attentions = tower(pixels, positions, output_attentions=True).attentions
    finally:
        tower.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    theta = config.rope_parameters["rope_theta"]
    turned = rotate(keys[0].mean(1), positions[0], theta)
    heads = torch.cat([rotate(head, positions[0], theta) for head in keys[0].unbind(1)], -1)
    scores, middle = (  # the first of two layers is early, and that of objects
        torch.stack([attentions[layer][0].mean((0, 1))[cell].mean() for cell in cells(positions)]) for layer in (-1, 0)
    )
    hidden = torch.stack([states[0][cell].mean(0) for cell in cells(positions)]) * config.hidden_size**0.5
    if config.standardize:
        hidden = (hidden - tower.std_bias) * tower.std_scale
    pooled = (torch.stack([part[cell].mean(0) for cell in cells(positions)]) for part in (turned, heads))
    own_keys, joint_keys = pooled
    return Seen(project(model, hidden), scores, hidden, own_keys, middle, joint_keys)


def rotate(keys: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turn pairs of a key's numbers by angles: the first half of it by x, the second by y."""
    turned, half = torch.empty_like(keys), keys.shape[1] // 2
    for axis in (0, 1):
        for j in range(half // 2):
            angle = positions[:, axis].float() * theta ** (-2 * j / half)
            first, second = axis * half + j, axis * half + j + half // 2
            turned[:, first] = keys[:, first] * angle.cos() - keys[:, second] * angle.sin()
            turned[:, second] = keys[:, second] * angle.cos() + keys[:, first] * angle.sin()
    return turned


def project(model: Any, hidden: Tensor) -> Tensor:
    normed = hidden / (hidden.pow(2).mean(-1, keepdim=True) + model.config.vision_config.rms_norm_eps).sqrt()
    return linear(normed, model.model.embed_vision.embedding_projection.weight)


def shorten(ids: Tensor, kept: list[list[int]], counts: list[int], token: int = IMAGE) -> list[int]:
    """The columns of one prompt [S] that stay, when `kept` stay of each image with `counts` placeholders."""
    slots = (ids == token).nonzero()[:, 0].tolist()
    assert len(slots) == sum(counts)
    stay = []
    for image, count in zip(kept, counts, strict=True):
        own, slots = slots[:count], slots[count:]
        stay += [own[i] for i in image]
    return sorted([i for i in range(len(ids)) if ids[i] != token] + stay)


def masks(ids: Tensor, window: int, bidirectional: bool) -> dict[str, Tensor]:
    """Who attends to whom [1, 1, S, S] in one prompt [S], pair by pair."""
    n, visual = len(ids), [int(i) in (IMAGE, VIDEO) for i in ids]
    block, blocks = -1, []
    for i in range(n):
        block += visual[i] and not (i and visual[i - 1])
        blocks.append(block if visual[i] else None)
    full, sliding = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for q in range(n):
        for k in range(n):
            full[q, k] = k <= q
            together = bidirectional and blocks[q] is not None and blocks[q] == blocks[k]
            sliding[q, k] = (k <= q or together) and k > q - window
    return {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}


@torch.no_grad()
def logits(model: Any, ids: Tensor, rows: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits [1, S, V] of one compacted prompt [S] whose placeholders are filled with rows [k, 32]."""
    language, text = model.model.language_model, model.config.text_config
    visual = (ids == IMAGE) | (ids == VIDEO)
    plain = ids.masked_fill(visual, 0)
    embeds = embedding(plain, language.embed_tokens.weight) * text.hidden_size**0.5
    embeds[visual] = rows
    more = {}
    width = text.hidden_size_per_layer_input
    if width:
        table = embedding(plain, language.embed_tokens_per_layer.weight) * width**0.5
        more["per_layer_inputs"] = table.view(1, len(ids), text.num_hidden_layers, width)
    out = language(
        inputs_embeds=embeds[None],
        attention_mask=masks(ids, text.sliding_window, text.use_bidirectional_attention == "vision"),
        position_ids=torch.arange(len(ids))[None] if positions is None else positions[None],
        use_cache=False,
        **more,
    )
    scores: Tensor = linear(out.last_hidden_state, model.lm_head.weight)
    cap = text.final_logit_softcapping
    return scores if cap is None else (scores / cap).tanh() * cap


def video_inputs(processor: Any, frames: list[list[Image.Image]]) -> dict[str, Any]:
    """Videos as the video processor (which needs torchvision) makes them, one prompt for each."""
    rows, pixels, positions = [], [], []
    for video in frames:
        images = processor.image_processor(video, return_tensors="pt")
        text = "".join(
            f"00:0{i} <boi>{'<|video|>' * int(n)}<eoi> " for i, n in enumerate(images["num_soft_tokens_per_image"])
        )
        rows.append(f"<bos>{text}what?")
        pixels.append(images["pixel_values"])
        positions.append(images["image_position_ids"])
    inputs = dict(processor.tokenizer(rows, padding=True, return_tensors="pt"))
    inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == VIDEO).long()
    return inputs | {
        "pixel_values_videos": torch.cat(pixels),
        "video_position_ids": torch.cat(positions),
        "num_frames_per_video": torch.tensor([len(video) for video in frames]),
    }
