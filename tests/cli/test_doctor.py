"""`clustrs doctor`: one line for each optional package, and an exit code that says whether one is broken."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import clustrs
from clustrs.cli import doctor, main
from clustrs.cli.doctor import Check, examine
from clustrs.serving import server

SECRET = "sk-nobody-may-see-this"


def fails() -> str:
    print("noise of a library")
    raise RuntimeError("its\nCUDA is too old")


def test_what_works() -> None:
    finding = examine(Check("numbers", ("numpy",), "pip install numpy", lambda: "fine"))
    assert (finding.state, finding.note) == ("works", "fine")
    assert finding.version == f"numpy {metadata.version('numpy')}"
    assert examine(Check("numbers", ("numpy",), "", fails), try_it=False).state == "installed"


def test_what_is_missing_says_what_to_do() -> None:
    check = Check("two", ("numpy", "no_such_module"), "pip install 'clustrs[two]'", fails)
    assert examine(check).state == "not installed"
    assert examine(check).note == "pip install 'clustrs[two]'"


def test_what_is_broken_says_why_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    finding = examine(Check("numbers", ("numpy",), "", fails))
    assert (finding.state, finding.note) == (doctor.BROKEN, "RuntimeError: its CUDA is too old")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("broken", "code"), [(False, 0), (True, 1)])
def test_exit_code(
    broken: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Check("missing", ("no_such_module",), "pip install it", fails)
    there = Check("there", ("numpy",), "", fails if broken else lambda: "")
    monkeypatch.setattr(doctor, "CHECKS", (missing, there))
    assert main(["doctor", "--try"]) == code
    first, second, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"clustrs {clustrs.__version__}, Python {platform.python_version()}, ")
    assert second.startswith(f"torch {torch.__version__}, ")
    assert len(lines) == 2 + 3
    assert "not installed" in lines[2]
    assert ("broken" if broken else "works") in lines[3]
    assert main(["doctor"]) == 0, "nothing is tried"


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (Check("numbers", ("numpy",), "", lambda: "fine"),))
    assert main(["doctor", "--try", "--json"]) == 0
    first, judge = json.loads(capsys.readouterr().out)
    assert first["state"] == "works"
    assert judge["name"] == "judge key"


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setenv(doctor.JUDGE_KEY, SECRET)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "| set " in printed
    assert SECRET not in printed
    monkeypatch.delenv(doctor.JUDGE_KEY)
    assert main(["doctor", "--json"]) == 0
    note = "clustrs judge reads OPENAI_API_KEY; servers of your own may need none"
    expected = [{"name": "judge key", "state": "not set", "version": "", "note": note}]
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.slow
def test_every_check_of_this_environment() -> None:
    """What is installed here works: the names and the trials are right. UMAP is imported without compiling its code."""
    words = [sys.executable, "-m", "clustrs.cli", "doctor", "--try", "--json"]
    done = subprocess.run(words, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {name: finding["note"] for name, finding in findings.items() if finding["state"] == doctor.BROKEN} == {}
    assert done.returncode == 0, done.stderr
    there = {check.name for check in doctor.CHECKS if all(map(find_spec, check.modules))}
    assert {name for name, finding in findings.items() if finding["state"] == "works"} == there
    assert findings["models"]["state"] == "works"
    assert findings["models"]["note"].endswith("families of models")


def test_a_broken_package_is_found(tmp_path: Path) -> None:
    """A package that is there and can't be imported."""
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino" / "__init__.py").write_text("raise ImportError('libopenvino.so: wrong ELF class')")
    script = (
        "from clustrs.cli import doctor\n"
        "doctor.CHECKS = tuple(c for c in doctor.CHECKS if c.name == 'OpenVINO')\n"
        "from clustrs.cli import main\n"
        "raise SystemExit(main(['doctor', '--try']))"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    called = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert called.returncode == 1, called.stderr
    assert "broken" in called.stdout
    assert "ImportError: libopenvino.so: wrong ELF class" in called.stdout


def test_a_plugin_that_vllm_would_not_load_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, no entry point, or one that is left out: nothing of it needs vLLM."""
    ours = type("Entry", (), {"name": "clustrs"})
    monkeypatch.setattr(server, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(server, "check_interfaces", lambda version: None)
    monkeypatch.setattr(server, "entry_points", lambda group: [ours])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    check = Check("vLLM", ("numpy",), "", doctor.try_vllm)
    assert examine(check).note.startswith("ValueError: VLLM_PLUGINS='other' leaves out the plugin")
    monkeypatch.setattr(server, "entry_points", lambda group: [])
    assert examine(check).note.startswith("ValueError: the vLLM plugin of clustrs was not found")
    monkeypatch.undo()
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    assert examine(check).note.startswith("ValueError: vLLM is not installed")
    assert examine(check).state == doctor.BROKEN


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lmms_eval") is None, reason="needs lmms-eval")
def test_an_entry_point_that_hides_ours_is_named(tmp_path: Path) -> None:
    """lmms-eval stops at the first entry point that fails, with a warning: the models after it are missing."""
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lmms_eval.models]\nanother = no_such_module:manifest\n")
    script = (
        "from clustrs.cli import doctor\nprint(*(doctor.examine(c) for c in doctor.CHECKS if c.name == 'lmms-eval'))"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    called = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "state='broken'" in called.stdout, called.stderr
    assert "entry point another = no_such_module:manifest of another in lmms_eval.models failed" in called.stdout
