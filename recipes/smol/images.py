"""Training images: photographs alone and in 2 x 2 collages, and drawn scenes. Image n is the same in every run."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from PIL import Image, ImageFilter, ImageOps

from clustrs_models.drawing import draw, sample
from clustrs_models.scenes import draw_questions
from recipes.smol.names import Kind, caltech_kinds, pet_kinds, split
from recipes.smol.questions import Question, about_collage, about_scene, about_single, short

SEED = 2027
SINGLES, SCENES = 0.3, 0.1
"""Shares of single photographs and of drawn scenes; the others are collages."""
CORRUPTED, CHANCE = 0.5, 0.5
"""Share of images that are changed mildly, and the chance of each change in those."""
SCENE_QUESTIONS = 8


@dataclass(frozen=True)
class Shown:
    """An image, the questions about it, and what it shows: names in the order of places, or none for a scene."""

    pixels: Image.Image
    questions: tuple[Question, ...]
    names: tuple[str, ...]

    @property
    def text(self) -> dict[str, Any]:
        """Everything but the pixels, for JSON."""
        return {"names": self.names, "questions": [asdict(question) for question in self.questions]}


def square(photo: Image.Image, side: int, zoom: float = 1.0, x: float = 0.5, y: float = 0.5) -> Image.Image:
    """Cut a square of `zoom` times the shorter side at (x, y) in 0..1 and resize it."""
    length = zoom * min(photo.size)
    left, top = x * (photo.width - length), y * (photo.height - length)
    return photo.resize((side, side), Image.Resampling.BICUBIC, (left, top, left + length, top + length))


def corrupt(image: Image.Image, generator: Generator) -> Image.Image:
    """Change brightness, contrast, sharpness and grain mildly."""
    pixels = np.asarray(image, dtype=np.float32) / np.float32(255)
    if generator.random() < CHANCE:
        pixels = pixels + np.float32(generator.uniform(-0.15, 0.15))
    if generator.random() < CHANCE:
        pixels = pixels.mean() + (pixels - pixels.mean()) * np.float32(generator.uniform(0.7, 1.3))
    if generator.random() < CHANCE:
        blurred = Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))
        blurred = blurred.filter(ImageFilter.GaussianBlur(generator.uniform(0.3, 1.0)))
        pixels = np.asarray(blurred, dtype=np.float32) / np.float32(255)
    if generator.random() < CHANCE:
        sigma = np.float32(generator.uniform(0, 0.15))
        pixels = pixels + sigma * generator.standard_normal(pixels.shape, dtype=np.float32)
    return Image.fromarray(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8))


class Images:
    """Images of one part of the photographs ("train", "held", "test"), by number.

    Args:
        caltech: Folder of Caltech-101.
        pets: Folder of Oxford Pets.
        part: Which photographs to use.
        side: Pixels of an image's side.
        clean: Leave out mirroring, zoom and corruption.
    """

    def __init__(self, caltech: Path, pets: Path, part: str, side: int = 224, clean: bool = False) -> None:
        self.part, self.side, self.clean = part, side, clean
        folders = [(kind, caltech / kind.folder) for kind in caltech_kinds()]
        folders += [(kind, pets / kind.folder) for kind in pet_kinds(pets)]
        self.photos: dict[Kind, list[Path]] = {kind: split(folder)[part] for kind, folder in folders}
        self.kinds = list(self.photos)
        weights = np.array([kind.weight for kind in self.kinds])
        self.chances = weights / weights.sum()

    def __getitem__(self, number: int) -> Shown:
        purpose = {"train": 1, "held": 2, "test": 3}[self.part]
        generator = default_rng(SeedSequence((SEED, purpose, number)))
        share = generator.random()
        if share < SCENES:
            shown = self.scene(generator)
        elif share < SCENES + SINGLES:
            shown = self.single(generator)
        else:
            shown = self.collage(generator)
        if not self.clean and generator.random() < CORRUPTED:
            return Shown(corrupt(shown.pixels, generator), shown.questions, shown.names)
        return shown

    def draw_kind(self, generator: Generator) -> Kind:
        """Draw a kind by weight."""
        return self.kinds[generator.choice(len(self.kinds), p=self.chances)]

    def cut(self, kind: Kind, side: int, generator: Generator) -> Image.Image:
        """Cut a square of one of a kind's photographs, sometimes mirrored."""
        paths = self.photos[kind]
        with Image.open(paths[generator.integers(len(paths))]) as file:
            photo = file.convert("RGB")
        if self.clean:
            return square(photo, side)
        x, y = generator.uniform(0.2, 0.8, 2)
        part = square(photo, side, generator.uniform(0.8, 1), x, y)
        # Mirrored text would be wrong on a stop sign or a banknote, but not what they are.
        return ImageOps.mirror(part) if generator.random() < 0.5 else part

    def single(self, generator: Generator) -> Shown:
        """Make an image of one photograph."""
        kind = self.draw_kind(generator)
        pixels = self.cut(kind, self.side, generator)
        return Shown(pixels, tuple(about_single(kind, self.kinds, generator)), (short(kind),))

    def collage(self, generator: Generator) -> Shown:
        """Make an image of four photographs with different names."""
        kinds: list[Kind] = []
        while len(kinds) < 4:
            kind = self.draw_kind(generator)
            if short(kind) not in [short(other) for other in kinds]:
                kinds.append(kind)
        half = self.side // 2
        pixels = Image.new("RGB", (self.side, self.side))
        for i, kind in enumerate(kinds):
            pixels.paste(self.cut(kind, half, generator), (i % 2 * half, i // 2 * half))
        return Shown(pixels, tuple(about_collage(kinds, self.kinds, generator)), tuple(short(kind) for kind in kinds))

    def scene(self, generator: Generator) -> Shown:
        """Draw a scene of colored shapes; those kept for testing are only in the parts "held" and "test"."""
        scene = sample(generator, 192, held_out=self.part != "train")
        pixels = Image.fromarray(draw(scene, generator).pixels)
        pixels = pixels.resize((self.side, self.side), Image.Resampling.BICUBIC)
        drawn = draw_questions(scene, SCENE_QUESTIONS, generator)
        distinct = list(dict.fromkeys((question.kind, question.text, question.answer) for question in drawn))
        listed = [thing.name for thing in sorted(scene.things, key=lambda thing: thing.x)]
        return Shown(pixels, tuple(about_scene(distinct, listed, generator)), ())
