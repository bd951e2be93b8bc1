from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    paths = [folder / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        tiny_models.picture(40, 40, seed).save(path)
    return paths
