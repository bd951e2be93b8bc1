"""`clustrs eval` and what follows it, from the command line."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from judge_server import Server, says
from PIL import Image
from recorded_run import write_run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eval")
    tiny_models.build("llava", "clip", root / "model")
    rows = []
    for number in range(3):
        tiny_models.make_image(40, 50, number).save(root / f"{number}.png")
        rows.append({"id": f"q{number}", "image": f"{number}.png", "question": f"Why {number}?", "answer": "x"})
    (root / "2.png").write_text("no image")
    (root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def options(root: Path) -> list[Any]:
    grid = ["--methods", "none", "clustrs", "--keep", "4,5", "--corrupt", "clean", "gaussian:0.5"]
    return ["--task", "custom", "--data", root, "--model", root / "model", "--quiet", "--max-new-tokens", 2, *grid]


@pytest.mark.figures
def test_eval_writes_a_record_and_a_report(run: Run, root: Path, tmp_path: Path) -> None:
    code, out, err = run("eval", *options(root), "-o", tmp_path / "run")
    assert code == 3  # complete, but for the answers about the broken image
    assert "run:" in err
    rows = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 3 * 2
    assert sum(row["error"] is not None for row in rows) == 6
    for name in ("report.html", "report.md", "report.tex", "report.csv"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert "clustrs" in out
    assert "report.html" in out
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert run("eval", *options(root), "--no-retry", "-o", tmp_path / "run")[0] == 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    code, _, err = run("eval", *options(root), "--seeds", 3, "-o", tmp_path / "run")
    assert code == 2
    assert "seeds: now without 0 and with 3" in err


def test_the_same_command_finds_its_run(run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("eval", *options(root))[0] == 3
    assert run("eval", *options(root), "--batch-size", 1)[0] == 3
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("custom-model-")
    assert run("report", folder)[0] == 0


def test_export_and_import(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("eval", *options(root), "-o", tmp_path / "run")[0] == 3
    code, out, _ = run("export-answers", tmp_path / "run", "--format", "mmvet", "-o", tmp_path / "files")
    assert code == 0
    assert len(out.split()) == 6
    some = sorted((tmp_path / "files").iterdir())[0]
    words = ("--task", "custom", "--data", root, "--format", "mmvet", "--name", "theirs", "-o", tmp_path / "again")
    code, out, err = run("import-answers", some, *words)
    assert (code, err) == (0, "")
    assert "theirs" in out
    rows = [json.loads(line) for line in (tmp_path / "again" / "answers.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == [None, None, "no prediction"]


@pytest.mark.parametrize(
    ("task", "folder", "words"),
    [("mmvet", "mm-vet", ()), ("scienceqa", "scienceqa", ("--set-task", "present=true"))],
)
def test_official_data_with_the_embedded_model(
    run: Run, tmp_path: Path, task: str, folder: str, words: tuple[str, ...]
) -> None:
    data = Path(__file__).parents[3] / "shared" / "data" / folder
    if not data.is_dir():
        pytest.skip(f"{data} is not there")
    grid = ("--methods", "none", "clustrs", "--corrupt", "clean", "gaussian:0.5", "--max-new-tokens", 4)
    code, _, _ = run("eval", "--task", task, "--data", data, *words, *grid, "--limit", 4, "--quiet", "-o", tmp_path)
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 2 * 2
    assert all(row["error"] is None for row in rows)
    assert all((row["score"] is None) == (task == "mmvet") for row in rows)


def test_judge(run: Run, root: Path, tmp_path: Path, serve: Callable[..., Server], monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    assert run("eval", *options(root), "--set-task", "scoring=judged", "-o", tmp_path)[0] == 3
    server = serve()
    server.rule = lambda body: says("0.5")
    monkeypatch.setattr("clustrs.evaluation.judge.UNCONFIRMED_CALLS", 1)
    words = ("judge", tmp_path, "--judge-model", "marker", "--judge-url", server.url)
    code, out, err = run(*words)
    assert (code, out, server.asked) == (2, "", [])
    assert re.fullmatch(rf"clustrs: \d+ calls to marker at {server.url} need --yes where nobody can be asked\n", err)
    code, out, err = run(*words, "--yes")
    assert code == 0
    assert "failed 0" in out
    assert "50.0" in out
    assert all(b"a-secret-key" not in path.read_bytes() for path in tmp_path.iterdir())
    assert "a-secret-key" not in out + err


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("\n", 2), ("", 2)])
def test_judge_asks_before_many_calls(
    run: Run, tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    write_run(tmp_path, lambda records: [{**record, "score": None} for record in records], judged=True)
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    server = serve()
    result, _, err = run("judge", tmp_path, "--judge-model", "marker", "--judge-url", server.url)
    assert result == code
    calls = int(err.split()[0])
    assert f"{calls} calls to marker at {server.url}. Go ahead? [y/N]" in err
    assert calls > 10
    assert len(server.asked) == (0 if code else calls)


def test_corrupt(run: Run, root: Path, tmp_path: Path) -> None:
    assert run("corrupt", root / "1.png", "--corrupt", "cutout:0.25", "-o", tmp_path / "a.png")[0] == 0
    assert (Image.open(tmp_path / "a.png").convert("L").point(lambda v: 255 * (v == 0)).histogram()[255]) == 22 * 22
    assert run("corrupt", "sample:scene-1", "--contact-sheet", "-o", tmp_path / "sheet.png")[0] == 0
    assert Image.open(tmp_path / "sheet.png").width > 500
    code, _, err = run("corrupt", root / "1.png", "-o", tmp_path / "b.png")
    assert code == 2
    assert "--corrupt NAME:LEVEL" in err
    code, _, err = run("corrupt", root / "1.png", "--corrupt", "cutout:0.25", "-o", tmp_path / "b.what")
    assert code == 2
    assert "--output" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "--task", "scene"], "clustrs: unknown task 'scene' (did you mean 'scenes'?)"),
        (["eval", "--model", "mini-lava"], "clustrs: model 'mini-lava': there is no such folder or embedded model"),
        (["eval", "--methods", "clust"], "clust"),
        (["eval", "--corrupt", "gausian"], "gaussian"),
        (["eval", "--keep", "many"], "--keep must be a count (16) or a fraction (0.25), got 'many'"),
        (["eval", "--config", "nothing"], "ready ones are"),
        (["report", "nowhere"], "nowhere"),
        (["judge", "nowhere", "--judge-model", "m"], "nowhere"),
        (["export-answers", "nowhere", "--format", "mmvet", "-o", "x"], "nowhere"),
        (["import-answers", "nowhere", "--format", "mmvet", "--task", "scenes", "-o", "x"], "nowhere"),
    ],
)
def test_mistakes(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_load_options_are_recorded(run: Run, root: Path, tmp_path: Path) -> None:
    words = ("--task", "custom", "--data", root, "--model", root / "model", "--max-new-tokens", 1, "--methods", "none")
    code, _, err = run("eval", *words, "--attn", "eager", "--device", "cpu", "-o", tmp_path)
    assert code == 3
    assert "3 answers: 1 method x 1 corruption x 1 seed x 3 questions, estimating the time from the first batch" in err
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["attn"], stored["device"]) == ("eager", "cpu")
    assert not {"dtype", "load_in_8bit", "load_in_4bit", "device_map"} & set(stored)
    assert run("eval", *words, "--attn", "eager", "-o", tmp_path)[0] == 3  # where it runs may change
    code, _, err = run("eval", *words, "-o", tmp_path)
    assert code == 2
    assert 'attn: was "eager", now null' in err


@pytest.mark.parametrize("command", ["ask {image} Why?", "compare {image} Why?", "eval", "study stability {image}"])
def test_every_command_that_loads_a_model_takes_them(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = command.format(image=root / "1.png").split()
    code, _, err = run(*words, "--model", root / "model", "--load-in-8bit", "--load-in-4bit")
    assert code == 2
    assert err.endswith("clustrs: load_in_8bit and load_in_4bit exclude each other, got both\n")
