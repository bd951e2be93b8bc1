"""Plugins of other packages: one that fails is named in one line, and every command goes on without it."""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from recorded_run import write_run
from safetensors.torch import save_file

from clustrs import plugins
from clustrs.cli import base as cli_base
from clustrs.cli import doctor
from clustrs.embedded import model_folder
from clustrs.evaluation.results import load_run
from clustrs.models.adapters import base as adapters
from clustrs.models.load import load_model

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
HOSTILE = {
    "sys.exit": "import sys\nsys.exit(7)\n",
    "no message": "raise SystemExit\n",
    "a base exception": "class Odd(BaseException): ...\nraise Odd('two\\nlines')\n",
    "a generator that is closed": "raise GeneratorExit\n",
    "an error": "raise RuntimeError('broken')\n",
}
LISTED_BY = {
    "clustrs.pruners": ["methods"],
    "clustrs.adapters": ["models"],
    "clustrs.corruptions": ["corruptions"],
    "clustrs.commands": ["--help"],
}
Install = Callable[..., None]


def write_package(folder: Path, package: str, group: str, module: str, value: str = "", name: str = "") -> None:
    """Write a package with one module, PACKAGE_plugin, and one entry point."""
    (folder / f"{package}_plugin.py").write_text(module)
    information = folder / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{name or package} = {value or f'{package}_plugin'}\n")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package `acme` with one module and one entry point, for this test alone."""
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.delitem(sys.modules, "acme_plugin", raising=False)

    def install(group: str, module: str, value: str = "acme_plugin", name: str = "acme") -> None:
        write_package(tmp_path, "acme", group, module, value, name)
        monkeypatch.syspath_prepend(tmp_path)
        adapters._load_all.cache_clear()

    return install


@pytest.mark.parametrize("group", LISTED_BY)
def test_plugins_that_fail_at_import_are_left_out(tmp_path: Path, group: str) -> None:
    """In a process of its own, as a user runs it: warnings are errors in this one. All of them at once."""
    names = {f"acme_{number}": module for number, module in enumerate(HOSTILE.values())}
    for name, module in names.items():
        write_package(tmp_path, name, group, module)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", "clustrs.cli", *LISTED_BY[group]]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 5
    found = re.findall(
        rf"^clustrs: a plugin is left out: entry point (\w+) = \1_plugin of \1 in {group} failed \(", done.stderr, re.M
    )
    assert sorted(found) == sorted(names)
    assert done.stderr.count("\n") == len(names)


@pytest.mark.parametrize("module", HOSTILE.values(), ids=HOSTILE)
def test_a_task_that_fails_at_import_is_an_error_only_when_chosen(install: Install, run: Run, module: str) -> None:
    install("clustrs.tasks", module, "acme_plugin:load")
    assert run("tasks")[0] == 0
    code, out, err = run("eval", "--task", "acme")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "clustrs: entry point acme = acme_plugin:load of acme in clustrs.tasks failed"
    )


@pytest.mark.parametrize("module", HOSTILE.values(), ids=HOSTILE)
def test_a_report_goes_on_without_a_section_that_fails(install: Install, tmp_path: Path, module: str) -> None:
    from clustrs.evaluation.report.summary import find_reference

    install("clustrs.report_sections", module, "acme_plugin:section")
    run = load_run(write_run(tmp_path / "run"))
    with pytest.warns(plugins.PluginWarning, match=r"acme = acme_plugin:section of acme .* failed \("):
        assert find_reference(run) is None


