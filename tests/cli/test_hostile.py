"""One line, never a traceback: names that are too long, bytes that are no text, folders that take no files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clustrs.corruptions import Corruption
from clustrs_paper.studies import StudyPart

Run = Callable[..., tuple[int, str, str]]
LONG = "n" * 5000
ASK = ("ask", "sample:scene-1", "Why?")
CORRUPT = ("corrupt", "sample:scene-1", "--corrupt", "gaussian:1")


def refused(run: Run, *words: Any) -> str:
    """What is said of these words, in one line of bearable length."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("clustrs: ")
    assert err.count("\n") == 1
    assert len(err) < 1000
    return err


@pytest.mark.parametrize(
    "words",
    [
        ("ask", LONG, "Why?"),
        (*ASK, "--method", LONG),
        (*ASK, "--corrupt", f"{LONG}:1"),
        (*ASK, "--show", f"{LONG}.png"),
        (*ASK, "--show", f"{LONG}/kept.png"),
        (*CORRUPT, "-o", f"{LONG}.png"),
        (*CORRUPT, "-o", f"{LONG}/x.png"),
        ("eval", "--config", LONG),
        ("eval", "--corrupt", LONG),
        ("eval", "--methods", LONG),
        ("eval", "-o", LONG),
        ("report", LONG),
        ("export-answers", LONG, "--format", "mmvet", "-o", "x"),
        ("study", LONG),
        ("study", "movement", LONG),
        ("study", "movement", "--corrupt", LONG),
        ("study", "movement", "-o", LONG),
        ("study", "ablation", "-o", LONG),
    ],
    ids=lambda words: " ".join(word[:12] for word in words),
)
def test_overlong_names(run: Run, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("ask", "sample:scene-1", "Why \udcff?"),
        ("ask", "\udcff.png", "Why?"),
        (*ASK, "--model", "\udcff"),
        (*ASK, "--set", "tau=\udcff"),
        ("eval", "--methods", "none", "\udcff"),
        ("study", "stability", "\udcff.png"),
        ("\udcff",),
    ],
)
def test_lone_surrogates(run: Run, words: tuple[str, ...]) -> None:
    message = refused(run, *words)
    assert r"\udcff" in message
    assert "is not valid UTF-8" in message


def test_null_characters(run: Run) -> None:
    assert "contains a null character" in refused(run, "ask", "a\0.png", "Why?")


OUTPUTS: list[tuple[tuple[str, ...], str]] = [
    ((*ASK, "--show", "{}/kept.png"), "--show"),
    ((*CORRUPT, "-o", "{}/x.png"), "--output"),
    (("eval", "-o", "{}/run"), "--output"),
    (("study", "stability", "-o", "{}/out"), "--output"),
    (("study", "ablation", "-o", "{}/out"), "--output"),
]


@pytest.mark.parametrize(("words", "option"), OUTPUTS, ids=lambda value: " ".join(value[:2]))
def test_folders_that_take_no_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], option: str
) -> None:
    (tmp_path / "file").touch()
    message = refused(run, *(word.format(tmp_path / "file") for word in words))
    assert message.startswith(f"clustrs: {option} must be a folder that can be written to, got '{tmp_path / 'file'}")
    assert "is not a folder" in message
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = refused(run, *(word.format(tmp_path / "new") for word in words))
    assert f"'{tmp_path}' is read-only" in message
    assert not (tmp_path / "new").exists()


def full(path: Path) -> Path:
    """A file that takes nothing, as on a full disk."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path.symlink_to("/dev/full")
    return path


def test_full_disks(run: Run, tmp_path: Path) -> None:
    message = refused(run, *CORRUPT, "-o", full(tmp_path / "full.png"))
    assert message.startswith(f"clustrs: --output '{tmp_path / 'full.png'}': No space left on device")
    from clustrs_paper.studies.result import pyplot

    full(tmp_path / "part.csv")
    part = StudyPart("part", pyplot().figure(), [{"text": "x" * 100_000}], "findings")
    with pytest.raises(ValueError, match=r"output '.*': part could not be written: No space left on device"):
        part.save(tmp_path)


def test_other_errors_of_the_system(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> Callable[..., None]:
        def samples(*_: Any) -> None:
            raise error

        return samples

    monkeypatch.setattr("clustrs.cli.catalog.samples", fail(OSError(28, "No space left on device", "a/file")))
    assert refused(run, "samples") == "clustrs: a/file: No space left on device\n"
    monkeypatch.setattr("clustrs.cli.catalog.samples", fail(MemoryError()))
    assert refused(run, "samples").startswith("clustrs: out of memory")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "--workers", "2"), "--workers 2 needs --engine ray"),
        (("eval", "--address", "auto"), "--address auto needs --engine ray"),
        (("eval", "--set-task", "limit=3"), "--set-task must not contain limit (write --limit 3)"),
        (("study", "ablation", "--set-task", "data=x"), "--set-task must not contain data (write --data x)"),
        ((*CORRUPT, "--contact-sheet", "-o", "x.png"), "corrupt needs either --corrupt NAME:LEVEL or --contact-sheet"),
        (("study", "movement", "--levels", "1"), "corruption must be given with levels, got levels=(1.0,) alone"),
        ((*ASK, "--set", "keep=3"), "--set must not contain keep (write --keep 3)"),
    ],
)
def test_bad_combinations(run: Run, words: tuple[str, ...], message: str) -> None:
    assert refused(run, *words).startswith(f"clustrs: {message}")


def test_a_corruption_that_runs_out_of_memory(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise np._core._exceptions._ArrayMemoryError((10**6, 10**6), np.dtype(float))  # type: ignore[attr-defined]

    monkeypatch.setattr("clustrs.corruptions.images.to_array", exhausted)
    with pytest.raises(ValueError, match=r"gaussian:1 of an image of 9 x 8 pixels: out of memory"):
        Corruption("gaussian", 1).apply(Image.new("RGB", (9, 8)), "a")
    message = refused(run, *CORRUPT, "-o", tmp_path / "x.png")
    assert message.startswith("clustrs: gaussian:1 of an image of 192 x 192 pixels: out of memory")


def test_levels_and_seeds_that_no_float_holds() -> None:
    with pytest.raises(ValueError, match=r"gaussian level must be a standard deviation.*, got 1000.*"):
        Corruption("gaussian", 10**400)
    with pytest.raises(ValueError, match="seed must have at most 64 bits"):
        Corruption("gaussian", 1).apply(Image.new("RGB", (9, 8)), "a", 10**400)
