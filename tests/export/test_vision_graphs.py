"""Vision towers with their pruning as ONNX graphs: every family, in onnxruntime and in OpenVINO."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.graph_checks import assert_same, check_graph, run, session
from export.vision_cases import FAMILIES, Case, build
from PIL import Image
from tiny_models.qwen import build as build_qwen
from torch import Tensor

from clustrs import ClusterMeans, ClustRS, Denoise, DivPrune, FasterVLM, Grid, NoPruning, Pruner, Random, VisPruner
from clustrs.corruptions import Corruption
from clustrs.evaluation.tasks import get_task
from clustrs.export import ENCODERS, PrunedVision, export_onnx
from clustrs.models.load import load_model
from clustrs_models.scenes import examples

K = 5
KEEP = 8
"""Tokens that are kept of an embedded model's 576."""
pytestmark = pytest.mark.xdist_group("vision graphs")  # one process builds the embedded model's graph, once
CORRUPTIONS = ("gaussian:0.5", "salt_pepper:0.2", "brightness:1.5", "motion_blur:15", "jpeg:30")


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, folder_of: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Case:
    return build(request.param, folder_of, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("case", FAMILIES, indirect=True)
@pytest.mark.parametrize(
    "method",
    [ClustRS(keep=K), VisPruner(keep=K), Grid(keep=K)],
    ids=["clustrs", "vispruner", "grid"],
)
def test_the_module_keeps_what_an_attached_method_keeps(case: Case, method: Pruner) -> None:
    vision = PrunedVision(case.model, method)
    for seed in range(3):
        inputs = case.inputs(seed)
        expected = case.attached(method, inputs)
        with torch.no_grad():
            tokens, indices, sizes = vision(case.crop(inputs))
        assert torch.equal(indices[0], expected.indices)
        assert expected.sizes is not None
        assert torch.equal(sizes[0], expected.sizes)
        torch.testing.assert_close(tokens[0], expected.tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.graphs
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_onnxruntime_keeps_what_pytorch_keeps(case: Case, tmp_path: Path) -> None:
    """Tower, scores and projector of each family, with the shortest selection that reads scores; ClustRS in one."""
    method = ClustRS(keep=K) if case.family == "llava" else FasterVLM(keep=K)
    path = tmp_path / "vision.onnx"
    info = export_onnx(case.model, method, path)
    check_graph(path)
    assert info.model_type == case.model.config.model_type
    assert info.tokens == 16
    vision, graph = PrunedVision(case.model, method), session(path)
    crops = torch.cat([case.crop(case.inputs(seed)) for seed in range(8)])
    for batch in (crops[:1], crops[1:]):
        compare(vision, graph, batch)


@pytest.mark.graphs
@pytest.mark.parametrize("case", ["llava"], indirect=True)
@pytest.mark.parametrize(
    "method",
    [
        FasterVLM(keep=K),
        VisPruner(keep=K),
        DivPrune(keep=K),
        Random(keep=K),
        Grid(keep=K),
        Denoise(FasterVLM(keep=K)),
        ClusterMeans(keep=K),
        NoPruning(),
    ],
    ids=lambda method: method.name,
)
def test_other_methods(case: Case, method: Pruner, tmp_path: Path) -> None:
    path = tmp_path / "vision.onnx"
    export_onnx(case.model, method, path)
    check_graph(path)
    crops = torch.cat([case.crop(case.inputs(seed)) for seed in range(8)])
    vision = PrunedVision(case.model, method)
    compare(vision, session(path), crops)
    if method.name in ("fastervlm", "clustermeans"):
        compare_openvino(vision, path, crops)


def test_every_exportable_family_is_tested() -> None:
    assert set(FAMILIES) == set(ENCODERS)


def compare(vision: PrunedVision, graph: Any, pixels: Tensor) -> None:
    with torch.no_grad():
        expected = vision(pixels)
    assert_same(run(graph, pixel_values=pixels), expected)


def scenes(count: int, corruptions: tuple[str, ...] = CORRUPTIONS) -> list[Image.Image]:
    """Drawn scenes, each clean or corrupted in one of several ways, in turns."""
    return corrupted([Image.fromarray(example.drawing.pixels) for example in examples(count, 1)], corruptions)


def corrupted(images: list[Image.Image], corruptions: tuple[str, ...]) -> list[Image.Image]:
    effects = [None, *map(Corruption.parse, corruptions)]
    return [
        image if (effect := effects[i % len(effects)]) is None else effect.apply(image, f"scene-{i}")
        for i, image in enumerate(images)
    ]


@pytest.fixture(scope="module")
def mini() -> tuple[Any, Any]:
    return load_model("mini-llava")


@pytest.fixture(scope="module")
def mini_graph(mini: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mini") / "vision.onnx"
    export_onnx(mini[0], ClustRS(keep=KEEP), path)
    return path


def pixels_of(processor: Any, images: list[Image.Image]) -> Tensor:
    pixels: Tensor = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    return pixels


@pytest.mark.graphs
def test_embedded_model_clean_and_corrupted(mini: tuple[Any, Any], mini_graph: Path) -> None:
    """The whole tower of a trained model, on images that it was trained for, and on corrupted ones."""
    model, processor = mini
    check_graph(mini_graph)
    vision, graph = PrunedVision(model, ClustRS(keep=KEEP)), session(mini_graph)
    pixels = pixels_of(processor, scenes(24))
    for batch in pixels.split([1, 1, 2, 20]):
        compare(vision, graph, batch)


@pytest.mark.graphs
def test_embedded_model_for_photographs(tmp_path: Path) -> None:
    """The DINOv2 tower of the default model."""
    model, processor = load_model("photo-llava")
    method, path = ClustRS(keep=KEEP), tmp_path / "vision.onnx"
    export_onnx(model, method, path)
    check_graph(path)
    task = get_task("photos", limit=30)
    photos = [task.open(name) for name in dict.fromkeys(item.image for item in task.items)][:6]
    vision, graph = PrunedVision(model, method), session(path)
    for batch in pixels_of(processor, corrupted(photos, ("gaussian:0.24", "salt_pepper:0.07"))).split([1, 5]):
        compare(vision, graph, batch)


@pytest.mark.graphs
def test_file_beside_the_graph(mini_graph: Path) -> None:
    written = json.loads(mini_graph.with_suffix(".json").read_text())
    assert written["method"]["name"] == "clustrs"
    assert (written["kept"], written["model_type"], written["dtype"]) == (KEEP, "llava", "float32")
    assert written["inputs"].keys() == {"pixel_values"}
    assert list(written["outputs"]) == ["image_features", "indices", "sizes"]
    assert written["tokens"] == 576
    assert "transformers" in written["versions"]


@pytest.mark.graphs
def test_openvino_on_the_embedded_model(mini: tuple[Any, Any], mini_graph: Path) -> None:
    model, processor = mini
    compare_openvino(PrunedVision(model, ClustRS(keep=KEEP)), mini_graph, pixels_of(processor, scenes(12)))


def compare_openvino(vision: PrunedVision, path: Path, pixels: Tensor) -> None:
    openvino = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch in pixels.split([1, len(pixels) - 1]):
        with torch.no_grad():
            expected = vision(batch)
        outputs = compiled({"pixel_values": batch.numpy()})
        assert_same([outputs[name] for name in ("image_features", "indices", "sizes")], expected)


@pytest.mark.graphs
def test_half_precision_keeps_almost_what_single_keeps(tmp_path: Path) -> None:
    """Inputs and outputs are of its own type; in near-ties another token may win."""
    model, processor = load_model("mini-llava")
    method = ClustRS(keep=16)
    pixels = pixels_of(processor, scenes(6))
    with torch.no_grad():
        expected, expected_indices, _ = PrunedVision(model, method)(pixels)
    path = tmp_path / "vision.onnx"
    info = export_onnx(model.half(), method, path)
    check_graph(path)
    assert info.dtype == "float16"
    features, indices, sizes = run(session(path), pixel_values=pixels.half())
    assert features.dtype == np.float16
    assert features.shape == expected.shape
    assert (sizes.sum(-1) == 576).all()
    assert all(len(set(row)) == 16 for row in indices.tolist())
    common = [len(set(a) & set(b)) for a, b in zip(indices.tolist(), expected_indices.tolist(), strict=True)]
    assert sum(common) >= 0.95 * indices.size, common
    same = np.array(common) == 16
    assert same.sum() >= 4, common
    error = np.linalg.norm(features - expected.numpy(), axis=-1)[same]
    assert (error <= 0.02 * np.linalg.norm(expected.numpy(), axis=-1)[same]).all()


def test_models_without_a_fixed_size_are_refused(tmp_path: Path) -> None:
    build_qwen("qwen2_5_vl", tmp_path)
    model, _ = load_model(str(tmp_path))
    with pytest.raises(ValueError, match="model type 'qwen2_5_vl' has no crops of a fixed size to export"):
        PrunedVision(model, ClustRS(keep=K))


def test_attached_models_are_refused(mini: tuple[Any, Any]) -> None:
    model, _ = mini
    with ClustRS(keep=K)(model), pytest.raises(ValueError, match="a method is attached to this model: remove it first"):
        PrunedVision(model, ClustRS(keep=K))


@pytest.mark.graphs
def test_exporting_leaves_the_model_as_it_was(mini: tuple[Any, Any], mini_graph: Path) -> None:
    """The listening function is gone, and the model can be pruned as before."""
    model, processor = mini
    layer = PrunedVision(model, ClustRS(keep=K)).adapter.scoring_layer()
    assert type(layer.config).__name__ != "ListeningConfig"
    with ClustRS(keep=K)(model) as handle, torch.no_grad():
        inputs = processor(images=scenes(1), text=["<image> What?"], return_tensors="pt")
        model(**inputs)
    assert len(handle.last[0].selection.indices) == K
