"""What would be published: the wheel of clustrs, which is small, and that of clustrs-models, which has the data."""

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

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "packages" / "clustrs-models"
LARGEST_CODE, LARGEST_DATA = 2e6, 100e6
"""Bytes. The package index takes no file over 100 MB."""


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
    assert {parts[0] for parts in inside} == {"__init__.py", "photos", "samples", *MODELS}
    for model in MODELS:
        files = {parts[1] for parts in inside if parts[0] == model}
        assert {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"} <= files
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
    assert not metadata(data).get_all("Requires-Dist")


def test_readme_of_the_data_lists_every_model() -> None:
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` \|", readme, re.MULTILINE)) == {"photos", "samples", *MODELS}


def test_every_environment_gets_both_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    editable = [line for line in makefile.splitlines() if "--editable '." in line]
    assert len(editable) == 6  # .venv and those of other tests, the page's and the documentation's additions
    assert all("--editable $(MODELS) --editable '." in line for line in editable)
    assert "\nMODELS := packages/clustrs-models\n" in makefile
    stamps = re.findall(r"^\$\((?:OLDEST_|VLLM_|LMMS_|)STAMP\): (.*)$", makefile, re.MULTILINE)
    assert len(stamps) == 4
    assert all(stamp.startswith("$(DEPENDENCIES)") for stamp in stamps)


def test_build_backends_are_the_same() -> None:
    both = [tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in (ROOT, PACKAGE)]
    assert both[0]["build-system"] == both[1]["build-system"]
    assert both[0]["project"]["requires-python"] == both[1]["project"]["requires-python"]


def test_licence_is_that_of_the_repository() -> None:
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_embedded_model_is_measured_by_a_task() -> None:
    from clustrs.evaluation.tasks import list_tasks

    assert {model.task for model in EMBEDDED} <= set(list_tasks())
