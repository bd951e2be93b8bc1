"""Images for a study, and what the model sees in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from clustrs.embedded import image_path
from clustrs.images.corruptions import Corruption
from clustrs.images.open import open_image
from clustrs.images.scenes import examples
from clustrs.models import shared_encoding as sharing
from clustrs.models.adapters import VisualTokens as Candidates
from clustrs.models.load import load_model
from clustrs.models.prompts import chat_prompt
from clustrs.models.select import select_tokens
from clustrs.pruners import Pruner, Selection


@dataclass(frozen=True)
class StudyImage:
    """A name, which seeds what is random in its corruptions, and the image in RGB."""

    name: str
    image: Image.Image

    def spoilt(self, corruption: Corruption | None, seed: int = 0) -> "StudyImage":
        """The same name, so that another corruption draws its own numbers for it."""
        return self if corruption is None else StudyImage(self.name, corruption.apply(self.image, self.name, seed))


def study_images(given: Sequence[str], count: int) -> list[StudyImage]:
    """The user's own images (files, folders of them, or sample:NAME), or the first drawn scenes of the test set."""
    if not given:
        return [StudyImage(f"scene-{e.number:04}", Image.fromarray(e.drawing.pixels)) for e in examples(count)]
    paths: list[Path] = []
    for name in given:
        path = image_path(name)
        inside = (
            sorted(p for p in path.iterdir() if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".bmp"))
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise ValueError(f"image {name!r}: the folder has no images in it")
        paths += inside
    return [StudyImage(path.name, open_image(path)) for path in paths]


class Eyes:
    """A model's vision: images to visual tokens, and methods to choose from them. The base crop alone."""

    def __init__(self, model_id: str) -> None:
        self.model, self.processor = load_model(model_id)

    def see(self, images: Sequence[StudyImage]) -> list[Candidates]:
        """Tokens, attention, hidden states and keys of each image."""
        prompts = [(i, chat_prompt(self.processor, "?")) for i in range(len(images))]
        return sharing.encode(self.model, self.processor, [p.image for p in images], prompts, crops="base").images

    def choose(self, method: Pruner, seen: Sequence[Candidates]) -> list[Selection]:
        """What a method keeps of each image."""
        return [selection for selection, _ in select_tokens(method, list(seen), scope="image")]
