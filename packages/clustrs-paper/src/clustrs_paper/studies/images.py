"""Images for a study, and the visual tokens that a model makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from clustrs.corruptions import Corruption
from clustrs.corruptions.images import open_image
from clustrs.embedded import image_path
from clustrs.evaluation.tasks import get_task
from clustrs.models import ask as asking
from clustrs.models.adapters.base import VisualTokens
from clustrs.models.ask import chat_prompt
from clustrs.models.load import apply_image_padding, load_model
from clustrs.models.select import select_tokens
from clustrs.pruners import Pruner, Selection
from clustrs_paper.studies.settings import ImageStudyConfig, StudyConfig

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
QUESTIONS_PER_IMAGE = 16
"""Questions of a task that are read for each image that is needed; no known task asks more about one image."""


@dataclass(frozen=True)
class StudyImage:
    """A name, which seeds what is random in its corruptions, and the image in RGB."""

    name: str
    image: Image.Image

    def corrupted(self, corruption: Corruption | None, seed: int = 0) -> "StudyImage":
        """The corrupted image under the same name, so that every corruption draws its own numbers for it."""
        return self if corruption is None else StudyImage(self.name, corruption.apply(self.image, self.name, seed))


def study_images(config: ImageStudyConfig) -> list[StudyImage]:
    """Return the images that the user named (files, folders, sample:NAME), or the first images of the task."""
    return own_images(config.images) if config.images else task_images(config.task, config.data, config.count)


def own_images(given: Sequence[str]) -> list[StudyImage]:
    """Open the images that a user named."""
    paths: list[Path] = []
    for name in given:
        path = image_path(name)
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"image {name!r}: the folder has no images in it, they end in {', '.join(SUFFIXES)}")
        paths += inside
    return [StudyImage(path.name, open_image(path)) for path in paths]


def task_images(name: str, data: str | None, count: int) -> list[StudyImage]:
    """Return the first `count` images of a task, or all if it has fewer."""
    task = get_task(name, data, limit=count * QUESTIONS_PER_IMAGE)
    images = list(dict.fromkeys(item.image for item in task.items))
    return [StudyImage(image, task.open(image).convert("RGB")) for image in images[:count]]


@dataclass(frozen=True)
class EncodedImage:
    """The visual tokens [N, D] of an image, the attention score [N] of each, and where it lies on the patch grid."""

    tokens: Tensor
    scores: Tensor
    y: Tensor
    x: Tensor
    candidates: VisualTokens
    """The same as `models` has it, with what methods need besides."""


class VisionEncoder:
    """A model's vision tower and projector: images to visual tokens, of the base crop alone, and methods on them."""

    def __init__(self, config: StudyConfig) -> None:
        self.model, processor = load_model(config.model, config.load_options())
        self.processor = apply_image_padding(processor, config.image_padding)
        self.prompt = chat_prompt(self.processor, "?", config.prompt_template)

    def encode(self, images: Sequence[StudyImage]) -> list[EncodedImage]:
        """Return the visual tokens of each image before pruning."""
        prompts = [(i, self.prompt) for i in range(len(images))]
        batch = asking.encode(self.model, self.processor, [one.image for one in images], prompts, crops="base")
        return [EncodedImage(v.tokens, v.scores, v.layout.y, v.layout.x, v) for v in batch.images]

    def select(self, method: Pruner, encoded: Sequence[EncodedImage]) -> list[Selection]:
        """Return the selection of a method for each image."""
        chosen = select_tokens(method, [image.candidates for image in encoded], scope="image")
        return [selection for selection, _ in chosen]
