"""Make the sample images that ship with the package: scenes of the test's part, and photographs in small.

python -m recipes.samples PHOTOGRAPHS      the folder `skimage/data` of scikit-image, which has these photographs
"""

import json
import sys
from pathlib import Path

from PIL import Image

from clustrs.images.scenes.testset import examples

TARGET = Path(__file__).parents[1] / "src" / "clustrs" / "embedded" / "images"
SCENE_SEED = 99
PHOTOGRAPHS = {
    "chelsea.png": ("cat", "CC0 1.0, photograph by Stefan van der Walt"),
    "coffee.png": ("coffee", "CC0 1.0, photograph by Rachel Michetti"),
    "rocket.jpg": ("rocket", "public domain, photograph by SpaceX"),
}


def main() -> None:
    source = Path(sys.argv[1])
    TARGET.mkdir(parents=True, exist_ok=True)
    rows = []
    for example in examples(images=6, seed=SCENE_SEED):
        name = f"scene-{example.number + 1}"
        Image.fromarray(example.drawing.pixels).save(TARGET / f"{name}.png", optimize=True)
        questions = [[question.text, question.answer] for question in example.questions]
        rows.append(
            {"name": name, "file": f"{name}.png", "licence": "Apache-2.0, drawn by clustrs", "questions": questions}
        )
    for file, (name, licence) in PHOTOGRAPHS.items():
        image = Image.open(source / file).convert("RGB")
        image.thumbnail((448, 448), Image.Resampling.LANCZOS)
        image.save(TARGET / f"{name}.jpg", quality=88, optimize=True)
        rows.append({"name": name, "file": f"{name}.jpg", "licence": licence, "questions": []})
    (TARGET / "samples.json").write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
