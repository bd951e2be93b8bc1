"""Print the size of the project: `make count`.

Files and lines of src/clustrs, files over 500 lines, words of the docs, lines with wording to avoid, and how many of
our files run when a model generates, when `clustrs ask` answers and when `clustrs eval --config demo` reports.
A file counts as run when one of its functions is called; code that runs while a module is imported does not count.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (str(ROOT / "src" / "clustrs"), str(ROOT / "packages"))
LONGEST_FILE = 500
WORDING = re.compile(
    r"\bis no [a-z]|\bgoes (with|before|in|out)\b|\bruns? along|\b(is|be) told\b|has to say|\bof (ours|yours|others)\b"
    r"|\bdoors?\b|\bhear(s|d)?\b|\blisten|\bso many\b|the way back|\"\"\"(What|How|Where|Which|Whether) |: give "
)
WORDED = ("src", "packages", "docs", "README.md", "CONTRIBUTING.md")
QUESTION = ("sample:photo-1", "What is this?")
COMMANDS = {
    "ask": ["ask", *QUESTION],
    "eval": ["eval", "--config", "demo", "--limit", "2", "--quiet"],
}


def tracked(*paths: str) -> list[Path]:
    """Return the files under `paths` that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file; none of a binary one."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def source_sizes() -> dict[str, int]:
    """Return the number of lines of each Python file of src/clustrs."""
    return {
        str(path.relative_to(ROOT)): len(read_lines(path)) for path in tracked("src/clustrs") if path.suffix == ".py"
    }


def docs_words() -> tuple[int, int]:
    """Count the words of README.md and of the pages under docs, recorded results aside: in prose and in tables."""
    pages = [path for path in tracked("README.md", "docs") if path.suffix == ".md" and not is_result(path)]
    words, tables = 0, 0
    for line in (line for page in pages for line in read_lines(page)):
        words += len(line.split())
        tables += len(line.split()) if line.lstrip().startswith("|") else 0
    return words - tables, tables


def is_result(path: Path) -> bool:
    """Tell whether a file is a recorded result, not a text."""
    return "docs/results" in path.as_posix()


def worded_lines() -> list[str]:
    """Return `file:line: text` for each line that matches a pattern to avoid."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked(*WORDED)
        if not is_result(path)
        for number, line in enumerate(read_lines(path), 1)
        if WORDING.search(line)
    ]


@contextlib.contextmanager
def recording(files: set[str]) -> Iterator[None]:
    """Add to `files` each of our files that has a function called inside the block, in any thread."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name not in files and is_ours(name) and not is_import(frame):
            files.add(name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def is_ours(name: str) -> bool:
    """Tell whether a file is Python code of this repository's packages."""
    return name.startswith(SOURCES) and name.endswith(".py")


def is_import(frame: FrameType | None) -> bool:
    """Tell whether a frame runs because a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def run_generate() -> Callable[[], Any]:
    """Load the embedded model and return a call of `generate` under ClustRS(keep=16), made once before."""
    from PIL import Image

    from clustrs import ClustRS
    from clustrs.embedded import image_path
    from clustrs.models.load import load_model

    model, processor = load_model("photo-llava")
    image, question = QUESTION
    inputs = processor(images=Image.open(image_path(image)), text=f"<image> {question}", return_tensors="pt")

    def generate() -> None:
        with ClustRS(keep=16)(model):
            model.generate(**inputs, max_new_tokens=4)

    generate()
    return generate


def run_command(name: str) -> Callable[[], Any]:
    """Return a call of a `clustrs` command, its output discarded."""
    from clustrs.cli import main

    def call() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            words = [*COMMANDS[name], *(["--output", folder] if name == "eval" else [])]
            if main(words) != 0:
                raise SystemExit(f"clustrs {' '.join(words)} failed")

    return call


def files_run(name: str) -> list[str]:
    """Return the files of ours that a `generate` or a command runs; meant for a fresh interpreter."""
    call = run_generate() if name == "generate" else run_command(name)
    files: set[str] = set()
    with recording(files):
        call()
    return sorted(str(Path(file).relative_to(ROOT)) for file in files)


def files_run_in_new_process(name: str) -> list[str]:
    """Count in an interpreter of its own, so that nothing is imported or cached before."""
    done = subprocess.run(
        [sys.executable, __file__, "--run", name], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(words: list[str]) -> None:
    """Print the counts; with `--files` the names behind them, too."""
    if words[:1] == ["--run"]:
        print(json.dumps(files_run(words[1])))
        return
    details = "--files" in words
    sizes = source_sizes()
    long = [f"{lines} {name}" for name, lines in sizes.items() if lines > LONGEST_FILE]
    worded = worded_lines()
    print(f"src/clustrs: {len(sizes)} files, {sum(sizes.values())} lines")
    print(f"files over {LONGEST_FILE} lines: {len(long)}", *sorted(long, reverse=True), sep="\n  ")
    prose, tables = docs_words()
    print(f"words of README.md and docs: {prose + tables}, {prose} of them in prose and {tables} in tables")
    print(f"lines with wording to avoid: {len(worded)}", *(worded if details else []), sep="\n  ")
    for name in ("generate", *COMMANDS):
        files = files_run_in_new_process(name)
        print(f"files run by {name}: {len(files)}", *(files if details else []), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
