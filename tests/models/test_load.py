"""Loading a model: nobody's code is run, no question is asked, and a hub model's files are found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clustrs.evaluation.checksums import model_checksums
from clustrs.models.load import load_model, local_files

CODE = "raise SystemExit('somebody else\\'s code was run')\n"


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
def test_remote_code_is_neither_run_nor_asked_about(
    folder_of: Callable[[str, str], Path], tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folder_of("llava", "clip"), tmp_path / "model")
    stored = json.loads((folder / file).read_text())
    if file == "config.json":
        stored["model_type"] = "somebodys"
    if file == "processor_config.json":
        stored["processor_class"] = "Somebodys"
    names = ("AutoConfig", "AutoModelForImageTextToText", "AutoProcessor", "AutoTokenizer")
    stored["auto_map"] = dict.fromkeys(names, "code.Somebodys")
    (folder / file).write_text(json.dumps(stored))
    (folder / "code.py").write_text(CODE)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(ValueError, match="could not be loaded") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_model_of_the_hub_is_known_by_its_snapshot(
    folder_of: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--somebody--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(folder_of("llava", "clip"), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert local_files("somebody/tiny") == snapshot
    assert model_checksums(local_files("somebody/tiny")) == model_checksums(folder_of("llava", "clip"))
    with pytest.raises(ValueError, match="model 'somebody/other' could not be loaded") as caught:
        local_files("somebody/other")
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for load in (load_model, local_files):
        with pytest.raises(ValueError, match="there is no such folder"):
            load(str(tmp_path / "nothing"))
