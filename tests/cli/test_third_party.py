"""A package of somebody else: installed next to clustrs, its method appears on the command line and in reports."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import clustrs
import clustrs_models

FILES = {
    "acme_pruning.py": '''
"""Methods of ACME."""

from dataclasses import dataclass

import torch

import clustrs


@clustrs.register
@dataclass(frozen=True)
class FirstTokens(clustrs.Pruner):
    """Keep the first tokens of an image."""

    name = "acme-first"

    def _choose(self, inputs, k):
        return torch.arange(k, device=inputs.tokens.device).repeat(len(inputs.tokens), 1)
''',
    "acme_pruning-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-pruning\nVersion: 1.0\n",
    "acme_pruning-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "acme_pruning-1.0.dist-info/entry_points.txt": "[clustrs.pruners]\nacme = acme_pruning\n",
}
RECORD = "acme_pruning-1.0.dist-info/RECORD"
Command = Callable[..., str]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command line in an environment of its own that has the package, and all else from this one."""
    root = tmp_path_factory.mktemp("acme")
    wheel = root / "acme_pruning-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
        archive.writestr(RECORD, "".join(f"{name},,\n" for name in (*FILES, RECORD)))
    environment = root / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    names = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", names))
    (packages / "this.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", "venv", names)) / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    source = os.pathsep.join(str(Path(file).parents[1]) for file in (clustrs.__file__, clustrs_models.__file__))

    def run(*words: str) -> str:
        called = [str(python), "-m", "clustrs.cli", *words]
        variables = {**os.environ, "PYTHONPATH": source}
        done = subprocess.run(called, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_a_method_of_another_package(command: Command, tmp_path: Path) -> None:
    listed = {method["name"]: method for method in json.loads(command("methods", "--json"))}
    assert listed["acme-first"]["summary"] == "Keep the first tokens of an image."
    assert "acme-first" not in clustrs.list_methods()
    grid = ("--methods", "none", "acme-first", "--keep", "3", "--limit", "3", "--quiet")
    shown = command("eval", *grid, "-o", str(tmp_path / "run"))
    assert "acme-first" in shown
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    kept = [record["kept"] for record in records if record["method"]["name"] == "acme-first"]
    assert kept == [[0, 1, 2]] * 3
    assert all(record["error"] is None for record in records)
    assert "acme-first" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_it_is_compared_and_studied_like_any_other(command: Command, tmp_path: Path) -> None:
    asked = ("sample:scene-1", "How many objects are there?", "--max-new-tokens", "1", "--keep", "3", "--json")
    results = json.loads(command("compare", *asked, "--methods", "none,acme-first"))["results"]
    assert results[1]["kept"] == [0, 1, 2]
    words = ("--count", "1", "--levels", "1", "--keep", "3", "--methods", "acme-first", "grid", "--quiet")
    findings = command("study", "stability", *words, "-o", str(tmp_path))
    assert "The same positions at every level are kept by acme-first, grid." in findings