def test_interrupts_are_not_swallowed(install: Install) -> None:
    install("clustrs.pruners", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.load_plugins("clustrs.pruners")


def test_a_plugin_is_loaded_once(install: Install) -> None:
    install("clustrs.pruners", "raise RuntimeError('broken')")
    with pytest.warns(plugins.PluginWarning, match=r"acme = acme_plugin of acme .* failed \(RuntimeError: broken\)"):
        plugins.load_plugins("clustrs.pruners")
    plugins.load_plugins("clustrs.pruners")  # a second warning would be an error here


GROUP = '''
import typer

app = typer.Typer(help="Tools of ACME.")


@app.command()
def hello(name: str) -> None:
    """Greet somebody."""
    print(f"hello {name}")


@app.command()
def fail() -> int:
    """Fail."""
    raise ValueError("name must be a word, got 3")


def single(count: int = 1) -> int:
    """Return a code."""
    print("single", count)
    return 5
'''


def test_a_group_of_commands_of_another_package(install: Install, run: Run) -> None:
    install("clustrs.commands", GROUP, "acme_plugin:app")
    assert "acme_plugin" not in sys.modules
    assert run("samples")[0] == 0
    assert "acme_plugin" not in sys.modules  # loaded when it is called or listed
    assert run("acme", "hello", "you") == (0, "hello you\n", "")
    assert run("acme", "fail") == (2, "", "clustrs: name must be a word, got 3\n")
    assert "Greet somebody." in run("acme", "--help")[1]
    assert "Tools of ACME." in run("--help")[1]


def test_a_single_command_of_another_package(install: Install, run: Run) -> None:
    install("clustrs.commands", GROUP, "acme_plugin:single")
    assert run("acme", "--count", 3) == (5, "single 3\n", "")
    assert "Return a code." in run("acme", "--help")[1]


def test_a_command_of_another_package_takes_no_name_of_ours(install: Install, run: Run) -> None:
    install("clustrs.commands", GROUP, "acme_plugin:app", name="samples")
    assert "sample:photo-1" in run("samples")[1]


def test_a_value_that_cannot_be_a_command(install: Install, run: Run) -> None:
    install("clustrs.commands", "app = 3", "acme_plugin:app")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = run("acme")
    assert code == 2
    assert "the command acme must be a typer.Typer or a function, got 3" in err


def test_commands_of_our_other_packages_are_named_where_they_are_missing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clustrs.cli import base

    monkeypatch.setitem(base.PACKAGES, "paint", "clustrs-paint")
    expected = "clustrs paint is in the package clustrs-paint: pip install './packages/clustrs-models' '.[cli]' "
    assert run("paint") == (2, "", f"clustrs: {expected}'./packages/clustrs-paint' (in a clone of ClustRS)\n")


def test_install_hints_name_extras_and_folders_that_exist() -> None:
    assert doctest.testmod(plugins).failed == 0
    offered = set(metadata("clustrs").get_all("Provides-Extra") or [])
    assert set(plugins.EXTRAS.values()) | set(plugins.WITHOUT_MODELS) <= offered
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def needs(extra: str, package: str) -> bool:
        return any(
            line.startswith(package)
            or (line.startswith("clustrs[") and any(needs(one, package) for one in line[8:].rstrip("]").split(",")))
            for line in project[extra]
        )

    for extra in project:
        command = plugins.install_command(extra)
        for package in ("clustrs-models", "clustrs-paper", "clustrs-lmms", "clustrs-ray"):
            assert (f"./packages/{package}" in command) == needs(extra, package)
        assert all((ROOT / word.strip("'")).is_dir() for word in command.split() if word.startswith("'./"))


@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cpu"])
def test_make_takes_torch_from_a_given_index(index: str) -> None:
    words = ["make", "--dry-run", "--always-make", "setup", *([f"TORCH_INDEX={index}"] if index else [])]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.splitlines() if line.endswith(" torch")]
    assert ("--index-url" in line) == bool(index)
    assert index in line


def test_no_hint_names_a_package_that_is_on_no_index() -> None:
    """`pip install 'clustrs[...]'` finds nothing: the package is not published."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]:
        assert "pip install 'clustrs" not in path.read_text(), path
    for check in doctor.CHECKS:
        assert "clustrs[" not in check.install


FAMILY = """
from transformers import AutoConfig, AutoModelForImageTextToText, LlavaConfig, LlavaForConditionalGeneration
from clustrs import Adapter, VisualTokens, register_adapter
from clustrs.models.adapters.base import attention_layer, recorded
from clustrs.models.scoring import record_scores

