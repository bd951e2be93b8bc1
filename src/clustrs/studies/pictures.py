"""Pictures for a study, and what the model sees in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from clustrs.corruptions import Corruption
from clustrs.embedded import picture_path
from clustrs.pruners import Pruner, Selection
from clustrs.scenes import examples
from clustrs.vlm import asking, sharing
from clustrs.vlm.candidates import Candidates
from clustrs.vlm.choosing import choose


@dataclass(frozen=True)
class Picture:
    """A name, which seeds what is random in its corruptions, and the picture in RGB."""

    name: str
    image: Image.Image

    def spoilt(self, corruption: Corruption | None, seed: int = 0) -> "Picture":
        """The same name, so that another corruption draws its own numbers for it."""
        return self if corruption is None else Picture(self.name, corruption.apply(self.image, self.name, seed))


def study_pictures(given: Sequence[str], count: int) -> list[Picture]:
    """The user's own pictures (files, folders of them, or sample:NAME), or the first drawn scenes of the test set."""
    if not given:
        return [Picture(f"scene-{e.number:04}", Image.fromarray(e.drawing.pixels)) for e in examples(count)]
    paths: list[Path] = []
    for name in given:
        path = picture_path(name)
        inside = (
            sorted(p for p in path.iterdir() if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".bmp"))
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise ValueError(f"picture {name!r}: the folder has no pictures in it")
        paths += inside
    return [Picture(path.name, asking.open_picture(path)) for path in paths]


class Eyes:
    """A model's vision: pictures to visual tokens, and methods to choose from them. The base crop alone."""

    def __init__(self, model_id: str) -> None:
        self.model, self.processor = asking.load(model_id)

    def see(self, pictures: Sequence[Picture]) -> list[Candidates]:
        """Tokens, attention, hidden states and keys of each picture."""
        prompts = [(i, asking.prompt(self.processor, "?")) for i in range(len(pictures))]
        crops = "all" if self.model.config.model_type == "llava" else "base"
        return sharing.encode(self.model, self.processor, [p.image for p in pictures], prompts, crops).pictures

    def choose(self, method: Pruner, seen: Sequence[Candidates]) -> list[Selection]:
        """What a method keeps of each picture."""
        projector: Any = self.model.model.multi_modal_projector
        return [selection for selection, _ in choose(method, list(seen), projector, scope="image")]
