"""Small files of each task, with mistakes in them where a test asks for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
INSTRUCTION = "Answer with the option's letter from the given choices directly."


def real(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"the official files of {name} are not here")
    return SHARED / name


def write_image(path: Path, colour: tuple[int, int, int] = (255, 0, 0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).save(path)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def vet(**changes: Any) -> dict[str, Any]:
    entry = {"imagename": "a.png", "question": "What is x?", "answer": "-1<AND>-5", "capability": ["ocr", "math"]}
    return {key: value for key, value in (entry | changes).items() if value is not ...}


def science(key: str, text: str, answer: str, image: str | None = "own") -> dict[str, Any]:
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    field = {} if image is None else {"image": f"{key}/image.png" if image == "own" else image}
    return {"id": key, **field, "conversations": turns}


def line(**changes: Any) -> dict[str, Any]:
    entry = {"image": "a.png", "question": "What is it?", "answer": "a cat"} | changes
    return {key: value for key, value in entry.items() if value is not ...}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path
