"""Selections as ONNX graphs, run in onnxruntime: the same indices as in PyTorch, the same tokens up to rounding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export.graph_checks import assert_same, check_graph, run, session
from method_cases import draw_image, tensors

from clustrs import ClustRS, FasterVLM, NoPruning, Pruner, VisPruner, get_method, list_methods, method_class
from clustrs.export import TokenSelection, export_selection, trace

N, D, H, K = 32, 24, 10, 4
"""Few tokens, because steps are unrolled for each kept one; ClustRS has all costs at once from an eighth of N on."""
HARD: dict[str, Any] = {"tau": 0.3, "iterations": 2, "tolerance": 0.0, "clip": [0.2, 0.7], "seed": 2**40 + 3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("clustrs", {}),
    ("clustrs", {**HARD, "centroid": "huber", "salience": True}),
    ("clustrs", {"distance": "euclidean", "shrink": False, "iterations": 1}),
    ("clustrs", {"representative": "medoid", "attention_power": 0.5, "clip": [0.0, 0.0]}),
    ("fastervlm", {}),
    ("divprune", {}),
    ("vispruner", {"important": 0.4}),
    ("mmr", {}),
    ("scope", {}),
    ("holov", {"runs": 7}),
    ("downsample", {}),
    ("random", {"seed": 5}),
    ("grid", {"columns": 8}),
    ("denoise", {"inner": "divprune"}),
    ("clustermeans", {}),
    ("clustermeans", {"power": 0.0, "tau": 0.3, "seed": 9}),
]
QUICK: tuple[str, dict[str, Any]] = ("fastervlm", {})
"""The one that `make test` exports."""


def images(cls: bool) -> list[Any]:
    """Plain images, and some with duplicates, with ties in the attention, and with none on many tokens."""
    plain = [draw_image(seed, N, D, cls=cls) for seed in range(6)]
    nasty = [
        draw_image(seed, N, D, cls=cls, duplicates=0.3, zero_attention=0.4, ties=True, offset=5.0 * (seed % 2))
        for seed in range(6, 12)
    ]
    return plain + nasty


def inputs_of(method: Pruner, batch: list[Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """What the graph is given, and what PyTorch makes of it."""
    tokens, attention, states = tensors(batch)
    given = {"tokens": tokens}
    if "scores" in method.requirements():
        given["attention"] = attention
    if "hidden" not in method.requirements():  # the graph has none, so that SCOPE compares tokens
        states["hidden"] = None
    else:
        given["hidden_states"] = states["hidden"][:, int(states["cls"]) :].contiguous()
    return given, method.select(tokens, attention, **states, sizes=True)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.graphs) for case in CASES],
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_onnxruntime_chooses_what_pytorch_chooses(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    method = get_method(name, **({"keep": K} | parameters))
    path = tmp_path / "select.onnx"
    hidden_dim = H if "hidden" in method.requirements() else None
    export_selection(method, path, tokens=N, dim=D, hidden_dim=hidden_dim)
    check_graph(path)
    graph = session(path)
    drawn = images(cls=True)
    for batch in (drawn[:1], drawn[1:5], drawn[5:12]):
        given, expected = inputs_of(method, batch)
        assert_same(run(graph, **given), (expected.tokens, expected.indices, expected.sizes))


def test_salience_follows_cls() -> None:
    """Without a CLS token ClustRS adds the norms to the attention, in the module as in `select`."""
    batch = images(cls=False)[:4]
    tokens, attention, _ = tensors(batch)
    method = ClustRS(keep=K)
    expected = {cls: method.select(tokens, attention, cls=cls).indices for cls in (True, False)}
    assert not torch.equal(expected[True], expected[False])
    for cls in (True, False):
        _, indices, _ = TokenSelection(method, N, D, cls=cls)(tokens, attention)
        assert torch.equal(indices, expected[cls])


def test_file_beside_the_graph(tmp_path: Path) -> None:
    info = export_selection(FasterVLM(keep=0.25), tmp_path / "deep" / "select.onnx", tokens=N, dim=D)
    written = json.loads((tmp_path / "deep" / "select.json").read_text())
    assert written["method"] == {"name": "fastervlm", "keep": 0.25}
    assert (written["tokens"], written["kept"], written["dim"], written["opset"]) == (N, N // 4, D, 18)
    assert written["inputs"] == {"tokens": ["batch", N, D], "attention": ["batch", N]}
    assert written["outputs"] == {
        "image_features": ["batch", N // 4, D],
        "indices": ["batch", N // 4],
        "sizes": ["batch", N // 4],
    }
    assert written["model_type"] is None
    assert {"clustrs", "torch", "onnx"} <= written["versions"].keys()
    assert info.kept == N // 4


@pytest.mark.graphs
def test_traced_program_runs_in_pytorch() -> None:
    """The program that ONNX files are made of is one for `torch.export`, too, for any number of images."""
    method = ClustRS(keep=K)
    program = trace(TokenSelection(method, N, D)).module()
    for batch in (images(cls=True)[:2], images(cls=True)[2:7]):
        given, expected = inputs_of(method, batch)
        tokens, indices, sizes = program(**given)
        assert torch.equal(indices, expected.indices)
        assert torch.equal(sizes, expected.sizes)
        torch.testing.assert_close(tokens, expected.tokens, rtol=1e-5, atol=1e-5)


def test_methods_that_cannot_be_exported_are_refused() -> None:
    for name in ("fastv", "pyramiddrop", "dart", "compose"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be exported: it prunes inside the language model"):
            TokenSelection(get_method(name, keep=K), N, D)
    refused = [name for name in list_methods("encoder") if not method_class(name).exportable]
    assert refused == ["cdpruner", "evs", "hiprune", "prumerge-plus", "tome", "vidcom2", "visionzip", "vscan"]
    for name in refused:
        with pytest.raises(
            ValueError, match=f"method '{name}' cannot be exported \\(exportable: clustermeans, clustrs, denoise"
        ):
            TokenSelection(get_method(name, keep=K), N, D)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            VisPruner(keep=K),
            {},
            "hidden_dim for vispruner must be the width of the hidden states it compares, got None",
        ),
        (
            FasterVLM(keep=K),
            {"hidden_dim": 8},
            "hidden_dim for fastervlm must be None, .* got 8",
        ),
        (FasterVLM(keep=K), {"tokens": 0}, "tokens must be an integer of at least 1, got 0"),
        (FasterVLM(keep=K), {"dim": -3}, "dim must be an integer of at least 1, got -3"),
        (FasterVLM(keep=K), {"tokens": 3}, "keep must be fewer than all 3 tokens, got 4"),
        (NoPruning(), {}, "keep must be fewer than all 32 tokens, got 1.0"),
        (FasterVLM(keep=K), {"path": "select.bin"}, "path must end in .onnx, got 'select.bin'"),
    ],
)
def test_bad_arguments(method: Pruner, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"path": "select.onnx", "tokens": N, "dim": D} | options
    with pytest.raises(ValueError, match=message):
        export_selection(method, **arguments)
