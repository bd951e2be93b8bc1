"""Record what LLaVA-1.5's own evaluation sends, computed without this package, for test_protocol.py to compare with.

Prompts: the system line of vicuna_v1, then " USER: <image>\\n{question} ASSISTANT:". Pixels: pad to a square with the
mean colour, the image centred, resize to 336 with a bicubic filter, normalise. Of the official questions, which may not
be copied here, only checksums are kept:

    python tests/goldens/record_llava_protocol.py
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FILE = Path(__file__).with_name("llava_protocol.json")
DATA = Path(__file__).parents[2].parent / "shared" / "data"
SIDE = 336
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SYSTEM_LINE = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
LETTER = "Answer with the option's letter from the given choices directly."
QUESTIONS = ["What is x?", "Which {one}?\nA. left\nB. right\n" + LETTER, "  Qu'est-ce que c'est ? "]
SIZES = [(336, 336), (640, 480), (480, 640), (31, 500), (501, 30), (337, 336), (1, 7), (90, 91)]
POSITIONS = [(0, 0), (0, 335), (167, 168), (168, 3), (335, 200)]


def prompt(question: str) -> str:
    return SYSTEM_LINE + " USER: " + "<image>" + "\n" + question + " ASSISTANT:"


def drawn(width: int, height: int) -> Image.Image:
    """An image without noise and without a pattern that a shift by one pixel would not change."""
    y, x = np.mgrid[:height, :width]
    channels = [(x * (3 + c) + y * (7 - c) + x * y // (5 + c)) % 256 for c in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def square(image: Image.Image) -> NDArray[np.uint8]:
    """The padded and resized image, [336, 336, 3]."""
    side = max(image.size)
    padded = Image.new("RGB", (side, side), tuple(int(mean * 255) for mean in MEAN))
    padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return np.asarray(padded.resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def normalised(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    return (pixels / 255 - np.array(MEAN)) / np.array(STD)


def checksum(texts: Sequence[str]) -> dict[str, Any]:
    return {"count": len(texts), "sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()}


def official() -> dict[str, Any]:
    vet = json.loads((DATA / "mm-vet" / "mm-vet.json").read_text())
    science = json.loads((DATA / "scienceqa" / "llava_test_CQM-A.json").read_text())
    turns = [entry["conversations"][0]["value"] for entry in science if "image" in entry]
    asked = [turn.replace("<image>", "").strip() + "\n" + LETTER for turn in turns]
    return {
        "mmvet": checksum([prompt(entry["question"]) for entry in vet.values()]),
        "scienceqa": checksum([prompt(question) for question in asked]),
    }


def image_record(width: int, height: int) -> dict[str, Any]:
    pixels = square(drawn(width, height))
    values = normalised(pixels)
    return {
        "size": [width, height],
        "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
        "values": [[y, x, *(round(float(value), 6) for value in values[y, x])] for y, x in POSITIONS],
    }


def main() -> None:
    golden = {
        "prompts": [{"question": question, "prompt": prompt(question)} for question in QUESTIONS],
        "official": official(),
        "images": [image_record(*size) for size in SIZES],
    }
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
