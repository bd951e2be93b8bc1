"""Packages beside clustrs: one of somebody else that extends it in every way, and none at all, not even ours."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import clustrs
import clustrs_models
import clustrs_paper

FILES = {
    "acme_pruning.py": '''
"""What ACME adds to ClustRS: a method, a corruption, a task, a command, and published numbers."""

from dataclasses import dataclass

import torch
import typer
from PIL import ImageOps

import clustrs
from clustrs.corruptions import register_corruption
from clustrs.evaluation.report.summary import Reference
from clustrs.evaluation.tasks import get_task

commands = typer.Typer()


@clustrs.register
@dataclass(frozen=True)
class FirstTokens(clustrs.Pruner):
    """Keep the first tokens of an image."""

    name = "acme-first"

    def _choose(self, inputs, k):
        return torch.arange(k, device=inputs.tokens.device).repeat(len(inputs.tokens), 1)


@register_corruption("acme-invert", levels=(1,), low=0, high=1)
def invert(image, level, random):
    return ImageOps.invert(image) if level else image


def load_quiz(data, limit):
    task = get_task("scenes", limit=limit)
    task.name = "acme-quiz"
    return task


@commands.command()
def hello(name: str) -> None:
    """Greet somebody."""
    print(f"hello {name}")


@commands.command()
def bye() -> None:
    """Say goodbye."""


def published(run, compare_with):
    if run.config["task"] != "acme-quiz":
        return None
    return Reference('Numbers marked "paper" are those of ACME.', lambda method, corruption, level: 0.125)
''',
    "acme_configs/small.yaml": """
task: acme-quiz
model: mini-llava
methods: [none, acme-first]
keep: [3]
corrupt: [clean, 'acme-invert:1']
limit: 3
""",
    "acme_pruning-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-pruning\nVersion: 1.0\n",
    "acme_pruning-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "acme_pruning-1.0.dist-info/entry_points.txt": """
