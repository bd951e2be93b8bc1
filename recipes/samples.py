"""Make the sample images: scenes of the test's part and photographs in small, for clustrs; and, for clustrs-models,
collages and single photographs with questions of the task `photos`.

python -m recipes.samples PHOTOGRAPHS      the folder `skimage/data` of scikit-image, which has the photographs in small
python -m recipes.samples                  only those of the task `photos`, from the photographs of clustrs-models
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from clustrs.embedded import HERE
from clustrs.evaluation.tasks import get_task
from clustrs_models.photographs import PHOTOS
from clustrs_models.scenes import examples

DRAWN = HERE / "images"
SCENE_SEED = 99
PHOTOGRAPHS = {
    "chelsea.png": ("cat", "CC0 1.0, photograph by Stefan van der Walt"),
    "coffee.png": ("coffee", "CC0 1.0, photograph by Rachel Michetti"),
    "rocket.jpg": ("rocket", "public domain, photograph by SpaceX"),
}
PHOTO_SAMPLES = 5
"""The first images of the task: three collages and two single photographs."""


def write_list(rows: list[dict[str, Any]], folder: Path) -> None:
    (folder / "samples.json").write_text(json.dumps(rows, indent=2) + "\n")


def write_scenes(source: Path) -> None:
    rows: list[dict[str, Any]] = []
    for example in examples(images=6, seed=SCENE_SEED):
        name = f"scene-{example.number + 1}"
        Image.fromarray(example.drawing.pixels).save(DRAWN / f"{name}.png", optimize=True)
        questions = [[question.text, question.answer] for question in example.questions]
        about = {"task": "scenes", "licence": "Apache-2.0, drawn by clustrs", "questions": questions}
        rows.append({"name": name, "file": f"{name}.png", **about})
    for file, (name, licence) in PHOTOGRAPHS.items():
        image = Image.open(source / file).convert("RGB")
        image.thumbnail((448, 448), Image.Resampling.LANCZOS)
        image.save(DRAWN / f"{name}.jpg", quality=88, optimize=True)
        rows.append({"name": name, "file": f"{name}.jpg", "task": "", "licence": licence, "questions": []})
    write_list(rows, DRAWN)


def write_photos() -> None:
    folder = PHOTOS.with_name("samples")
    folder.mkdir(exist_ok=True)
    task = get_task("photos")
    rows: list[dict[str, Any]] = []
    for number, image in enumerate(list(dict.fromkeys(item.image for item in task.items))[:PHOTO_SAMPLES]):
        name = f"photo-{number + 1}"
        task.open(image).save(folder / f"{name}.jpg", quality=90, optimize=True)
        questions = [[item.question, item.answer] for item in task.items if item.image == image]
        about = {"task": "photos", "licence": "CC BY 4.0, Caltech 101 (see NOTICE)", "questions": questions}
        rows.append({"name": name, "file": f"{name}.jpg", **about})
    write_list(rows, folder)


def main() -> None:
    if len(sys.argv) > 1:
        write_scenes(Path(sys.argv[1]))
    write_photos()


if __name__ == "__main__":
    main()
