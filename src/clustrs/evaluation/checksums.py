"""SHA-256 of what decides a run's answers: the model's files, the questions and the images."""

import hashlib
import json
import sys
from pathlib import Path

from clustrs.corruptions.images import open_regular
from clustrs.evaluation.task import Task

MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")
"""How the names of weights, configurations, tokenizers and chat templates end."""
LARGE = 1 << 30
"""Hashing more bytes than this is announced: it takes seconds."""

_known: dict[tuple[str, int, int], str] = {}


def file_checksum(path: Path) -> str:
    """The checksum of a file. Within a process, a file of the same size and time of change is read once."""
    status = path.stat()
    key = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if key not in _known:
        with open_regular(path) as file:
            _known[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _known[key]


def model_checksums(folder: Path, progress: bool = True) -> dict[str, str]:
    """The checksum of every file in a model's folder that transformers may read, weights in full.

    Where there are safetensors, transformers does not read `.bin` files, and they are left out.
    """
    try:
        files = sorted(path for path in folder.rglob("*") if path.suffix in MODEL_FILES and path.is_file())
        if any(path.suffix == ".safetensors" for path in files):
            files = [path for path in files if path.suffix != ".bin"]
        size = sum(path.stat().st_size for path in files)
        if progress and size > LARGE:
            print(f"checking {len(files)} files of the model ({size / 1e9:.1f} GB)", file=sys.stderr)
        return {path.relative_to(folder).as_posix(): file_checksum(path) for path in files}
    except OSError as error:
        raise ValueError(f"model {str(folder)!r} cannot be read: {error.strerror or error}") from None


def fingerprint(task: Task) -> str:
    """SHA-256 of the questions, their images' names and the answers: the same on every machine."""
    asked = [[item.id, item.image, item.question, item.answer] for item in task.items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def image_checksum(task: Task, name: str) -> str | None:
    """The checksum of an image's file, or of its pixels where the task has no files; None if it cannot be read.

    A task whose images are files has a method `file` that returns the path of one (or None).
    """
    locate = getattr(task, "file", None)
    try:
        path = locate(name) if locate is not None else None
        if path is not None:
            return file_checksum(path)
        image = task.open(name)
        digest = hashlib.sha256(f"{image.mode} {image.width} x {image.height} ".encode())
        digest.update(image.tobytes())
        return digest.hexdigest()
    except Exception:  # whatever is wrong with it is told when the image is opened to be asked about
        return None


def image_checksums(task: Task) -> dict[str, str | None]:
    """The checksum of every image that the task's questions are about."""
    return {name: image_checksum(task, name) for name in dict.fromkeys(item.image for item in task.items)}
