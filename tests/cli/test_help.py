"""Help, colour, completion and suggestions: boxes on a terminal, plain text anywhere else."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest

import clustrs
from clustrs.cli import base, main
from clustrs.cli import options as o
from clustrs.cli.base import Command, app, parse
from clustrs.embedded import MODELS
from clustrs.plugins import install_hint

Run = Callable[..., tuple[int, str, str]]
COMMANDS = [
    *(
        [],
        ["ask"],
        ["compare"],
        ["corrupt"],
        ["eval"],
        ["report"],
        ["judge"],
        ["export-answers"],
        ["import-answers"],
        ["study"],
    ),
    *(["study", "overhead"], ["study", "ablation"], ["methods"], ["models"], ["samples"], ["tasks"], ["corruptions"]),
]
BOXES = re.compile("[\x1b\u2500-\u257f]")


class Terminal(io.StringIO):
    """A terminal that takes colour."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def show_on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What is printed from now on; not a fixture, because pytest replaces the stream after those."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_in_a_pipe_is_plain(run: Run, words: list[str], flag: str) -> None:
    code, out, err = run(*words, flag)
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['clustrs', *words])} ")
    assert not BOXES.search(out)
    options = [line for line in out.split("\n\nexamples")[0].splitlines() if line.startswith("  --")]
    assert max(map(len, options), default=0) <= 80


@pytest.mark.parametrize("words", [[], ["study"]])
def test_without_a_command_there_is_help(run: Run, words: list[str]) -> None:
    assert run(*words) == run(*words, "--help")


def test_options_stand_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = show_on_terminal(monkeypatch)
    assert main(["eval", "--help"]) == 0
    assert "\x1b[" in screen.getvalue()
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    for panel in ("Model", "Loading the model", "Pruning", "Images", "Questions", "Run", "Options"):
        assert f"─ {panel} ─" in shown
    screen.seek(0)
    screen.truncate()
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["eval", "--help"]) == 0
    assert not BOXES.search(screen.getvalue())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_help_text_looks_like_markup(run: Run, words: list[str]) -> None:
    usage, _, text = run(*words, "--help")[1].partition("\n\n")
    assert usage.startswith("Usage: ")
    assert "[" not in re.sub(r"<.*?>|\[required\]|\[default:[^]]*\]", "", text.partition("\nexamples")[0])


def test_version(run: Run) -> None:
    for flag in ("-V", "--version"):
        assert run(flag) == (0, f"clustrs {clustrs.__version__}\n", "")


