"""`clustrs serve` before vLLM starts, and `clustrs encode`. None of this needs vLLM."""

import atexit
import base64
import io
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from clustrs import ClustRS
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path, model_folder
from clustrs.models.ask import ask
from clustrs.models.load import load_model
from clustrs.serving import embeddings, plugin, server

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What would have been started, with a vLLM that is tested and has the plugin."""
    commands: list[list[str]] = []
    monkeypatch.setattr(server, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(server, "version", lambda name: "0.32.0")
    monkeypatch.setattr(server, "check_interfaces", lambda version: None)
    monkeypatch.setattr(server, "entry_points", lambda group: [type("Entry", (), {"name": "clustrs"})])
    monkeypatch.setattr(os, "execv", lambda path, arguments: commands.append(arguments))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv(plugin.METRICS_FOLDER, str(tmp_path))
    return commands


def test_a_folder_of_metrics_that_serve_made_goes_with_its_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda remove, folder, **options: removed.append(folder))
    names = [plugin.metrics_prefix() + "x", "clustrs-metrics-1-x", "given by the user"]
    for name in names:
        monkeypatch.setenv(plugin.METRICS_FOLDER, str(tmp_path / name))
        plugin.remove_metrics_at_exit()
    assert removed == [tmp_path / names[0]]


def overrides(command: list[str]) -> Any:
    assert command[-2] == "--hf-overrides"  # last, so that no other spelling of it wins
    return json.loads(command[-1])


def test_serve_starts_vllm_and_says_what_is_pruned(run: Run, started: list[list[str]]) -> None:
    code, out, err = run("serve", "mini-llava", "--keep", "16", "--set", "tau=2", "--port", "8001", "--enforce-eager")
    assert (code, err) == (0, "")
    assert out.startswith("clustrs: mini-llava with ClustRS(keep=16, ")
    assert "tau=2" in out
    assert out.endswith("): 576 -> 16 visual tokens per image, original positions, in a pruned class of vLLM's\n")
    (command,) = started
    folder = str(model_folder("mini-llava"))
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder]
    assert command[5:-2] == ["--served-model-name", "mini-llava", "--port", "8001", "--enforce-eager"]
    assert overrides(command) == {
        "architectures": ["ClustrsLlavaForConditionalGeneration"],
        "clustrs": {"method": "clustrs", "keep": 16, "tau": 2, "positions": "auto", "attention": "plain"},
    }


def test_serve_starts_builds_of_another_name_by_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(server, "version", missing)
    assert server.server_words("M") == ("vllm.entrypoints.openai.api_server", "--model", "M")


def test_serve_passes_all_other_words_on_in_their_order(run: Run, started: list[list[str]]) -> None:
    given = ["--served-model-name", "mine", "--max-model-len=2048", "--limit-mm-per-prompt", '{"image": 2}', "-tp", "2"]
    assert run("serve", "mini-onevision", *given, "--keep", "0.25", "--method", "divprune")[0] == 0
    (command,) = started
    assert command[-len(given) - 2 : -2] == given
    assert command.count("--served-model-name") == 1
    shared = {"positions": "auto", "attention": "plain"}
    assert overrides(command)["clustrs"] == {"method": "divprune", "keep": 0.25, **shared}


def test_serve_says_the_positions(run: Run, started: list[list[str]]) -> None:
    for model, words, positions in (
        ("mini-onevision", [], "compact"),
        ("mini-onevision", ["--positions", "original"], "original"),
        ("mini-llava", ["--positions", "compact"], "compact"),
    ):
        assert f", {positions} positions, in " in run("serve", model, "--keep", "16", *words)[1]
    assert [overrides(command)["clustrs"]["positions"] for command in started] == ["auto", "original", "compact"]


def test_serve_takes_a_range_of_budgets(run: Run, started: list[list[str]]) -> None:
    code, out, _ = run("serve", "mini-llava", "--keep", "64", "--keep-range", "16", "256", "--port", "8001")
    assert code == 0
    assert ": 576 -> 64 visual tokens per image, 16 to 256 by request, original positions" in out
    assert overrides(started[0])["clustrs"]["keep_range"] == [16, 256]
    assert started[0][-4:-2] == ["--port", "8001"]


@pytest.mark.parametrize(
    "values", [["64"], ["65", "256"], ["16", "63"], ["0.1", "0.5"], ["16", "64", "256"], ["0", "9"]]
)
def test_serve_refuses_a_range_that_does_not_fit(run: Run, started: list[list[str]], values: list[str]) -> None:
    code, _, err = run("serve", "mini-llava", "--keep", "64", "--keep-range", *values)
    assert (code, started) == (2, [])
    assert err.count("\n") == 1
    assert "range must be a floor and a ceiling around keep=64" in err or "--keep-range must be a count" in err


def test_serve_adds_to_overrides(run: Run, started: list[list[str]]) -> None:
    for words in (["--hf-overrides", '{"a": 1}'], ['--hf-overrides={"a": 1}'], ["--hf_overrides", '{"a": 1}']):
        assert run("serve", "mini-llava", "--keep", "16", *words)[0] == 0
    assert [overrides(command)["a"] for command in started] == [1, 1, 1]
    assert all(sum("overrides" in word for word in command) == 1 for command in started)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mini-llava", "--keep", "0"], "--keep must be a count"),
        (["mini-llava"], "--keep"),
        (["mini-llava", "--keep", "4", "--method", "nope"], "unknown method 'nope'"),
        (["mini-llava", "--keep", "4", "--method", "visionzip"], "'visionzip' cannot be served: it needs hidden"),
        (["mini-llava", "--keep", "4", "--set", "tua=2"], "clustrs has no parameter 'tua'"),
        (["mini-llava", "--keep", "4", "--set", "keep=5"], "--set must not contain keep (write --keep 5)"),
        (["./nowhere", "--keep", "4"], "model './nowhere': there is no such folder"),
        (["mini-llava", "--keep", "4", "--hf-overrides", "{"], "--hf-overrides must be a JSON object, got {"),
        (["mini-llava", "--keep", "4", "--hf-overrides", '{"clustrs": {}}'], "the key 'clustrs' is set by"),
        (["mini-llava", "--keep", "4", "--hf-overrides.a", "1"], "pass all overrides as one object"),
        (
            ["photo-llava", "--keep", "4", "--model-impl", "vllm"],
            "vision tower 'dinov2' has no pruned class (supported",
        ),
        (["photo-llava", "--keep", "4", "-tp", "2"], "-tp 2 can't be combined with a pruned Llava"),
        (
            ["mini-llava", "--keep", "4", "--attention", "proportional"],
            "attention must be 'plain' in vLLM",
        ),
        (["mini-llava", "--keep", "4", "--positions", "some"], "--positions"),
        (["mini-llava", "--keep", "4", "-pp", "2"], "ForConditionalGeneration: use 1, or --positions compact"),
        (["mini-llava", "--keep", "4", "--spec-method", "ngram"], "omit it, or --positions compact"),
        (["mini-llava", "--keep", "4", "--model_impl=terratorch"], "model_impl must be one of 'auto', 'vllm', 'trans"),
    ],
)
def test_serve_stops_in_one_line(run: Run, started: list[list[str]], words: list[str], message: str) -> None:
    code, out, err = run("serve", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert started == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2 can't be combined with a pruned Qwen2_5_VL"),
        (["-pp=2"], "-pp 2 can't be combined"),
        (["--speculative-config", "{}"], "--speculative-config can't be combined"),
        (["--speculative-config.method", "ngram"], "--speculative-config.method can't be combined"),
        (["--spec-method", "ngram"], "--spec-method can't be combined"),
        (["--enable-dbo"], "ForConditionalGeneration: omit it"),
        (["--mm-encoder-tp-mode", "data"], "ForConditionalGeneration: use weights"),
        (["--enable_mm_embeds", "--port", "8001"], "--enable-mm-embeds can't be combined"),
        (["--video-pruning-rate=0.5"], "--video-pruning-rate 0.5 can't be combined"),
        (["--positions", "compact"], "positions must be 'auto' or 'original' for a Qwen model"),
        (["-pp", "1", "--mm-encoder-tp-mode", "weights", "--no-enable-dbo", "--video-pruning-rate", "0"], ""),
    ],
)
def test_serve_stops_for_options_that_qwen_does_not_take(
    run: Run, started: list[list[str]], tmp_path: Path, words: list[str], message: str
) -> None:
    """The same ones are passed on where they do no harm."""
    content = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    code, _, err = run("serve", str(tmp_path), "--keep", "4", *words)
    assert (code, len(started)) == ((2, 0) if message else (0, 1))
    assert message in err
    assert err.count("\n") == bool(message)
    if message:
        assert run("serve", "mini-llava", "--keep", "4", "--positions", "compact", *words)[0] == 0


def test_serve_says_which_implementation_runs(run: Run, started: list[list[str]]) -> None:
    _, out, _ = run("serve", "photo-llava", "--keep", "4")
    assert ", in vLLM's Transformers backend (vision tower 'dinov2' has no pruned class" in out
    _, out, _ = run("serve", "mini-llava", "--keep", "4", "--model-impl", "transformers")
    assert out.endswith(", in vLLM's Transformers backend (--model-impl asks for it)\n")
    names = [overrides(command)["architectures"] for command in started]
    assert names == [["ClustrsTransformersLlavaForConditionalGeneration"]] * 2


def test_serve_refuses_other_models(run: Run, started: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    code, _, err = run("serve", str(tmp_path), "--keep", "4")
    assert code == 2
    assert "architecture GPT2LMHeadModel cannot be served pruned" in err
    assert started == []


@pytest.mark.parametrize(
    ("version", "plugins", "message"),
    [
        ("0.31.0", None, "vLLM 0.31.0 lacks"),
        ("0.32.0", "other,more", "VLLM_PLUGINS='other,more' leaves out the plugin"),
        ("0.32.0", "other, clustrs", ""),
    ],
)
def test_serve_checks_the_installation(
    run: Run, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, version: str, plugins: str | None, message: str
) -> None:
    def misfit(version: str) -> None:
        raise ValueError(f"vLLM {version} lacks what the plugin uses")

    monkeypatch.setattr(server, "vllm_version", lambda: version)
    if version == "0.31.0":
        monkeypatch.setattr(server, "check_interfaces", misfit)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    code, _, err = run("serve", "mini-llava", "--keep", "4")
    assert code == (2 if message else 0)
    assert message in err


def test_serve_says_which_version_is_tested(
    run: Run, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, lines in (("0.32.0", 1), ("0.32.0+cpu", 1), ("0.33.0", 2)):
        monkeypatch.setattr(server, "vllm_version", lambda version=version: version)
        code, out, _ = run("serve", "mini-llava", "--keep", "4")
        assert (code, out.count("\n")) == (0, lines)
    assert out.startswith("clustrs: vLLM 0.33.0 has the interfaces that the plugin uses; tested is 0.32.0\n")


def test_serve_without_vllm_or_plugin(run: Run, started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "entry_points", lambda group: [])
    assert "plugin of clustrs was not found" in run("serve", "mini-llava", "--keep", "4")[2]
    monkeypatch.undo()
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    assert (
        "vLLM is not installed: pip install './packages/clustrs-models' '.[vllm]'"
        in run("serve", "mini-llava", "--keep", "4")[2]
    )


@pytest.mark.parametrize("model", ["mini-llava", "mini-onevision", "photo-llava"])
def test_encode_writes_what_the_model_would_be_fed(run: Run, tmp_path: Path, model: str) -> None:
    words = ["sample:scene-1", "sample:cat", "--model", model, "--keep", "16", "--save-dtype", "float32"]
    code, out, _ = run("encode", *words, "-o", str(tmp_path / "out"))
    assert code == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["cat.safetensors", "scene-1.safetensors"]
    assert out.splitlines()[0].startswith(f"{files[1]}: ")
    assert " -> 16 visual tokens, " in out
    stored = load_file(files[1])["image_embeds"]
    loaded = load_model(model)
    image = open_image(image_path("sample:scene-1"))
    answer = ask(*loaded, image, "How many objects are there?", ClustRS(keep=16), 1)
    assert torch.equal(stored[0], answer.image.selection.tokens)
    with safe_open(files[1], "pt") as file:
        facts = file.metadata()
    assert (facts["model"], json.loads(facts["method"])["keep"]) == (model, 16)
    assert int(facts["tokens_before"]) == answer.image.placeholders


def test_encoded_in_half_precision_16_tokens_of_a_7b_model_are_128_kb(tmp_path: Path) -> None:
    file = tmp_path / "image.safetensors"
    embeddings.save_embeddings(file, torch.zeros(1, 16, 4096), "float16")
    assert 128 * 1024 < file.stat().st_size < 129 * 1024


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_message_part_carries_the_numbers_without_pickle(tmp_path: Path, dtype: str) -> None:
    given = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    embeddings.save_embeddings(tmp_path / "image.safetensors", given, dtype)
    part = embeddings.message_part(tmp_path / "image.safetensors")
    assert part["type"] == "image_embeds"
    numbers = np.load(io.BytesIO(base64.b64decode(part["image_embeds"])), allow_pickle=False)
    assert torch.equal(torch.from_numpy(numbers).float(), given.to(getattr(torch, dtype)).float())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a/cat.jpg", "b/cat.png", "--keep", "4"], "another one is written to"),
        (["missing.jpg", "--keep", "4"], "image 'missing.jpg': there is no such file"),
        (["--keep", "4"], "IMAGE"),
        (["sample:cat", "--keep", "1.5"], "--keep must be a count"),
    ],
)
def test_encode_stops_in_one_line(run: Run, tmp_path: Path, words: list[str], message: str) -> None:
    code, _, err = run("encode", *words, "-o", str(tmp_path))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_encode_refuses_other_families(load: Callable[..., tuple[Any, Any]]) -> None:
    model, processor = load("llava_next")
    with pytest.raises(ValueError, match="LlavaNextForConditionalGeneration: vLLM takes its images as pixels only"):
        embeddings.encode_image(model, processor, open_image(image_path("sample:cat")), ClustRS(keep=4))
