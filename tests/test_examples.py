"""The example scripts that README shows run from the first line to the printed answer."""

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from tiny_models import BUILDERS, make_image

from clustrs import ClustRS, Pruner
from clustrs.models.ask import ask
from clustrs.models.load import load_model, load_processor
from clustrs.models.processors import IMAGE_ONLY

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTION = "What is in this picture?"


@pytest.mark.parametrize(
    ("script", "family", "method"),
    [("llava.py", "llava", ClustRS(keep=6)), ("qwen3_vl.py", "qwen3_vl", ClustRS(keep=0.25))],
)
def test_script_prints_the_answer_of_ask(
    script: str,
    family: str,
    method: Pruner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model is small and random, and keeps 6 of 16 tokens in place of 64 of 576; the rest is the script itself."""
    BUILDERS[family](tmp_path / "model")
    image = make_image(112, 140)
    image.save(tmp_path / "photo.jpg", quality=100)
    text, replaced = re.subn(r'name = ".*"', f"name = {str(tmp_path / 'model')!r}", (EXAMPLES / script).read_text())
    assert replaced == 1
    (tmp_path / script).write_text(text.replace("keep=64", "keep=6"))
    monkeypatch.chdir(tmp_path)
    if family in IMAGE_ONLY and find_spec("torchvision") is None:
        monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load_processor)
    values = runpy.run_path(script)
    printed = capsys.readouterr().out
    assert "_clustrs_handle" not in vars(values["model"])
    model, processor = load_model(str(tmp_path / "model"))
    answer = ask(model, processor, values["content"][0]["image"], QUESTION, method, max_new_tokens=64)
    assert printed.strip() == answer.text
    assert answer.visual_tokens < answer.unpruned_tokens
    assert len(values["inputs"]["input_ids"][0]) < values["output"].shape[1]


def test_scripts_are_short() -> None:
    for script in ("llava.py", "qwen3_vl.py"):
        lines = (EXAMPLES / script).read_text().splitlines()
        assert len([line for line in lines if line and not line.startswith(("import", "from"))]) <= 12
