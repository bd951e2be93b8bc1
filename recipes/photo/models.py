"""photo-llava's shape as a transformers configuration, its tokenizer and its processor."""

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from clustrs_models.photographs import GROUPS, KINDS, SIDE
from recipes import models as shared
from recipes.photo import tower as towers
from recipes.photo.images import MEAN, STD

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
WORDS = (
    *("user", "assistant", ":", "?", "what", "is", "at", "the", "top", "bottom", "left", "right", "above", "below"),
    *("to", "of", "on", "or", "which", "these", "this", "there", "a", "an", "how", "many", "animals", "are"),
    *("yes", "no", "0", "1", "2", "3", "4"),
)
EMBEDDED = 0.25
"""The standard deviation of word embeddings to begin with; their norm is then 4, that of the tower's tokens 3 to 6."""


def vocabulary() -> dict[str, int]:
    words = [*SPECIAL, *WORDS, *GROUPS, *(kind.name for kind in KINDS)]
    return {word: i for i, word in enumerate(words)}


def text_config(own: dict[str, Any]) -> Any:
    words = vocabulary()
    return tf.LlamaConfig(
        vocab_size=len(words),
        hidden_size=own["width"],
        intermediate_size=own["inner"],
        num_hidden_layers=own["layers"],
        num_attention_heads=own["heads"],
        num_key_value_heads=own["heads"],
        max_position_embeddings=4096,
        pad_token_id=words["<pad>"],
        bos_token_id=words["<s>"],
        eos_token_id=words["</s>"],
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": own["theta"]},
    )


def photo_llava(settings: dict[str, Any]) -> Any:
    """The whole model, with random weights. The tower ends with the layer that the projector reads."""
    grid = SIDE // towers.PATCH
    config = tf.LlavaConfig(
        vision_config=towers.dinov2(SIDE, settings["tower"]["layers"]).config,
        text_config=text_config(settings["language"]),
        image_token_index=vocabulary()["<image>"],
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=grid * grid,
        tie_word_embeddings=False,
    )
    return tf.LlavaForConditionalGeneration(config)


def processor() -> Any:
    images = tf.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=STD
    )
    return tf.LlavaProcessor(
        image_processor=images,
        tokenizer=shared.tokenizer(vocabulary()),
        patch_size=towers.PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=shared.TEMPLATE,
    )


def save(model: Any, folder: Path) -> None:
    """Write model and processor in the format of the model hub."""
    model.generation_config.max_new_tokens = 32
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read


def initialize(model: Any, features: torch.Tensor) -> None:
    """Random weights to begin with: what enters the language model, words and image alike, has `EMBEDDED` as standard
    deviation, and its layers write as much together. `features` (..., D) are some of the tower's tokens: the projector
    begins as if they were standardised, so that no channel drowns the others."""
    inner = model.model
    language, projector = inner.language_model, inner.multi_modal_projector
    tokens = features.float().flatten(0, -2)
    mean, std = tokens.mean(0), tokens.std(0)
    depth = (2 * len(language.layers)) ** 0.5
    with torch.no_grad():
        language.embed_tokens.weight.normal_(0, EMBEDDED)
        for name, weight in language.layers.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0, weight.shape[1] ** -0.5 * (EMBEDDED / depth if writes else 1))
        first, second = projector.linear_1, projector.linear_2
        first.weight.normal_(0, first.weight.shape[1] ** -0.5).div_(std)
        first.bias.copy_(-first.weight @ mean)
        second.weight.normal_(0, second.weight.shape[1] ** -0.5)
        second.bias.zero_()
        second.weight *= EMBEDDED / projector(tokens[::7]).std()
        model.lm_head.weight.normal_(0, model.lm_head.weight.shape[1] ** -0.5)
