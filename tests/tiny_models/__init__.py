"""Small random models of every family, of the real classes, saved with their processors as published ones are.

This module has what all share and the LLaVA family; `qwen`, `tiled`, `gemma` and `gemma4` have the others, each with
pruning done by hand, which shares no code with the adapters.
"""

import copy
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from clustrs.models.adapters.base import get_adapter
from clustrs.models.load import load_processor
from clustrs.models.processors import LlavaOnevisionProcessor

Load = Callable[..., tuple[Any, Any]]
"""The fixture `load`: family, tower and options of `from_pretrained` to a model and its processor."""
SIDE, PATCH = 28, 7
GRID = SIDE // PATCH
PATCHES = GRID * GRID
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
TOWERS = ("clip", "siglip", "dinov2")
FAMILIES = ("llava", "llava_next", "llava_onevision")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(special: Sequence[str], names: dict[str, str], **basic: str) -> Any:
    """A tokenizer with bytes as tokens, after special ones. `names` are further attributes, as `image_token`."""
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    basic = basic or {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, extra_special_tokens=names, padding_side="left", **basic)


def tokenizer() -> Any:
    """The tokenizer of the LLaVA and Qwen families."""
    names = {"image_token": "<image>", "video_token": "<video>"}
    return byte_tokenizer(["<pad>", "<s>", "</s>", "<unk>", *names.values()], names)


def tower_config(tower: str) -> Any:
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    if tower == "clip":
        return tf.CLIPVisionConfig(intermediate_size=64, projection_dim=32, **shape)
    if tower == "siglip":
        return tf.SiglipVisionConfig(intermediate_size=64, vision_use_head=False, **shape)
    return tf.Dinov2Config(mlp_ratio=2, **shape)


def build(family: str, tower: str, folder: Path, heads: int = 4) -> None:
    """Save a model and its processor. The weights are large, so that outputs depend on the images. vLLM's attention
    needs heads that are 32 wide: `heads` of 1."""
    words = tokenizer()
    text = tf.LlamaConfig if family != "llava_onevision" else tf.Qwen2Config
    extra = {} if tower == "siglip" else {"num_additional_image_tokens": 1}
    strategy = "full" if tower == "siglip" else "default"
    common = {
        "vision_config": tower_config(tower),
        "text_config": text(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=(heads + 1) // 2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        "image_token_index": words.image_token_id,
        "vision_feature_select_strategy": strategy,
        "vision_feature_layer": -1 if family == "llava_onevision" else -2,
    }
    crop = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    shared = {"tokenizer": words, "vision_feature_select_strategy": strategy, "chat_template": TEMPLATE}
    torch.manual_seed(0)
    if family == "llava":
        model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(**common))
        processor = tf.LlavaProcessor(
            image_processor=tf.CLIPImageProcessorPil(**crop), patch_size=PATCH, **extra, **shared
        )
    elif family == "llava_next":
        model = tf.LlavaNextForConditionalGeneration(tf.LlavaNextConfig(image_grid_pinpoints=PINPOINTS, **common))
        images = tf.LlavaNextImageProcessorPil(image_grid_pinpoints=PINPOINTS, **crop)
        processor = tf.LlavaNextProcessor(image_processor=images, patch_size=PATCH, **extra, **shared)
    else:
        config = tf.LlavaOnevisionConfig(
            image_grid_pinpoints=PINPOINTS, video_token_index=words.video_token_id, **common
        )
        model = tf.LlavaOnevisionForConditionalGeneration(config)
        images = tf.LlavaOnevisionImageProcessorPil(
            size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
        )
        count = PATCHES if tower == "siglip" else PATCHES + 1
        processor = LlavaOnevisionProcessor(image_processor=images, num_image_tokens=count, **shared)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


loaded: dict[str, tuple[Any, Any]] = {}
"""What was loaded from a folder with some options; tests get copies, which take a fifth of the time."""


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    key = f"{folder} {sorted(options.items())}"
    if key not in loaded:
        model = tf.AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
        model.generation_config.eos_token_id = None
        loaded[key] = model, load_processor(str(folder))
    return copy.deepcopy(loaded[key])


def make_image(height: int = 40, width: int = 60, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prepare(processor: Any, texts: list[str], images: list[list[Image.Image]]) -> dict[str, Any]:
    """Inputs for a batch of prompts, each with its own images."""
    if isinstance(processor, LlavaOnevisionProcessor):
        given: list[Any] = [row for row in images if row]
    else:
        given = [image for row in images for image in row]
    return dict(processor(images=given or None, text=texts, padding=True, return_tensors="pt"))


def family_inputs(model: Any, processor: Any, texts: list[str], images: list[Image.Image]) -> dict[str, Any]:
    """Inputs for a batch of prompts with one image each, for any family; IMAGE stands for the image."""
    texts = [text.replace("IMAGE", processor.image_token) for text in texts]
    given = get_adapter(model).batch_images(images)
    return dict(processor(images=given, text=texts, padding=True, return_tensors="pt"))


@cache
def saved_tokenizer(folder: str) -> Any:
    return load_processor(folder).tokenizer


def asked(model: Any, text: str) -> torch.Tensor:
    """The embeddings [T, D] of a question's tokens alone; pieces of text around images stand side by side."""
    ids = saved_tokenizer(model.name_or_path)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        rows: torch.Tensor = model.get_input_embeddings()(ids[0])
    return rows


from tiny_models import gemma, gemma4, qwen, tiled  # noqa: E402  they use what is above

BUILDERS: dict[str, Callable[[Path], None]] = {
    "llava": partial(build, "llava", "clip"),
    "llava_next": partial(build, "llava_next", "clip"),
    "llava_onevision": partial(build, "llava_onevision", "siglip"),
    **{family: partial(qwen.build, family) for family in qwen.FAMILIES},
    **{family: partial(tiled.build, family) for family in tiled.FAMILIES},
    **{family: partial(gemma.build, family) for family in gemma.KINDS},
    "gemma4": partial(gemma4.build, "small"),
}
"""What saves a model of a family in a folder."""
SAME_ADAPTER = {"qwen3_vl_moe": "qwen3_vl", "qwen3_5_moe": "qwen3_5", "smolvlm": "idefics3", "paligemma2": "paligemma"}
"""Families that differ from another one in the language model alone, or in names."""
