"""Resuming a run: what failed is asked again, and nothing is mixed that was made differently."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import tiny_models
import torch
from evaluation import run_files
from evaluation.run_files import answers, config, errors

from clustrs import run
from clustrs.evaluation import runner, store
from clustrs.evaluation.config import Config
from clustrs.evaluation.store import read_config
from clustrs.evaluation.tasks import file_checksum, image_checksum
from clustrs.models import ask as shared_encoding

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_files.build(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def finished(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(config(original), folder, progress=False)
    return folder


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy of the task and the model that a test may change."""
    return shutil.copytree(original, tmp_path / "task")


def test_a_passing_fault_is_not_for_ever(root: Path, finished: Path, tmp_path: Path) -> None:
    """Images on a share that is away for a while."""
    folder = tmp_path / "run"
    hidden = [root / f"{number}.png" for number in (1, 2, 3)]
    for path in hidden:
        path.rename(path.with_suffix(".away"))
    summary = run(config(root), folder, progress=False)
    assert (summary.answers, summary.failed, summary.reused) == (16, 12, 0)
    for path in hidden:
        path.with_suffix(".away").rename(path)
    summary = run(config(root), folder, progress=False)
    assert (summary.answers, summary.failed, summary.reused) == (16, 0, 4)
    assert answers(folder) == answers(finished)


def test_no_retry_keeps_failures(root: Path, tmp_path: Path) -> None:
    content = (root / "1.png").read_bytes()
    (root / "1.png").unlink()
    run(config(root), tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "answers.jsonl").read_bytes()
    (root / "1.png").write_bytes(content)
    summary = run(config(root), tmp_path / "run", retry=False, progress=False)
    assert (summary.answers, summary.failed, summary.reused) == (16, 4, 16)
    assert (tmp_path / "run" / "answers.jsonl").read_bytes() == before


def test_only_what_failed_is_asked_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = (root / "1.png").read_bytes()
    (root / "1.png").write_bytes(content[:200])
    run(config(root), tmp_path / "run", progress=False)
    assert set(errors(tmp_path / "run")) == {"1-0", "1-1"}
    (root / "1.png").write_bytes(content)  # the image is repaired: there were no answers about it
    shown: list[int] = []
    original = shared_encoding.encode

    def counting(model: Any, processor: Any, images: Any, texts: Any, *options: Any) -> Any:
        shown.append(len(texts))
        return original(model, processor, images, texts, *options)

    monkeypatch.setattr(shared_encoding, "encode", counting)
    assert run(config(root), tmp_path / "run", progress=False).failed == 0
    assert shown == [2]


