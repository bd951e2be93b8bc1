"""Corruptions of images: a registry of effects with their levels, seeded by the image and not by the run's order.

A package adds a corruption with `register_corruption` and an entry point of the group `clustrs.corruptions` that names
the module (or anything in it). Entry points are loaded when an unknown name is looked up, or when all are listed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Literal

import numpy as np
from PIL import Image

from clustrs.corruptions import images
from clustrs.embedded import DATA_PACKAGE, INSTALL, data_package
from clustrs.plugins import load_plugins
from clustrs.validation import is_number

Effect = Callable[[Image.Image, float, np.random.Generator], Image.Image]
Kind = Literal["any", "integer", "odd"]
Group = Literal["paper", "imagenet_c", "plugin"]
ENTRY_POINTS = "clustrs.corruptions"
IMAGENET_C = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)  # families in the package clustrs-models, which comes with Pillow


@dataclass(frozen=True)
class Rule:
    """Effect of a corruption, the levels that it accepts (in words: `accepted`), and those measured by default."""

    effect: Effect
    low: float
    high: float
    accepted: str
    levels: tuple[float, ...]
    kind: Kind = "any"
    group: Group = "paper"

    def accepts(self, level: float) -> bool:
        if not self.low <= level <= self.high:  # also where it is NaN
            return False
        return self.kind == "any" or level % (2 if self.kind == "odd" else 1) == (self.kind == "odd")


def imagenet_c(family: str) -> Effect:
    def effect(image: Image.Image, level: float, random: np.random.Generator) -> Image.Image:
        if reason := missing_reason(f"imagenet_c/{family}"):
            raise ValueError(reason)
        corrupted: Image.Image = import_module(f"{DATA_PACKAGE}.imagenet_c").FAMILIES[family](image, level, random)
        return corrupted

    return effect


SEVERITY = "a severity (an integer) from 1 to 5"
GET_FROST = "pip install --no-deps imagecorruptions"
SIGMA = "a standard deviation from 0 to 100 (pixels go from 0 to 1)"
_rules = {
    "gaussian": Rule(images.gaussian, 0, 100, SIGMA, (0.1, 0.5, 1.0, 2.0, 3.0)),
    "salt_pepper": Rule(images.salt_pepper, 0, 1, "a fraction of the pixels from 0 to 1", (0.01, 0.1, 0.2, 0.3, 0.5)),
    "brightness": Rule(images.brightness, 0, 100, "a factor from 0 to 100", (0.5, 1.5, 2.0)),
    "contrast": Rule(images.contrast, 0, 100, "a factor from 0 to 100", (0.5, 1.5, 2.0)),
    "cutout": Rule(images.cutout, 0, 1, "a fraction of the image from 0 to 1", (0.1, 0.25, 0.4)),
    "motion_blur": Rule(images.motion_blur, 1, 999, "an odd number of pixels from 1 to 999", (15, 31), "odd"),
    "jpeg": Rule(images.jpeg, 1, 100, "a quality (an integer) from 1 to 100", (60, 30), "integer"),
}
_rules |= {
    f"imagenet_c/{name}": Rule(imagenet_c(name), 1, 5, SEVERITY, (1, 2, 3, 4, 5), "integer", "imagenet_c")
    for name in IMAGENET_C
}

PAPER_LEVELS = {name: rule.levels for name, rule in _rules.items() if rule.group == "paper"}
"""The corruptions of the paper, each with its levels there."""
IMAGENET_C_LEVELS = {name: rule.levels for name, rule in _rules.items() if rule.group == "imagenet_c"}
"""The families of ImageNet-C, each with its severities."""


def register_corruption(
    name: str, *, levels: Sequence[float], low: float, high: float, accepted: str = "", kind: Kind = "any"
) -> Callable[[Effect], Effect]:
    """Register a function `effect(image, level, random)` as a corruption (decorator).

    The effect gets an RGB image and returns one. All randomness must come from `random`, a numpy Generator that is
    seeded by the image. Registering a name again from the same module replaces it.

    Args:
        name: name of the corruption, without spaces, commas and colons.
        levels: levels that are measured by default.
        low: smallest level that is accepted.
        high: largest level that is accepted.
        accepted: the accepted levels in words, for error messages; derived from the bounds by default.
        kind: "any" number, an "integer", or an "odd" integer.

    Raises:
        ValueError: the name or the levels are invalid, or another module has registered the name.

    Examples:
        ```python
        @register_corruption("posterize", levels=(4, 2), low=1, high=8, kind="integer")
        def posterize(image, level, random):
            return ImageOps.posterize(image, int(level))
        ```
    """

    def register(effect: Effect) -> Effect:
        words = accepted or f"{'a number' if kind == 'any' else f'an {kind} number'} from {low:g} to {high:g}"
        rule = Rule(effect, low, high, words, tuple(map(float, levels)), kind, "plugin")
        if not name or any(sign in name for sign in ":, \n"):
            raise ValueError(f"name of a corruption must have no spaces, commas or colons, got {name!r}")
        if not levels or not all(map(rule.accepts, rule.levels)):
            raise ValueError(f"levels of {name} must be at least one, each {words}, got {tuple(levels)!r}")
        other = _rules.get(name, rule).effect.__module__
        if other != effect.__module__:
            raise ValueError(f"corruption {name!r} of {effect.__module__}: {other} has registered one of that name")
        _rules[name] = rule
        return effect

    return register


def list_corruptions(usable: bool = True) -> list[str]:
    """List the names of the corruptions: the paper's, those of ImageNet-C, then those of other packages.

    Args:
        usable: leave out those that cannot be applied here, see `missing_reason`.
    """
    load_plugins(ENTRY_POINTS)
    return [name for name in _rules if not (usable and missing_reason(name))]


def missing_reason(name: str) -> str:
    """Say what to install before a corruption can be applied; "" if it can."""
    if not name.startswith("imagenet_c/"):
        return ""
    if data_package() is None:
        return f"{name} is in the package clustrs-models, which is not installed: {INSTALL}"
    frost = import_module(f"{DATA_PACKAGE}.imagenet_c") if name == "imagenet_c/frost" else None
    return "" if frost is None or frost.frost_photographs() else f"{name} needs photographs of frost: {GET_FROST}"


def corruption_rule(name: str) -> Rule:
    """Return the rule of a corruption; ValueError for an unknown name, with the closest one, if there is any."""
    if name not in _rules:
        load_plugins(ENTRY_POINTS)
    if name in _rules:
        return _rules[name]
    short = {known.rpartition("/")[2]: known for known in reversed(_rules)}  # the paper's come last, and stay
    close = get_close_matches(str(name).lower(), [*_rules, *short], n=1)
    near = f" (did you mean {short.get(close[0], close[0])!r}?)" if close else ""
    raise ValueError(f"unknown corruption {name!r}{near}; available: {', '.join(_rules)}")


@dataclass(frozen=True)
class Corruption:
    """Corruption of an image at a level.

    Args:
        name: one of `list_corruptions()`.
        level: strength; its meaning and bounds depend on the corruption.

    Raises:
        ValueError: unknown name, or a level that the corruption does not accept.

    Examples:
        >>> corruption = Corruption("gaussian", 0.5)
        >>> noisy = corruption.apply(Image.new("RGB", (32, 32)), image_id="black", seed=0)
        >>> noisy.size, str(corruption), Corruption.parse("gaussian:0.5") == corruption
        ((32, 32), 'gaussian:0.5', True)
    """

    name: str
    level: float

    def __post_init__(self) -> None:
        rule = corruption_rule(self.name)
        if not (is_number(self.level) and rule.accepts(self.level)):
            raise ValueError(f"{self.name} level must be {rule.accepted}, got {self.level!r}")
        object.__setattr__(self, "level", float(self.level))

    def __str__(self) -> str:
        return f"{self.name}:{self.level_text}"

    @property
    def level_text(self) -> str:
        return str(int(self.level) if self.level.is_integer() else self.level)

    @classmethod
    def parse(cls, text: str) -> "Corruption":
        """Parse "NAME:LEVEL", for example "gaussian:0.5"."""
        name, colon, level = text.partition(":")
        try:
            value = float(level)
        except ValueError:
            if colon:
                corruption_rule(name)  # an unknown name is the first thing to tell
            form = "NAME:LEVEL (for example gaussian:0.5)"
            raise ValueError(
                f"corruption must be {form}, got {text!r}; names: {', '.join(list_corruptions())}"
            ) from None
        return cls(name, value)

    def apply(self, image: Image.Image, image_id: str, seed: int = 0) -> Image.Image:
        """Corrupt an image; the result depends only on the image, its id, the corruption, its level and the seed.

        Args:
            image: image in RGB.
            image_id: name of the image; seeds the random numbers.
            seed: seed of the run.

        Returns:
            The corrupted image, in RGB and of the same size.

        Raises:
            ValueError: the image is not in RGB, the seed has more than 64 bits, or there is not enough memory.
        """
        if image.mode != "RGB":
            raise ValueError(f"image must be in RGB, got mode {image.mode!r} (use image.convert('RGB'))")
        random = self._random(image_id, seed)
        try:
            return corruption_rule(self.name).effect(image, self.level, random)
        except MemoryError:
            size = f"{image.width} x {image.height} pixels"
            raise ValueError(f"{self} of an image of {size}: out of memory, use a smaller image") from None

    def _random(self, image_id: str, seed: int) -> np.random.Generator:
        if not isinstance(image_id, str):
            raise ValueError(f"image_id must be a string, got {image_id!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        if seed.bit_length() > 64:
            raise ValueError("seed must have at most 64 bits")
        key = json.dumps([image_id, self.name, self.level, seed]).encode()
        return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest(), "big"))
