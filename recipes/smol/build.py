"""Build smol-llava in hub format from the converted parts and the trained weights.

    python -m recipes.smol.build PARTS WEIGHTS FOLDER

PARTS is the folder of `recipes.smol.convert`, WEIGHTS the file with projector and LoRA. FOLDER appears when it is
complete; transformers alone loads it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from recipes.smol.convert import MEAN, STD, write_atomically
from recipes.smol.model import HIDDEN, SYSTEM, Projector

IMAGE = "<image>"
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}" + IMAGE + "\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's chat template, with images first in a message."""


def merge_lora(language: Any, weights: dict[str, Tensor]) -> None:
    """Add the products of the trained matrices to the language model's weights, in place."""
    own = dict(language.named_parameters())
    for name in [name for name in weights if name.startswith("lora.") and name.endswith(".down")]:
        module = name.removeprefix("lora.").removesuffix(".down")
        up = weights[name.removesuffix("down") + "up"].float()
        own[f"{module}.weight"].data += up @ weights[name].float()


def load_projector(weights: dict[str, Tensor], width: int, out: int) -> Projector:
    """Load the projector from the trained weights."""
    prefix = "projector."
    own = {name.removeprefix(prefix): value.float() for name, value in weights.items() if name.startswith(prefix)}
    projector = Projector(width, own["linear_1.bias"].numel() if own else HIDDEN, out)
    projector.load_state_dict(own)
    return projector


def assemble(tower: Any, language: Any, projector: Projector, image_token: int) -> LlavaForConditionalGeneration:
    """Put tower, projector and language model (LoRA merged) into one model in float32.

    The embeddings get rows for the image token, up to a multiple of 64, at the mean of the others.
    """
    language.resize_token_embeddings(image_token + 1, pad_to_multiple_of=64, mean_resizing=False)
    with torch.no_grad():
        rows = language.get_input_embeddings().weight
        rows[image_token:] = rows[:image_token].mean(0)
    grid = tower.config.image_size // tower.config.patch_size
    config = LlavaConfig(
        vision_config=tower.config,
        text_config=language.config,
        image_token_index=image_token,
        image_seq_length=grid * grid,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.model.vision_tower.load_state_dict(tower.state_dict())
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.model.multi_modal_projector.load_state_dict(projector.folded())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=language.config.bos_token_id, eos_token_id=2, pad_token_id=2, do_sample=False
    )
    return model


def build_processor(tokenizer: Any, side: int, patch: int) -> LlavaProcessor:
    """Return LLaVA's processor around SmolLM2's tokenizer, which must have the image token."""
    images = CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, image_mean=MEAN, image_std=STD
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )


def build(parts: Path, weights_file: Path, folder: Path) -> None:
    """Write the model and its processor to `folder`."""
    weights = load_file(weights_file)
    tower = CLIPVisionModel.from_pretrained(parts / "tower")
    language = AutoModelForCausalLM.from_pretrained(parts / "lm", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(parts / "lm")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    merge_lora(language, weights)
    projector = load_projector(weights, tower.config.hidden_size, language.config.hidden_size)
    model = assemble(tower, language, projector, tokenizer.convert_tokens_to_ids(IMAGE))
    processor = build_processor(tokenizer, tower.config.image_size, tower.config.patch_size)

    def fill(partial: Path) -> None:
        model.save_pretrained(partial)
        processor.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read

    write_atomically(folder, fill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    build(options.parts, options.weights, options.folder)


if __name__ == "__main__":
    main()