def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    heads, rows = ["name", "n", "text"], [["a", "1", "one | two"], ["bb", "22", "x" * 200]]
    base.print_table(heads, rows)
    assert capsys.readouterr().out.splitlines() == [
        "| name | n  | text |",
        "| :--- | :- | :--- |",
        r"| a    | 1  | one \| two |",
        f"| bb   | 22 | {'x' * 200} |",
    ]
    assert base.markdown_table(heads, rows, ["n"]).splitlines()[1:3] == [
        "| :--- | -: | :--- |",
        r"| a    |  1 | one \| two |",
    ]
    screen = show_on_terminal(monkeypatch)
    base.print_table(heads, rows)
    assert "one | two" in screen.getvalue()
    assert "─" in screen.getvalue()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clustrs comp", ["compare"]),
        ("clustrs study mo", ["movement"]),
        ("clustrs ask sample:sc", [f"sample:scene-{i}" for i in range(1, 7)]),
        ("clustrs ask i.png Why? --method vis", ["visionzip", "vispruner"]),
        ("clustrs compare i.png Why? --methods none,gr", ["none,grid"]),
        ("clustrs ask i.png Why? --corrupt jpeg:", ["jpeg:60", "jpeg:30"]),
        ("clustrs eval --task mmv", ["mmvet"]),
        ("clustrs eval --model mini-", [name for name in MODELS if name.startswith("mini-")]),
        ("clustrs eval --dtype bf", ["bfloat16"]),
        ("clustrs eval --prompt-template v", ["vicuna_v1"]),
    ],
)
def test_completion(line: str, expected: list[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_CLUSTRS_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "clustrs.cli"], env={**os.environ, **words}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == expected, done.stderr


def test_completion_can_be_installed(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    words = [sys.executable, "-m", "clustrs.cli", "--install-completion", "bash"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "_CLUSTRS_COMPLETE=complete_bash" in script.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stud"], "no such command 'stud' (did you mean 'study'?) (see clustrs --help)"),
        (["study", "overhed"], "no such command 'overhed' (did you mean 'overhead'?) (see clustrs study --help)"),
        (
            ["eval", "--metods", "none"],
            "no such option: --metods (did you mean '--methods'?) (see clustrs eval --help)",
        ),
        (["eval", "--methods", "clusters"], "unknown method 'clusters' (did you mean 'clustrs'?)"),
        (["eval", "--corrupt", "gausian:1"], "unknown corruption 'gausian' (did you mean 'gaussian'?)"),
        (["ask", "sample:scene1", "Why?"], "image 'sample:scene1' (did you mean 'sample:scene-1'?): the samples are"),
        (["eval", "--task", "scene"], "unknown task 'scene' (did you mean 'scenes'?)"),
        (["eval", "--dtype", "float"], "--dtype must be one of auto, float32, float16, bfloat16 (did you mean"),
        (["judge", "run"], "missing option '--judge-model' (see clustrs judge --help)"),
    ],
)
def test_suggestions(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"clustrs: {message}")
    assert err.count("\n") == 1 + err.startswith("run: ")


@pytest.mark.parametrize(
    "command", ["ask sample:scene-1 Why?", "compare sample:scene-1 Why?", "eval", "study movement"]
)
def test_a_name_like_an_embedded_model_is_answered_without_the_hub(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr("clustrs.models.load.load_processor", lambda *_: pytest.fail("the hub was asked"))
    code, _, err = run(*command.split(), "--model", "mini-lava")
    assert code == 2
    line = "clustrs: model 'mini-lava': there is no such folder or embedded model (did you mean 'mini-llava'?)\n"
    assert err.endswith(line)


def test_without_typer(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    for name in [name for name in sys.modules if name.startswith("clustrs.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run("ask") == (2, "", f"clustrs: typer is not installed: {install_hint('cli')}\n")


def test_words_are_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    given = []

    @app.command("serve-test", cls=Command, context_settings={"ignore_unknown_options": True})
    def serve(
        model: str,
        rest: list[str],
        keep: o.Keep = None,
        quiet: Annotated[bool, o.flag("say nothing", "--quiet")] = False,
    ) -> int:
        """Serve a model."""
        given.append((model, keep, quiet, rest))
        return 7

    words = ["m", "--port", "80", "--keep", "16", "64", "--enable-this", "--quiet", "-tp", "2"]
    assert run("serve-test", *words)[0] == 7
    assert given == [("m", (16, 64), True, ["--port", "80", "--enable-this", "-tp", "2"])]
    assert "Serve a model." in run("serve-test", "--help")[1]


def test_parsing_runs_nothing() -> None:
    given = parse(["eval", "--keep", "16", "50", "--set-task", "a=1", "b=x", "--no-retry"])
    assert given == {"keep": (16, 50), "set_task": {"a": 1, "b": "x"}, "no_retry": True}


def test_the_last_of_two_wins_and_numbers_may_be_negative() -> None:
    assert parse(["compare", "i.png", "Why?", "--keep", "16", "--keep", "3", "4"])["keep"] == (3, 4)
    assert parse(["study", "movement", "a.png", "--levels", "-1", "2"])["levels"] == (-1.0, 2.0)
    assert parse(["ask", "i.png", "Why?", "--set", "tau=-1"])["settings"] == {"tau": -1}
