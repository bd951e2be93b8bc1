"""Record what the package `imagecorruptions` 1.1.2 makes of a small image, for test_imagenet_c.py to compare with.

It needs that package (without its dependencies), opencv-python-headless and scikit-image, and gives the package what
newer versions of its dependencies took away. What is random is drawn from the generator that clustrs would use:

    python tests/corruptions/record_imagenet_c.py
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from clustrs.corruptions import IMAGENET_C_LEVELS, Corruption

RECORD = Path(__file__).parent / "imagenet_c.npz"
PART = np.s_[::5, ::2]
"""Which rows and columns are recorded; the outermost ones are among them."""


def make_image() -> Image.Image:
    """An image of 61 x 47 pixels with black and white parts, soft and hard edges, and grain."""
    y, x = np.mgrid[:61, :47]
    pixels = np.stack([4 * y + x, 255 - 5 * x, (y // 8 + x // 6) % 2 * 180 + y], axis=2) + (7 * x * y % 23)[..., None]
    pixels[5:12, 20:30] = 0
    pixels[40:50, 3:9] = 255
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def photograph(number: int) -> NDArray[np.uint8]:
    """Stands for a photograph of frost: soft waves, each number with its own; as wide as no image is high."""
    y, x = np.mgrid[:50, :90]
    waves = [np.sin(y / 6 + number) * np.cos(x / 7 + number + channel) for channel in range(3)]
    return (127.5 + 127.5 * np.stack(waves, axis=2)).astype(np.uint8)


def library(random: np.random.Generator) -> Any:
    """The package's functions, drawing from `random`."""
    sys.modules["pkg_resources"] = SimpleNamespace(resource_filename=lambda _, path: path)  # type: ignore[assignment]
    corruptions: Any = importlib.import_module("imagecorruptions.corruptions")
    filters: Any = importlib.import_module("skimage.filters")
    noise: Any = importlib.import_module("skimage.util.noise").random_noise

    def gaussian(pixels: Any, sigma: Any, multichannel: bool = False, **others: Any) -> Any:
        return filters.gaussian(pixels, sigma, channel_axis=-1 if multichannel else None, **others)

    numpy = ModuleType("numpy")
    numpy.__dict__.update(np.__dict__ | {"float_": np.float64})
    numpy.random = SimpleNamespace(  # type: ignore[attr-defined]
        normal=random.normal, poisson=random.poisson, uniform=random.uniform, randint=random.integers
    )
    corruptions.np = numpy
    corruptions.gaussian = gaussian
    corruptions.sk.util = SimpleNamespace(random_noise=lambda *given, **named: noise(*given, rng=random, **named))
    corruptions.cv2.imread = lambda path: photograph(int(path.partition("frost/frost")[2][0]))[..., ::-1]
    return corruptions


def main() -> None:
    image = make_image()
    record: dict[str, Any] = {}
    for name, severities in IMAGENET_C_LEVELS.items():
        for severity in severities:
            corruption = Corruption(name, severity)
            function = getattr(library(corruption._random("picture", 7)), name.removeprefix("imagenet_c/"))
            record[str(corruption)] = np.asarray(function(image, int(severity))).astype(np.uint8)[PART]
    np.savez_compressed(RECORD, **record)


if __name__ == "__main__":
    main()
