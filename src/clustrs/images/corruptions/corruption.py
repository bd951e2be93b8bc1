"""A corruption by name and level, and where its random numbers come from."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from PIL import Image

from clustrs.images.corruptions.rules import corruption_rule, is_level, list_corruptions


@dataclass(frozen=True)
class Corruption:
    """One way to corrupt an image, for example `Corruption("gaussian", 0.5)`. `list_corruptions()` has the names."""

    name: str
    level: float

    def __post_init__(self) -> None:
        rule = corruption_rule(self.name)
        if not (is_level(self.level) and rule.accepts(self.level)):
            raise ValueError(f"{self.name} level={self.level!r}: give {rule.accepted}")
        object.__setattr__(self, "level", float(self.level))

    def __str__(self) -> str:
        return f"{self.name}:{self.level_text}"

    @property
    def level_text(self) -> str:
        """The level without needless decimals."""
        return str(int(self.level) if self.level.is_integer() else self.level)

    @classmethod
    def parse(cls, text: str) -> "Corruption":
        """The corruption that `name:level` stands for, as in "gaussian:0.5"."""
        name, colon, level = text.partition(":")
        try:
            value = float(level)
        except ValueError:
            if colon:
                corruption_rule(name)  # an unknown name is the first thing to tell
            names = ", ".join(list_corruptions())
            raise ValueError(
                f"corruption {text!r}: give NAME:LEVEL, for example gaussian:0.5; names are {names}"
            ) from None
        return cls(name, value)

    def apply(self, image: Image.Image, image_id: str, seed: int = 0) -> Image.Image:
        """The corrupted image: always the same for the same image id, corruption, level and run seed."""
        if image.mode != "RGB":
            raise ValueError(f"image has mode {image.mode!r}: give an RGB image, image.convert('RGB') makes one")
        random = self._random(image_id, seed)
        try:
            return corruption_rule(self.name).effect(image, self.level, random)
        except MemoryError:
            size = f"{image.width} x {image.height} pixels"
            raise ValueError(f"{self} of an image of {size}: out of memory, give a smaller image") from None

    def _random(self, image_id: str, seed: int) -> np.random.Generator:
        """The generator that belongs to these four things, and to nothing else."""
        if not isinstance(image_id, str):
            raise ValueError(f"image_id={image_id!r}: give a string")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: give an integer")
        if seed.bit_length() > 64:
            raise ValueError("seed has more than 64 bits: give a smaller integer")
        key = json.dumps([image_id, self.name, self.level, seed])
        return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest(), "big"))
