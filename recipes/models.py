"""The models' shapes as transformers configurations, their tokenizer and their processors."""

import json
from pathlib import Path
from typing import Any

import transformers as tf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from clustrs.models.processors import LlavaOnevisionProcessor
from clustrs_models.drawing import COLORS, SHAPES
from clustrs_models.smol_build import use_published_names

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "<video>")
WORDS = [
    "user",
    "assistant",
    ":",
    "?",
    ".",
    ",",
    "what",
    "colour",
    "is",
    "the",
    "shape",
    "object",
    "objects",
    "how",
    "many",
    "are",
    "there",
    "a",
    "an",
    "which",
    "digit",
    "on",
    "left",
    "or",
    "right",
    "of",
    "above",
    "below",
    "larger",
    "smaller",
    "than",
    "yes",
    "no",
    "list",
    "from",
    "to",
    "top",
    "bottom",
    "large",
    "small",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "8",
    "9",
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% elif part['type'] == 'text' %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
NORM = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def vocabulary() -> dict[str, int]:
    return {word: i for i, word in enumerate([*SPECIAL, *WORDS, *COLORS, *SHAPES])}


def tokenizer(words: dict[str, int] | None = None) -> Any:
    """One token a word, in small letters; words it does not know become `<unk>`."""
    words = vocabulary() if words is None else words
    core = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words["<s>"])])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={f"{name}_token": f"<{name}>" for name in ("image", "video") if f"<{name}>" in words},
        padding_side="left",
        model_max_length=4096,
    )


def clip_config(own: dict[str, Any]) -> Any:
    return tf.CLIPVisionConfig(projection_dim=own["width"], hidden_act="gelu", **tower_shape(own))


def tower_shape(own: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": own["width"],
        "intermediate_size": 4 * own["width"],
        "num_hidden_layers": own["layers"],
        "num_attention_heads": own["heads"],
        "image_size": own["grid"] * own["patch"],
        "patch_size": own["patch"],
    }


def text_shape(own: dict[str, Any]) -> dict[str, Any]:
    words = vocabulary()
    return {
        "vocab_size": len(words),
        "hidden_size": own["width"],
        "intermediate_size": own["inner"],
        "num_hidden_layers": own["layers"],
        "num_attention_heads": own["heads"],
        "num_key_value_heads": own["heads"],
        "max_position_embeddings": 4096,
        "pad_token_id": words["<pad>"],
        "bos_token_id": words["<s>"],
        "eos_token_id": words["</s>"],
        "tie_word_embeddings": False,
    }


def llava(settings: dict[str, Any]) -> Any:
    words = vocabulary()
    config = tf.LlavaConfig(
        vision_config=clip_config(settings["encoder"]),
        text_config=tf.LlamaConfig(**text_shape(settings["language"])),
        image_token_index=words["<image>"],
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=settings["encoder"]["grid"] ** 2,
        tie_word_embeddings=False,
    )
    return tf.LlavaForConditionalGeneration(config)


def llava_processor(settings: dict[str, Any]) -> Any:
    side = settings["encoder"]["grid"] * settings["encoder"]["patch"]
    images = tf.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, **NORM)
    return tf.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        patch_size=settings["encoder"]["patch"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def onevision(settings: dict[str, Any]) -> Any:
    words = vocabulary()
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(
            hidden_act="gelu", vision_use_head=False, **tower_shape(settings["encoder"])
        ),
        text_config=tf.Qwen2Config(**text_shape(settings["language"])),
        image_token_index=words["<image>"],
        video_token_index=words["<video>"],
        image_grid_pinpoints=pinpoints(settings),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return tf.LlavaOnevisionForConditionalGeneration(config)


def pinpoints(settings: dict[str, Any]) -> list[list[int]]:
    """All grids of one to three by one to three tiles."""
    side = settings["encoder"]["grid"] * settings["encoder"]["patch"]
    return [[rows * side, columns * side] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def onevision_processor(settings: dict[str, Any]) -> Any:
    side = settings["encoder"]["grid"] * settings["encoder"]["patch"]
    images = tf.LlavaOnevisionImageProcessorPil(
        size={"height": side, "width": side}, image_grid_pinpoints=pinpoints(settings), **NORM
    )
    return LlavaOnevisionProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        num_image_tokens=settings["encoder"]["grid"] ** 2,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    )


def save_video_processor(images: Any, folder: Path) -> None:
    """Video part that the LLaVA-OneVision processor requires, though the model has seen no video."""
    shared = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample")
    given = json.loads(images.to_json_string())
    settings = {name: given[name] for name in (*shared, "rescale_factor", "size")}
    settings["video_processor_type"] = "LlavaOnevisionVideoProcessor"
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def save(model: Any, processor: Any, folder: Path) -> None:
    """A folder in the format of the model hub, with the names of tensors that published checkpoints have."""
    model.generation_config.max_new_tokens = 32
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if model.config.model_type == "llava_onevision":
        save_video_processor(processor.image_processor, folder)
    weights = folder / "model.safetensors"
    use_published_names(weights)
    weights.chmod(0o644)  # safetensors writes files that only their owner can read
