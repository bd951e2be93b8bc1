from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models

Load = Callable[..., tuple[Any, Any]]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders of saved tiny models, each built once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, tower: str) -> Path:
        if (family, tower) not in made:
            made[family, tower] = tmp_path_factory.mktemp(f"{family}-{tower}")
            tiny_models.build(family, tower, made[family, tower])
        return made[family, tower]

    return folder


@pytest.fixture(scope="session")
def load(folder_of: Callable[[str, str], Path]) -> Load:
    """A freshly loaded tiny model and its processor."""

    def fresh(family: str = "llava", tower: str = "clip", **options: Any) -> tuple[Any, Any]:
        return tiny_models.load(folder_of(family, tower), **options)

    return fresh
