from pathlib import Path

import pytest
import tiny_models
from paper import grid_task


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        tiny_models.make_image(40, 40, seed).save(path)
    return paths


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small task for the studies that are grids of the evaluation."""
    return grid_task.build(tmp_path_factory.mktemp("task") / "data")