[clustrs.pruners]
acme = acme_pruning
[clustrs.corruptions]
acme = acme_pruning
[clustrs.tasks]
acme-quiz = acme_pruning:load_quiz
[clustrs.commands]
acme = acme_pruning:commands
[clustrs.configs]
acme = acme_configs
[clustrs.report_sections]
acme = acme_pruning:published
""",
}
SERVE = """
import contextlib, io, json, sys
from clustrs.cli import main

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
"""One process for all commands: each start would import torch again."""
RECORD = "acme_pruning-1.0.dist-info/RECORD"
Command = Callable[..., str]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
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
    source = os.pathsep.join(
        str(Path(file).parents[1]) for file in (clustrs.__file__, clustrs_models.__file__, clustrs_paper.__file__)
    )

    variables = {**os.environ, "PYTHONPATH": source}
    process = subprocess.Popen(
        [python, "-c", SERVE], env=variables, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def run(*words: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(words), file=process.stdin, flush=True)
        code, out, err = json.loads(process.stdout.readline())
        assert code == 0, err
        return str(out)

    with process:
        yield run
        process.terminate()


@pytest.mark.slow
@pytest.mark.xdist_group("third party")
def test_every_group_of_entry_points(command: Command, tmp_path: Path) -> None:
    """A method, a corruption, a task, a ready configuration and published numbers, in one run and its report."""
    listed = {method["name"]: method for method in json.loads(command("methods", "--json"))}
    assert listed["acme-first"]["summary"] == "Keep the first tokens of an image."
    assert "acme-first" not in clustrs.list_methods()
    shown = command("eval", "--config", "acme/small", "--quiet", "-o", str(tmp_path / "run"))
    assert "acme-first" in shown
    records = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert all(record["error"] is None for record in records)
    kept = [record["kept"] for record in records if record["method"]["name"] == "acme-first"]
    assert kept == [[0, 1, 2]] * 6
    assert {record["corruption"] for record in records} == {"clean", "acme-invert:1"}
    report = (tmp_path / "run" / "report.html").read_text()
    assert "acme-first" in report
    assert "those of ACME" in report
    assert "12.5" in report
    assert command("acme", "hello", "world") == "hello world\n"


@pytest.mark.slow
@pytest.mark.xdist_group("third party")
def test_it_is_compared_and_studied_like_any_other(command: Command, tmp_path: Path) -> None:
    asked = ("sample:scene-1", "How many objects are there?", "--max-new-tokens", "1", "--keep", "3", "--json")
    results = json.loads(command("compare", *asked, "--methods", "none,acme-first"))["results"]
    assert results[1]["kept"] == [0, 1, 2]
    words = ("--count", "1", "--levels", "1", "--keep", "3", "--methods", "acme-first", "grid", "--quiet")
    findings = command("study", "stability", *words, "-o", str(tmp_path))
    assert "The same positions at every level are kept by acme-first, grid." in findings


ALONE = """
import contextlib, io
from pathlib import Path
import clustrs, torch
from clustrs.cli import main
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration


def run(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    lines = err.getvalue().splitlines()
    print(code, len(lines), (out.getvalue() if code == 0 else lines[-1]).replace(chr(10), " "), sep="|")


sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
config = LlavaConfig(
    vision_config=CLIPVisionConfig(image_size=32, patch_size=8, **sizes),
    text_config=LlamaConfig(vocab_size=64, **sizes),
    image_token_index=63,
    vision_feature_layer=-2,
)
model = LlavaForConditionalGeneration(config).eval()
ids = torch.tensor([[1, *[63] * 16, 5, 6]])
with clustrs.ClustRS(keep=4)(model):
    print(model.generate(input_ids=ids, pixel_values=torch.zeros(1, 3, 32, 32), max_new_tokens=2).shape)
run("--help")
run("methods")
run("tasks")
run("eval", "--limit", "2")
run("eval", "--task", "scenes", "--limit", "2")
run("eval", "--config", "paper/ablation")
run("ask", "sample:scene-1", "Why?")
run("eval", "--task", "mmvet")
run("export-answers", "run", "--format", "mmvet", "-o", "files")
run("study", "stability")
Path("results").mkdir()
Path("results/20260101_100000_results.json").write_text("{}")
run("report", "results")
run("eval", "--engine", "ray")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has everything of this one but the packages of packages/."""
    root = tmp_path_factory.mktemp("alone")
    packages = root / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "clustrs" not in path.name and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    wheels = root / "wheels"
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(build, cwd=Path(__file__).parents[2], check=True, capture_output=True)
    with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
        wheel.extractall(packages)
    environment = root / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    names = {"base": str(environment), "platbase": str(environment)}
    (Path(sysconfig.get_path("purelib", "venv", names)) / "this.pth").write_text(f"{packages}\n")
    return Path(sysconfig.get_path("scripts", "venv", names)) / "python"


@pytest.mark.slow
def test_clustrs_alone(alone: Path, tmp_path: Path) -> None:
    """Without the packages of packages/: methods attach, and what needs one of them names it in one line."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(alone), "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, env=variables, check=False
    )
    assert done.returncode == 0, done.stderr
    generated, *lines = done.stdout.splitlines()
    assert generated.startswith("torch.Size([1, ")
    usage, methods, tasks, photos, scenes, paper, asked, *studied, lmms, ray = (line.split("|", 2) for line in lines)
    assert [code for code, *_ in (usage, methods, tasks)] == ["0", "0", "0"]
    assert "clustrs" in methods[2]
    assert "custom" in tasks[2]
    assert "mmvet" not in tasks[2]
    assert len(studied) == 3
    models, install = "clustrs-models", "pip install './packages/clustrs-models'"
    for code, printed, message in (photos, scenes, asked):
        assert (code, printed) == ("2", "1"), message
        assert models in message
        assert install in message
    for code, _, message in (paper, *studied):
        assert code == "2", message
        assert "clustrs-paper" in message
        assert "'./packages/clustrs-paper'" in message
    for package, (code, _, message) in (("clustrs-lmms", lmms), ("clustrs-ray", ray)):
        assert code == "2", message
        assert f"this needs the package {package}" in message
        assert f"'./packages/{package}'" in message
