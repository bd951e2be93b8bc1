"""Loading a model: nobody's code is run, no question is asked, and a hub model's files are found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clustrs.evaluation.runner import model_checksums
from clustrs.models.load import load_arguments, load_model, local_files
from clustrs.validation import LoadOptions

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


def test_load_options_reach_the_model(folder_of: Callable[[str, str], Path]) -> None:
    folder = str(folder_of("llava", "clip"))
    model, _ = load_model(folder)
    assert (model.dtype, model.device.type, model.config._attn_implementation) == (torch.float32, "cpu", "sdpa")
    model, _ = load_model(folder, LoadOptions(dtype="bfloat16", attn="eager", device="cpu"))
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    options = LoadOptions(device_map="cpu", dtype="float16")
    assert load_arguments(options)[1] == {"dtype": torch.float16, "device_map": "cpu"}
    assert load_model(folder, options)[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(device="gpu"), "device must be one of cpu"),
        (LoadOptions(device="meta"), "device must be one of cpu.*, got 'meta'"),
        (
            LoadOptions(device="cpu", device_map="auto"),
            "device and device_map exclude each other, got 'cpu' and 'auto'",
        ),
        (LoadOptions(attn="spda"), r"attn must be one of 'eager', .*'sdpa', got 'spda' \(did you mean 'sdpa'\?\)"),
        (LoadOptions(attn="flash_attention_2"), "attn='flash_attention_2': flash-attn is not installed"),
        (LoadOptions(load_in_8bit=True, load_in_4bit=True), "load_in_8bit and load_in_4bit exclude each other"),
        (
            LoadOptions(load_in_4bit=True),
            "load_in_4bit=True: neither bitsandbytes nor torchao is installed: pip install bitsandbytes accelerate",
        ),
        (LoadOptions(device_map="auto"), "device_map='auto': accelerate is not installed: pip install accelerate"),
    ],
)
def test_load_options_that_cannot_be(
    options: LoadOptions, message: str, monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str, str], Path]
) -> None:
    monkeypatch.setattr("clustrs.models.load.find_spec", lambda name: None)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(str(folder_of("llava", "clip")), options)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_with_options_says_which(
    folder_of: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clustrs.models.load.load_processor", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match=r"could not be loaded: .*; loaded with attn='eager'"):
        load_model(str(folder_of("llava", "clip")), LoadOptions(attn="eager"))


def test_quantisation_is_what_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustrs.models.load.find_spec", lambda name: name)
    for bits in (8, 4):
        _, arguments = load_arguments(LoadOptions(device="cpu", **{f"load_in_{bits}bit": True}))  # type: ignore[arg-type]
        config = arguments["quantization_config"]
        assert (config.load_in_8bit, config.load_in_4bit) == (bits == 8, bits == 4)
        assert arguments["device_map"] == {"": "cpu"}


def test_a_name_like_an_embedded_model() -> None:
    for load in (load_model, local_files):
        with pytest.raises(ValueError, match=r"'mini-lava': there is no .* embedded model \(did you mean 'mini-llava'"):
            load("mini-lava")
