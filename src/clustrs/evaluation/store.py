"""The folder of a run: what was asked for, and every answer as soon as it is there. Survives being killed."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clustrs.evaluation.config import Config, differences
from clustrs.evaluation.jsonl import identity, lines, mend, read_object

Key = tuple[str, str, str, int]


def key_of(row: Mapping[str, Any]) -> Key:
    """What tells answers apart: question, method with its parameters, corruption, seed."""
    return row["item"], identity(row["method"]), row["corruption"], row["seed"]


class Record:
    """A run's folder, opened to be continued; one process at a time writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers = folder / "answers.jsonl"

    @contextmanager
    def opened(self, config: Config, facts: Mapping[str, Any]) -> Iterator["Record"]:
        """Start the run, or go on with it. `facts` are stored beside the configuration and must not have changed."""
        wanted = {**config.to_json(), **facts}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"run {str(self.folder)!r}: another process is writing to it") from None
            stored = self.folder / "config.json"
            if stored.exists():
                changed = differences(read_config(self.folder), wanted)
                if changed:
                    raise ValueError(
                        f"run {str(self.folder)!r} was made with another configuration ({'; '.join(changed)}): "
                        "give the same options, or another folder with --output"
                    )
            else:
                write_whole(stored, json.dumps(wanted, indent=2) + "\n")
            self._mend()
            yield self

    def done(self) -> set[Key]:
        return {key_of(row) for row in read_answers(self.folder)}

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add answers and see to it that they are on the disk."""
        with self.answers.open("ab") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def _mend(self) -> None:
        """Cut off a line that was being written when the process was killed."""
        if self.answers.exists():
            with self.answers.open("r+b") as file:
                mend(file)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there with all its text or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"run {str(folder)!r}: there is no config.json, it is not the folder of a run")
    return read_object(path)


def read_answers(folder: Path) -> Iterator[dict[str, Any]]:
    """The answers so far; a torn last line is left out."""
    path = folder / "answers.jsonl"
    if not path.exists():
        return
    for where, row in lines(path):
        try:
            key_of(row)
        except KeyError as error:
            raise ValueError(f"{where}: {error.args[0]} is missing, this is not an answer of a run") from None
        yield row
