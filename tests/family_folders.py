"""Every family of models, small and random, saved with its processor as a published one is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import qwen_models
import tiled_models
import tiny_models
from models.families import gemma4_models, gemma_models
from PIL import Image

from clustrs.models.adapters import get_adapter

BUILDERS: dict[str, Callable[[Path], None]] = {
    "llava": partial(tiny_models.build, "llava", "clip"),
    "llava_next": partial(tiny_models.build, "llava_next", "clip"),
    "llava_onevision": partial(tiny_models.build, "llava_onevision", "siglip"),
    **{family: partial(qwen_models.build, family) for family in qwen_models.FAMILIES},
    **{family: partial(tiled_models.build, family) for family in tiled_models.FAMILIES},
    **{family: partial(gemma_models.build, family) for family in gemma_models.KINDS},
    "gemma4": partial(gemma4_models.build, "small"),
}
"""What saves a model of a family in a folder."""
SAME_ADAPTER = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "smolvlm": "idefics3", "paligemma2": "paligemma"}
"""Families that differ from another one in the language model alone, or in names."""


def family_inputs(model: Any, processor: Any, texts: list[str], images: list[Image.Image]) -> dict[str, Any]:
    """Inputs for a batch of prompts with one image each, for any family; IMAGE stands for the image."""
    texts = [text.replace("IMAGE", processor.image_token) for text in texts]
    given = get_adapter(model).batch_images(images)
    return dict(processor(images=given, text=texts, padding=True, return_tensors="pt"))