class AcmeConfig(LlavaConfig):
    model_type = "acme_vlm"

class AcmeForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = AcmeConfig

AutoConfig.register("acme_vlm", AcmeConfig)
AutoModelForImageTextToText.register(AcmeConfig, AcmeForConditionalGeneration)

@register_adapter
class AcmeAdapter(Adapter):
    model_types = ("acme_vlm",)

    def scoring_layer(self):
        return attention_layer(self.inner.vision_tower, self.config.vision_feature_layer)

    def encode(self, inputs, timer, crops="all"):
        with timer.time("vision"), record_scores(self.scoring_layer(), "cls", timer) as recorder:
            out = self.inner.get_image_features(pixel_values=inputs["pixel_values"], return_dict=True)
        scores, keys = recorded(recorder)
        side = int(scores.shape[1] ** 0.5)
        return [
            VisualTokens.on_grid(features, scores[i], (side, side), keys=keys[i, 1:], cls_keys=keys[i : i + 1, :1])
            for i, features in enumerate(out.pooler_output)
        ]
"""


def test_a_family_whose_model_transformers_does_not_have(run: Run, tmp_path: Path) -> None:
    """The plugin adds the model class to transformers, so it is loaded before the model; answers are LLaVA's."""
    write_package(tmp_path, "acme", "clustrs.adapters", FAMILY)
    folder = shutil.copytree(model_folder("mini-llava"), tmp_path / "weights")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "acme_vlm", "architectures": ["AcmeForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: value.clone() for name, value in load_model("mini-llava")[0].state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})  # transformers renames weights of its own types
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    words = ["ask", "sample:scene-1", "How many objects are there?", "--keep", "16", "--json", "--model"]
    called = [sys.executable, "-m", "clustrs.cli", *words, str(folder)]
    done = subprocess.run(called, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    code, out, err = run(*words, "mini-llava")
    assert code == 0, err
    assert json.loads(done.stdout)["answer"] == json.loads(out)["answer"]


METHOD = """
from dataclasses import dataclass
from clustrs import Pruner, register

@register
@dataclass(frozen=True)
class LargestNorm(Pruner):
    \"\"\"Keep the tokens with the largest norms.\"\"\"
    name = "norm-of-a-file"
    def _choose(self, inputs, k):
        return inputs.tokens.norm(dim=-1).topk(k).indices.sort().values
"""


def test_a_file_of_methods(tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "my.py").write_text(METHOD)
    done = command("methods", "norm-of-a-file", "--plugin", str(tmp_path / "my.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("norm-of-a-file: Keep the tokens with the largest norms.")


@pytest.mark.parametrize(
    "words", [["--plugin", "x.py", "a", "b"], ["a", "b", "--plugin", "x.py"], ["a", "--plugin=x.py", "b"]]
)
def test_a_file_may_be_named_anywhere(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr(cli_base, "load_file", loaded.append)
    assert cli_base.load_files(words) == ["a", "b"]
    assert loaded == [Path("x.py")]
    assert cli_base.load_files(["ask", "--", "--plugin", "x.py"]) == ["ask", "--", "--plugin", "x.py"]


@pytest.mark.parametrize("text", [*HOSTILE.values(), "def (:", "import no_such_module"])
def test_a_file_that_fails_is_one_line(text: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "my.py").write_text(text)
    done = command("samples", "--plugin", str(tmp_path / "my.py"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"clustrs: --plugin '{tmp_path / 'my.py'}' failed: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--plugin"], ["samples", "--plugin", "no-such-file.py"]])
def test_a_file_that_is_not_there(words: list[str], command: Callable[..., Any]) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("clustrs: --plugin ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def command() -> Callable[..., Any]:
    def call(*words: str) -> Any:
        return subprocess.run([sys.executable, "-m", "clustrs.cli", *words], capture_output=True, text=True)

    return call
