"""The frozen CLIP tower: features of the layer the projector reads, and the CLS attention of that layer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPVisionModel

from clustrs_models.smol_build import MEAN, STD

SIDE = 224
"""Pixels of an image's side; 14 x 14 patches."""
LAYER = -2
"""`vision_feature_layer` of LLaVA: the output of the last layer but one."""


def load_tower(folder: Path) -> CLIPVisionModel:
    """Load the converted tower without its last layer, which nothing here reads."""
    tower = CLIPVisionModel.from_pretrained(folder).eval().requires_grad_(False)
    encoder = getattr(tower, "vision_model", tower).encoder
    encoder.layers = encoder.layers[: len(encoder.layers) + LAYER + 1]
    return tower


def to_pixels(images: Sequence[Image.Image]) -> Tensor:
    """Normalize square RGB images to CLIP's pixel values [B, 3, SIDE, SIDE]."""
    stacked = np.stack([np.asarray(image, dtype=np.float32) / np.float32(255) for image in images])
    mean, std = (np.array(values, dtype=np.float32) for values in (MEAN, STD))
    return torch.from_numpy((stacked - mean) / std).permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def features(tower: CLIPVisionModel, pixels: Tensor) -> Tensor:
    """Return the hidden states [B, N, D] of the patches after the last layer that `load_tower` kept."""
    return tower(pixels).last_hidden_state[:, 1:]


@torch.no_grad()
def cls_attention(tower: CLIPVisionModel, pixels: Tensor) -> Tensor:
    """Return the attention [B, N] of CLS to the patches in the last layer kept, averaged over heads."""
    layer = getattr(tower, "vision_model", tower).encoder.layers[-1]
    inputs: list[Tensor] = []
    hook = layer.layer_norm1.register_forward_hook(lambda _module, _args, output: inputs.append(output))
    try:
        tower(pixels)
    finally:
        hook.remove()
    attention = layer.self_attn
    heads = attention.num_heads
    query = attention.q_proj(inputs[0][:, :1]).unflatten(-1, (heads, -1)).transpose(1, 2)
    key = attention.k_proj(inputs[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = (query @ key.transpose(-1, -2) * attention.scale).softmax(-1)
    return scores.mean(1)[:, 0, 1:]
