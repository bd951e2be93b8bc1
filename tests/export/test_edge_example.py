"""The example answers what the attached method answers."""

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clustrs import ClustRS
from clustrs.embedded import image_path
from clustrs.models.ask import ask
from clustrs.models.load import load_model
from examples import edge_onnx

KEEP = 6
QUESTIONS = ["How many objects are there?", "Is there a red circle?"]


@pytest.mark.graphs
def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "vision.onnx"
    model, processor = load_model("mini-llava")
    for corruption in ([], ["--corrupt", "gaussian:0.5"]):
        words = ["sample:scene-1", QUESTIONS[0], "--keep", str(KEEP), "--graph", str(graph), *corruption]
        monkeypatch.setattr(sys, "argv", ["edge_onnx", *words])
        edge_onnx.main()
    *_, kept, answer = capsys.readouterr().out.splitlines()[:3]
    image = Image.open(image_path("sample:scene-1")).convert("RGB")
    options: Any = {"positions": "compact", "attention": "plain"}
    expected = [ask(model, processor, image, question, ClustRS(keep=KEEP), 8, **options) for question in QUESTIONS]
    assert kept == "kept tokens: " + " ".join(map(str, expected[0].image.selection.indices.tolist()))
    assert answer == expected[0].text
    features, _ = edge_onnx.encode(edge_onnx.open_graph(graph, 1), processor, [image])
    both = edge_onnx.answers(model, processor, features.repeat(2, 0), QUESTIONS)
    assert both == [reply.text for reply in expected]
