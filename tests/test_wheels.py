"""Wheels of all packages: clustrs is small, clustrs-models has the data, clustrs-paper the studies."""

import configparser
import re
import subprocess
import sys
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from clustrs import __version__
from clustrs.embedded import EMBEDDED, MODELS
from clustrs.evaluation.tasks import SAMPLE_TASKS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "packages" / "clustrs-models"
PAPER = ROOT / "packages" / "clustrs-paper"
LMMS = ROOT / "packages" / "clustrs-lmms"
RAY = ROOT / "packages" / "clustrs-ray"
LARGEST_CODE, LARGEST_DATA = 2e6, 100e6
"""Bytes. The package index takes no file over 100 MB."""
CODE = (
    *("__init__", "drawing", "scenes", "clips", "photographs", "sentences", "smol", "smol_build", "weight_files"),
    "imagenet_c",
)
"""Modules of clustrs-models: its tasks, their drawings, the model that is fetched, and corruptions."""


def build(project: Path, folder: Path) -> ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = folder.iterdir()
    return ZipFile(wheel)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return build(ROOT, tmp_path_factory.mktemp("clustrs"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return build(PACKAGE, tmp_path_factory.mktemp("clustrs-models"))


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return build(PAPER, tmp_path_factory.mktemp("clustrs-paper"))


@pytest.fixture(scope="module")
def lmms(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return build(LMMS, tmp_path_factory.mktemp("clustrs-lmms"))


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return build(RAY, tmp_path_factory.mktemp("clustrs-ray"))


def size(wheel: ZipFile) -> int:
    return Path(str(wheel.filename)).stat().st_size


def metadata(wheel: ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_clustrs_is_small_and_has_no_weights(code: ZipFile) -> None:
    assert size(code) <= LARGEST_CODE
    names = code.namelist()
    assert not [name for name in names if name.endswith((".safetensors", ".bin", ".onnx"))]
    assert {name.split("/")[0] for name in names} == {"clustrs", f"clustrs-{__version__}.dist-info"}
    assert "clustrs/embedded/images/scene-1.png" in names  # images that need no model come with the code
    assert "clustrs/evaluation/configs/demo.yaml" in names


def test_the_data_has_every_model_and_nothing_else(data: ZipFile) -> None:
    assert size(data) <= LARGEST_DATA
    inside = [name.split("/")[1:] for name in data.namelist() if name.startswith("clustrs_models/")]
    assert {parts[0] for parts in inside} == {"photos", "samples", *MODELS, *(f"{name}.py" for name in CODE)}
    for model in EMBEDDED:
        files = {parts[1] for parts in inside if parts[0] == model.name}
        whole = {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"}
        assert files == {"README.md", "smol.safetensors"} if model.built else whole <= files
    assert sum(parts[0] == "photos" and parts[-1].endswith(".jpg") for parts in inside) == 144


def test_attribution_travels_with_the_data(data: ZipFile) -> None:
    names = data.namelist()
    (notice,) = [name for name in names if name.endswith(".dist-info/licenses/NOTICE")]
    for name in (notice, "clustrs_models/photos/NOTICE"):
        text = data.read(name).decode()
        assert "Caltech 101" in text
        assert "CC BY 4.0" in text
    assert all(model in data.read(notice).decode() for model in MODELS)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert metadata(data)["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"


def test_the_extra_takes_the_version_that_is_here(code: ZipFile, data: ZipFile) -> None:
    version = Version(metadata(data)["Version"])
    required = [Requirement(line) for line in metadata(code).get_all("Requires-Dist", [])]
    bound = [one for one in required if one.name == "clustrs-models"]
    for extra in ("models", "cli", "app"):
        (found,) = [one for one in bound if one.marker and one.marker.evaluate({"extra": extra})]
        assert version in found.specifier
        assert Version(f"{version.major}.{version.minor + 1}") not in found.specifier  # other answers
        assert Version(f"{version.major}.{version.minor}.{version.micro + 1}") in found.specifier
    assert not [one for one in bound if one.marker is None or one.marker.evaluate({"extra": ""})]


def entry_points(wheel: ZipFile) -> configparser.ConfigParser:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    found = configparser.ConfigParser()
    found.read_string(wheel.read(name).decode())
    return found


def test_the_packages_fit_together(code: ZipFile, data: ZipFile, paper: ZipFile, lmms: ZipFile, ray: ZipFile) -> None:
    """Each takes the versions of the others that are here, and not the next minor version."""
    wheels = {metadata(wheel)["Name"]: wheel for wheel in (code, data, paper, lmms, ray)}
    versions = {name: Version(metadata(wheel)["Version"]) for name, wheel in wheels.items()}
    assert {version for name, version in versions.items() if name != "clustrs-models"} == {Version(__version__)}
    bounds = [
        (name, Requirement(line))
        for name, wheel in wheels.items()
        for line in metadata(wheel).get_all("Requires-Dist", [])
    ]
    between = {(name, one.name): one.specifier for name, one in bounds if one.name in wheels and one.specifier}
    assert set(between) == {
        ("clustrs", "clustrs-models"),
        ("clustrs", "clustrs-paper"),
        ("clustrs", "clustrs-lmms"),
        ("clustrs", "clustrs-ray"),
        ("clustrs-paper", "clustrs"),
        ("clustrs-lmms", "clustrs"),
        ("clustrs-ray", "clustrs"),
    }
    for (_, needed), specifier in between.items():
        version = versions[needed]
        assert version in specifier
        assert Version(f"{version.major}.{version.minor + 1}.0") not in specifier


def test_the_paper_has_its_tables_configurations_and_studies(paper: ZipFile) -> None:
    names = paper.namelist()
    assert sum(name.startswith("clustrs_paper/data/") for name in names) == 14
    assert sum(name.startswith("clustrs_paper/configs/") and name.endswith(".yaml") for name in names) == 11
    assert {"clustrs_paper/evidence/grid.yaml", "clustrs_paper/studies/stability.py"} <= set(names)
    assert size(paper) < LARGEST_CODE


def test_what_the_packages_offer(code: ZipFile, data: ZipFile, paper: ZipFile, lmms: ZipFile, ray: ZipFile) -> None:
    assert set(entry_points(data)["clustrs.tasks"]) == set(SAMPLE_TASKS) >= {model.task for model in EMBEDDED}
    offered = entry_points(paper)
    assert {group: list(offered[group]) for group in offered.sections()} == {
        "clustrs.commands": ["export-answers", "import-answers", "study"],
        "clustrs.configs": ["paper"],
        "clustrs.report_sections": ["paper"],
        "clustrs.tasks": ["mmvet", "scienceqa"],
    }
    assert dict(entry_points(lmms)["lmms_eval.models"]) == {"clustrs": "clustrs_lmms:manifest"}
    assert dict(entry_points(lmms)["clustrs.importers"]) == {"lmms-eval": "clustrs_lmms.results:import_results"}
    assert dict(entry_points(ray)["clustrs.engines"]) == {"ray": "clustrs_ray:RayEngine"}
    assert "lmms_eval.models" not in entry_points(code)


def test_readme_of_the_data_lists_every_model() -> None:
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE)) == {"photos", "samples", *MODELS}


def test_every_environment_gets_all_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    editable = [line for line in makefile.splitlines() if "--editable '." in line]
    assert len(editable) == 6  # .venv and those of other tests, the page's and the documentation's additions
    assert all("$(PACKAGES) --editable '." in line for line in editable)
    for name, package in (("MODELS", "models"), ("PAPER", "paper"), ("PLUGIN", "lmms"), ("ENGINE", "ray")):
        assert f"\n{name} := packages/clustrs-{package}\n" in makefile
    assert "\nFOLDERS := $(MODELS) $(PAPER) $(PLUGIN) $(ENGINE)\n" in makefile
    assert "\nPACKAGES := $(addprefix --editable ,$(FOLDERS))\n" in makefile
    stamps = re.findall(r"^\$\((?:OLDEST_|VLLM_|LMMS_|)STAMP\): (.*)$", makefile, re.MULTILINE)
    assert len(stamps) == 4
    assert all(stamp.startswith("$(DEPENDENCIES)") for stamp in stamps)


def test_build_backends_are_the_same() -> None:
    folders = (ROOT, PACKAGE, PAPER, LMMS, RAY)
    first, *others = [tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in folders]
    for other in others:
        assert other["build-system"] == first["build-system"]
        assert other["project"]["requires-python"] == first["project"]["requires-python"]


def test_licence_is_that_of_the_repository() -> None:
    for folder in (PACKAGE, PAPER, LMMS, RAY):
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_embedded_model_is_measured_by_a_task() -> None:
    from clustrs.evaluation.tasks import list_tasks

    assert {model.task for model in EMBEDDED} <= set(list_tasks())
