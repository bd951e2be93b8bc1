"""`clustrs export-onnx`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from export.graph_checks import check_graph, session

Run = Callable[..., tuple[int, str, str]]


def test_selection_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "select.onnx"
    words = ["--tokens", 24, "--dim", 8, "--keep", 3, "--method", "random", "--set", "seed=4"]
    code, out, err = run("export-onnx", *words, "-o", path)
    assert (code, err) == (0, "")
    assert "random keeps 3 of 24 tokens of 8 numbers, float32" in out
    check_graph(path)
    assert [value.name for value in session(path).get_inputs()] == ["tokens"]
    assert json.loads(path.with_suffix(".json").read_text())["method"] == {"name": "random", "keep": 3, "seed": 4}


@pytest.mark.graphs
def test_vision_encoder(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "vision.onnx"
    code, out, err = run("export-onnx", "mini-llava", "--method", "fastervlm", "--keep", 0.25, "-o", path)
    assert (code, err) == (0, "")
    assert "fastervlm keeps 144 of 576 tokens of 160 numbers, float32" in out
    check_graph(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "export-onnx needs a model, or --tokens and --dim for the selection alone"),
        (["--tokens", 24], "export-onnx needs a model, or --tokens and --dim"),
        (["mini-llava", "--dim", 8], "--dim is for the selection alone, got a model, too"),
        (["mini-llava", "mini-onevision"], "MODEL must be one model, got mini-llava mini-onevision"),
        (
            ["--tokens", 24, "--dim", 8, "--dtype", "float16"],
            "--dtype must be float32 for the selection alone",
        ),
        (["--tokens", 24, "--dim", 8, "--method", "tome"], "method 'tome' cannot be exported (exportable: "),
        (["--tokens", 24, "--dim", 8, "--keep", 3, 4], "--keep must be one budget for a graph, got 3 4"),
        (["--tokens", 24, "--dim", 8, "--set", "keep=3"], "--set must not contain keep (write --keep 3)"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Run, tmp_path: Path, words: list[Any], message: str) -> None:
    code, out, err = run("export-onnx", *words, "-o", tmp_path / "select.onnx")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_onnx_files(run: Run, tmp_path: Path) -> None:
    code, _, err = run("export-onnx", "--tokens", 24, "--dim", 8, "-o", tmp_path / "select.bin")
    assert code == 2
    assert "path must end in .onnx" in err