def test_many_failures_in_a_row_stop_the_run(root: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (root / f"{number}.png").unlink()
    with pytest.raises(ValueError, match=r"stopped: 3 answers of none in a row failed.*no such file") as caught:
        run(config(root, batch_size=1), tmp_path / "run", max_failures=3, progress=False)
    assert "\n" not in str(caught.value)
    assert len(errors(tmp_path / "run")) == 3
    with pytest.raises(ValueError, match=r"max_failures must be an integer of at least 1, got 0"):
        run(config(root), tmp_path / "run", max_failures=0, progress=False)


def test_failures_that_are_known_do_not_stop_a_resumed_run(root: Path, tmp_path: Path) -> None:
    for number in (1, 3):
        (root / f"{number}.png").unlink()
    assert run(config(root), tmp_path / "run", max_failures=3, progress=False).failed == 8
    summary = run(config(root), tmp_path / "run", max_failures=3, progress=False)
    assert (summary.answers, summary.failed) == (16, 8)


def test_a_method_that_always_fails_stops_the_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = shared_encoding.reply

    def failing(model: Any, processor: Any, batch: Any, method: Any, *args: Any, **options: Any) -> Any:
        if method.name == "clustrs":
            raise RuntimeError("a bug")
        return original(model, processor, batch, method, *args, **options)

    monkeypatch.setattr(shared_encoding, "reply", failing)
    with pytest.raises(ValueError, match="stopped: 6 answers of clustrs in a row failed, the last one with: a bug"):
        run(config(root), tmp_path / "run", max_failures=6, progress=False)


def test_exit_codes(run: Run, root: Path, tmp_path: Path) -> None:
    words: list[Any] = ["eval", "--task", "custom", "--data", root, "--model", root / "model", "--quiet"]
    words += ["--methods", "none", "--max-new-tokens", 2, "-o", tmp_path / "run"]
    content = (root / "1.png").read_bytes()
    (root / "1.png").unlink()
    assert run(*words)[0] == 3
    assert run(*words, "--no-retry")[0] == 3
    code, _, err = run(*words[:-1], tmp_path / "other", "--max-failures", 2)
    assert code == 2
    assert "2 answers of none in a row failed" in err
    (root / "1.png").write_bytes(content)
    assert run(*words, "--no-retry")[0] == 3
    assert run(*words)[0] == 0
    assert run("eval", "--help")[0] == 0


def test_the_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    from clustrs.cli import main

    assert main(["eval", "--help"]) == 0
    out = capsys.readouterr().out
    assert "3  the run is complete, but some answers failed" in out
    assert "--no-retry" in out


def change_weights(root: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + torch.ones_like(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def change_processor(root: Path) -> None:
    path = root / "model" / "processor_config.json"
    stored = json.loads(path.read_text())
    stored["image_processor"]["do_center_crop"] = False
    path.write_text(json.dumps(stored))


def change_template(root: Path) -> None:
    path = root / "model" / "chat_template.jinja"
    path.write_text("Be short. " + path.read_text())


def change_image(root: Path) -> None:
    tiny_models.make_image(40, 50, 99).save(root / "1.png")


def change_question(root: Path) -> None:
    path = root / "questions.jsonl"
    path.write_text(path.read_text().replace("Why 0?", "Who 0?"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_weights, 'model_files/model.safetensors: was "[0-9a-f]{64}", now "[0-9a-f]{64}"'),
        (change_processor, "model_files/processor_config.json: was "),
        (change_template, "model_files/chat_template.jinja: was "),
        (change_image, "image '1.png' has changed since it was asked about .was '[0-9a-f]{64}', now '[0-9a-f]{64}'"),
        (change_question, "fingerprint: was "),
    ],
)
def test_a_change_is_refused_by_name(root: Path, tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    run(config(root, limit=4), tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "answers.jsonl").read_bytes()
    run(config(root, limit=4), tmp_path / "run", progress=False)
    change(root)
    with pytest.raises(ValueError, match=message) as caught:
        run(config(root, limit=4), tmp_path / "run", progress=False)
    assert "--output" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "run" / "answers.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["clustrs", "torch", "transformers"])
def test_another_version_is_refused_by_name(
    original: Path, finished: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{name}.__version__", "0.0.7")
    with pytest.raises(ValueError, match=rf'{name}: was ".*", now "0\.0\.7"'):
        run(config(original), finished, progress=False)


def test_a_run_of_the_previous_release_is_resumed(original: Path, tmp_path: Path) -> None:
    """0.2 gives the answers of 0.1, so a run may begin with the one and end with the other: 0.1 had plain attention."""
    before = replace(config(original), positions="compact", attention="plain")
    folder = tmp_path / "run"
    run(before, folder, progress=False)
    stored = json.loads((folder / "config.json").read_text())
    assert "chosen" not in stored
    del stored["attention"]
    (folder / "config.json").write_text(json.dumps({**stored, "clustrs": "0.1.0"}))
    assert Config.from_json(read_config(folder)) == before
    lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text("".join(lines[:-3]))
    summary = run(before, folder, progress=False)
    assert (summary.answers, summary.reused) == (len(lines), len(lines) - 3)
    assert sorted((folder / "answers.jsonl").read_text().splitlines(keepends=True)) == sorted(lines)
    assert read_config(folder)["clustrs"] == "0.1.0"
    with pytest.raises(ValueError, match=r'attention: was "plain", now "auto"; .*positions: was "compact", now "auto"'):
        run(config(original), folder, progress=False)


def test_what_auto_chose_is_stored_and_used(original: Path, finished: Path, tmp_path: Path) -> None:
    stored = read_config(finished)
    chosen: dict[str, Any] = {"positions": "original", "attention": "proportional"}
    assert (stored["positions"], stored["attention"], stored["chosen"]) == ("auto", "auto", chosen)
    run(replace(config(original), **chosen), tmp_path / "named", progress=False)
    assert answers(tmp_path / "named") == answers(finished)
    other = json.dumps({**stored, "chosen": {**chosen, "positions": "compact"}})
    changed = shutil.copytree(finished, tmp_path / "changed")
    (changed / "config.json").write_text(other)
    with pytest.raises(ValueError, match='chosen/positions: was "compact", now "original"'):
        run(config(original), changed, progress=False)
    flash = runner.choose_auto(replace(config(original), attn="flash_attention_2", positions="compact"))
    assert flash == {"chosen": {"attention": "plain"}}


def test_a_folder_without_its_configuration_is_not_adopted(original: Path, finished: Path, tmp_path: Path) -> None:
    for name in ("config.json", "images.json"):
        folder = shutil.copytree(finished, tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=f"has answers but no {name}"):
            run(config(original), folder, progress=False)
        assert not (folder / name).exists()


def test_an_image_that_was_not_there_at_first_is_watched_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum could not be had when the run began; it is stored with the first answer about it."""
    early = iter(range(4))
    monkeypatch.setattr(
        store, "image_checksum", lambda *one: image_checksum(*one) if next(early, None) is None else None
    )
    run(config(root), tmp_path / "run", progress=False)
    monkeypatch.undo()
    change_image(root)
    with pytest.raises(ValueError, match=r"image '1\.png' has changed"):
        run(config(root), tmp_path / "run", progress=False)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_batch_size_may_change(original: Path, finished: Path, tmp_path: Path, size: int) -> None:
    lines = (finished / "answers.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("config.json", "images.json"):
        shutil.copy(finished / name, tmp_path)
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:5]))
    summary = run(config(original, batch_size=size), tmp_path, progress=False)
    assert (summary.answers, summary.reused) == (16, 5)
    assert answers(tmp_path) == answers(finished)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_answers_do_not_depend_on_the_batch_size(
    folder_of: Callable[[str, str], Path], original: Path, tmp_path: Path, family: str
) -> None:
    """Prompts of different lengths, so that batches have padding."""
    model = folder_of(family, "clip" if family != "llava_onevision" else "siglip")
    results = []
    for size in (1, 2, 5, 8):
        folder = tmp_path / str(size)
        settings = {"model": str(model), "batch_size": size, "max_new_tokens": 6}
        run(config(original, **settings, corruptions=("clean", "gaussian:0.5")), folder, progress=False)
        results.append(answers(folder))
    assert len(results[0]) == 32
    assert all(record.error is None for record in results[0].values())
    assert results[1:] == results[:1] * 3


def test_the_default_folder_does_not_depend_on_the_batch_size(original: Path) -> None:
    from clustrs.cli.evaluate import default_folder

    assert default_folder(config(original, batch_size=1)) == default_folder(config(original))
    assert default_folder(config(original, limit=3)) != default_folder(config(original))


def test_checksums_read_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"abc")
    opened: list[Path] = []

    def counting(path: Path) -> BinaryIO:
        opened.append(path)
        return path.open("rb")

    monkeypatch.setattr("clustrs.evaluation.tasks.open_regular", counting)
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # sha256sum of "abc"
    assert [file_checksum(path) for _ in range(3)] == [expected] * 3
    assert opened == [path]
    path.write_bytes(b"abcd")
    assert file_checksum(path) != expected


def test_large_weights_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    (tmp_path / "b.bin").write_bytes(b"not read where there are safetensors")
    monkeypatch.setattr(runner, "LARGE", 2)
    assert list(runner.model_checksums(tmp_path)) == ["a.safetensors"]
    assert "checking 1 files of the model" in capsys.readouterr().err
    runner.model_checksums(tmp_path, progress=False)
    assert capsys.readouterr().err == ""


def test_what_is_stored(original: Path, finished: Path) -> None:
    stored = read_config(finished)
    assert Config.from_json(stored) == config(original)
    assert {"model.safetensors", "config.json", "tokenizer.json", "processor_config.json"} <= set(stored["model_files"])
    assert set(json.loads((finished / "images.json").read_text())) == {f"{number}.png" for number in range(4)}


def first_line(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "answers.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item": 3}, r"line 17: item must be str, got 3$"),
        ({"kept": [0.5]}, r"line 17: kept must be token indices from 0 .* got \[0.5\]$"),
        ({"item": "9-9"}, "line 17: item '9-9' does not belong to this run"),
        ({"method": {"name": "grid", "keep": 4}}, "line 17: method .* does not belong to this run"),
        ({"corruption": "fog:1"}, "line 17: corruption 'fog:1' does not belong to this run"),
        ({"seed": 5}, "line 17: seed 5 does not belong to this run"),
        ({}, "line 17: '0-0' was answered with this method and corruption before"),
        ("rubbish", "line 17: not JSON"),
        ('{"item": "\\ud800"}', "line 17: image must be str, got nothing$"),
        ("[" * 100_000, "line 17: not JSON .*nested too deeply"),
    ],
)
def test_alien_records(original: Path, finished: Path, tmp_path: Path, changes: Any, message: str) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    text = changes if isinstance(changes, str) else json.dumps({**first_line(folder), **changes})
    with (folder / "answers.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        run(config(original), folder, progress=False)
    assert len(str(caught.value)) < 400
