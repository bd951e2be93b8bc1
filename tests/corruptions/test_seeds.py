"""A corrupted image depends on image id, corruption, level and run seed: not on order, process or global state."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clustrs.corruptions import IMAGENET_C_LEVELS, PAPER_LEVELS, Corruption

EVERY = [Corruption(name, level) for name, levels in (PAPER_LEVELS | IMAGENET_C_LEVELS).items() for level in levels]
RANDOM = [
    corruption
    for corruption in EVERY
    if corruption.name.rpartition("/")[2]
    not in ("brightness", "contrast", "jpeg", "jpeg_compression", "pixelate", "zoom_blur", "defocus_blur")
]
pytestmark = pytest.mark.usefixtures("frost")


def make_image() -> Image.Image:
    y, x = np.mgrid[:45, :53]
    return Image.fromarray(np.stack([5 * y, 4 * x, x * y % 256], axis=2).astype(np.uint8))


def digest(corruption: Corruption, image_id: str = "a", seed: int = 3) -> str:
    return hashlib.sha256(corruption.apply(make_image(), image_id, seed).tobytes()).hexdigest()


def digests_backwards() -> dict[str, str]:
    return {str(corruption): digest(corruption) for corruption in reversed(EVERY)}


def test_any_order_and_any_process(photographs: Path) -> None:
    here = {str(corruption): digest(corruption) for corruption in EVERY}
    assert here == digests_backwards()
    code = "import json, random; random.seed(5); from corruptions.test_seeds import *; "
    code += "np.random.seed(5); print(json.dumps(digests_backwards()))"
    folders = [str(Path(__file__).parent.parent), str(photographs), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "PYTHONHASHSEED": "123"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == here


@pytest.mark.parametrize("corruption", RANDOM, ids=str)
def test_image_and_seed_matter(corruption: Corruption) -> None:
    assert len({digest(corruption), digest(corruption, "b"), digest(corruption, seed=4)}) == 3


@pytest.mark.parametrize("corruption", [corruption for corruption in EVERY if corruption not in RANDOM], ids=str)
def test_what_is_not_random_is_the_same_for_all(corruption: Corruption) -> None:
    assert len({digest(corruption), digest(corruption, "b"), digest(corruption, seed=4)}) == 1


def global_state() -> tuple[object, ...]:
    kind, numbers, *position = np.random.get_state()  # noqa: NPY002
    return random.getstate(), kind, np.asarray(numbers).tobytes(), position


@pytest.mark.parametrize("corruption", EVERY, ids=str)
def test_global_state_is_untouched(corruption: Corruption) -> None:
    before = global_state()
    first = digest(corruption)
    with pytest.raises(ValueError, match="image must be in RGB"):
        corruption.apply(Image.new("L", (40, 40)), "a")
    assert global_state() == before
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert digest(corruption) == first


def test_global_state_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("clustrs_models.imagenet_c.smear", broken)
    before = global_state()
    with pytest.raises(RuntimeError, match="broken"):
        Corruption("imagenet_c/snow", 2).apply(make_image(), "a")
    assert global_state() == before
