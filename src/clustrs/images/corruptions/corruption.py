"""A corruption by name and level, and where its random numbers come from."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
from PIL import Image

from clustrs.images.corruptions import effects, imagenet_c

Effect = Callable[[Image.Image, float, np.random.Generator], Image.Image]

PAPER_LEVELS: dict[str, tuple[float, ...]] = {
    "gaussian": (0.1, 0.5, 1.0, 2.0, 3.0),
    "salt_pepper": (0.01, 0.1, 0.2, 0.3, 0.5),
    "brightness": (0.5, 1.5, 2.0),
    "contrast": (0.5, 1.5, 2.0),
    "cutout": (0.1, 0.25, 0.4),
    "motion_blur": (15, 31),
    "jpeg": (60, 30),
}
"""The corruptions of the paper and, for each, its levels."""

IMAGENET_C_LEVELS: dict[str, tuple[float, ...]] = {
    f"imagenet_c/{family}": (1, 2, 3, 4, 5) for family in imagenet_c.FAMILIES
}
"""The families of ImageNet-C and, for each, its severities."""


@dataclass(frozen=True)
class Rule:
    """A corruption's effect, and the levels it takes."""

    effect: Effect
    low: float
    high: float
    accepted: str
    kind: str = "any"
    """"any" number, an "integer", or an "odd" integer."""

    def accepts(self, level: float) -> bool:
        whole = self.kind == "any" or level % (2 if self.kind == "odd" else 1) == (self.kind == "odd")
        return math.isfinite(level) and self.low <= level <= self.high and whole


RULES = {
    "gaussian": Rule(effects.gaussian, 0, 100, "a standard deviation from 0 to 100 (pixels go from 0 to 1)"),
    "salt_pepper": Rule(effects.salt_pepper, 0, 1, "a share of the pixels from 0 to 1"),
    "brightness": Rule(effects.brightness, 0, 100, "a factor from 0 to 100"),
    "contrast": Rule(effects.contrast, 0, 100, "a factor from 0 to 100"),
    "cutout": Rule(effects.cutout, 0, 1, "a share of the image from 0 to 1"),
    "motion_blur": Rule(effects.motion_blur, 1, 999, "an odd number of pixels from 1 to 999", "odd"),
    "jpeg": Rule(effects.jpeg, 1, 100, "a quality (an integer) from 1 to 100", "integer"),
    **{
        f"imagenet_c/{family}": Rule(effect, 1, 5, "a severity (an integer) from 1 to 5", "integer")
        for family, effect in imagenet_c.FAMILIES.items()
    },
}


def suggestion(name: str) -> str:
    """The question whether another name was meant, if one is close; `imagenet_c/` may be missing from it."""
    short = {known.rpartition("/")[2]: known for known in reversed(RULES)}  # the paper's come last, and stay
    close = get_close_matches(str(name).lower(), [*RULES, *short], n=1)
    return f" (did you mean {short.get(close[0], close[0])!r}?)" if close else ""


@dataclass(frozen=True)
class Corruption:
    """One way to spoil a image, for example `Corruption("gaussian", 0.5)`.

    `PAPER_LEVELS` and `IMAGENET_C_LEVELS` have the names.
    """

    name: str
    level: float

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise ValueError(f"unknown corruption {self.name!r}{suggestion(self.name)}: give one of {', '.join(RULES)}")
        rule = RULES[self.name]
        number = isinstance(self.level, int | float) and not isinstance(self.level, bool)
        if not (number and rule.accepts(self.level)):
            raise ValueError(f"{self.name} level={self.level!r}: give {rule.accepted}")
        object.__setattr__(self, "level", float(self.level))

    def __str__(self) -> str:
        return f"{self.name}:{int(self.level) if self.level.is_integer() else self.level}"

    @classmethod
    def parse(cls, text: str) -> "Corruption":
        """The corruption that `name:level` stands for, as in "gaussian:0.5"."""
        name, colon, level = text.partition(":")
        try:
            value = float(level)
        except ValueError:
            if name in RULES or not colon:
                names = ", ".join(RULES)
                raise ValueError(
                    f"corruption {text!r}: give NAME:LEVEL, for example gaussian:0.5; names are {names}"
                ) from None
            value = math.nan  # the name is what is wrong in the first place
        return cls(name, value)

    def apply(self, image: Image.Image, image_id: str, seed: int = 0) -> Image.Image:
        """The spoiled image: always the same for the same image id, corruption, level and run seed."""
        if image.mode != "RGB":
            raise ValueError(f"image has mode {image.mode!r}: give an RGB image, image.convert('RGB') makes one")
        return RULES[self.name].effect(image, self.level, self._random(image_id, seed))

    def _random(self, image_id: str, seed: int) -> np.random.Generator:
        """The generator that belongs to these four things, and to nothing else."""
        if not isinstance(image_id, str):
            raise ValueError(f"image_id={image_id!r}: give a string")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: give an integer")
        key = json.dumps([image_id, self.name, self.level, seed])
        return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest(), "big"))
