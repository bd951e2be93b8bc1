"""Stand-ins for the photographs of frost, which come from a package that the tests do not need."""

from pathlib import Path

import pytest
from corruptions.record_imagenet_c import photograph
from PIL import Image

from clustrs_models.imagenet_c import PHOTOGRAPHS


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package `imagecorruptions` that has the photographs, and that must not be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "imagecorruptions" / "frost").mkdir(parents=True)
    (folder / "imagecorruptions" / "__init__.py").write_text("raise SystemError('imported')")
    for number, name in enumerate(PHOTOGRAPHS, start=1):
        Image.fromarray(photograph(number)).save(folder / "imagecorruptions" / "frost" / name, "PNG")
    return folder


@pytest.fixture
def frost(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(photographs)
    return photographs
