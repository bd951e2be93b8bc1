"""The folder of a run: what was asked for, and every answer as soon as it is there. Survives being killed."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from clustrs.evaluation.config import CHANGEABLE, Config, differences
from clustrs.evaluation.jsonl import drop_torn_line, identity, raw_lines, read_object
from clustrs.evaluation.record_files import encode_record, location, read_records
from clustrs.evaluation.records import AnswerRecord
from clustrs.pruners import from_dict
from clustrs.validation import excerpt, source_date

UNCHECKED = (*CHANGEABLE, "started")
"""What a run may be resumed with another value of: its `CHANGEABLE` settings, and the day it was started."""
Key = tuple[str, str, str, int]
ImageChecksums = dict[str, str | None]


def key_of(record: AnswerRecord) -> Key:
    """What tells answers apart: question, method with its parameters, corruption, seed."""
    return record.item, identity(record.method), record.corruption, record.seed


class RunFolder:
    """A run's folder, opened to be continued; one process at a time writes to it.

    `done` are the answers that need no more work, `failed` those of them that failed, and `retried` those that failed
    before and are asked again now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.answers = self.folder / "answers.jsonl"
        self.images: ImageChecksums = {}
        self.done: set[Key] = set()
        self.failed: set[Key] = set()
        self.retried: set[Key] = set()

    @contextmanager
    def opened(
        self,
        config: Config,
        metadata: Mapping[str, Any],
        items: Sequence[str],
        images: Callable[[], ImageChecksums],
        retry: bool = True,
    ) -> Iterator["RunFolder"]:
        """Start the run, or resume it: `metadata` is stored beside the configuration and must not have changed,
        nor must the images (by their checksums) that there are answers about. Failed answers are dropped to be asked
        again, unless `retry` is False.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / "lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                raise ValueError(f"run {str(self.folder)!r}: another process is writing to it") from None
        try:
            with self._writing():
                self._check_config(config, metadata)
                if self.answers.exists():
                    with self.answers.open("r+b") as file:
                        drop_torn_line(file)
                about = self._read(config, items, retry)
                self._check_images(about, images())
                self._drop_retried()
            yield self
        finally:
            lock.release()

    def append(self, records: Iterable[AnswerRecord]) -> None:
        """Add answers and see to it that they are on the disk."""
        fresh = list(records)
        content = b"".join(map(encode_record, fresh))
        with self._writing(), self.answers.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for record in fresh:
            self.done.add(key_of(record))
            if record.error is not None:
                self.failed.add(key_of(record))

    def note_image(self, name: str, checksum: str | None) -> None:
        """Store the checksum of an image that could not be read when the run began."""
        if checksum is not None and self.images.get(name) is None:
            self.images[name] = checksum
            with self._writing():
                self._write_images()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Says in one line that the folder cannot be written: it is full, read-only, its name too long."""
        try:
            yield
        except OSError as error:
            raise ValueError(f"run {excerpt(str(self.folder))} cannot be written: {error.strerror or error}") from None
        except UnicodeEncodeError:
            raise ValueError(f"run {excerpt(str(self.folder))}: the name has characters that are not text") from None

    def _check_config(self, config: Config, metadata: Mapping[str, Any]) -> None:
        stored = self.folder / "config.json"
        if stored.exists():
            before = {key: value for key, value in read_config(self.folder).items() if key not in UNCHECKED}
            changed = differences(before, {**config.decisive(), **metadata})
            if changed:
                raise ValueError(
                    f"run {str(self.folder)!r} was made with another configuration ({'; '.join(changed)}): "
                    "give the same options, or another folder with --output"
                )
        elif self.answers.exists() and self.answers.stat().st_size:
            raise ValueError(
                f"run {str(self.folder)!r} has answers but no config.json, so nobody knows how they were made: "
                "give another folder with --output"
            )
        else:
            content = {**config.to_json(), **metadata, "started": today()}
            write_whole(stored, json.dumps(content, indent=2) + "\n")

    def _read(self, config: Config, items: Sequence[str], retry: bool) -> set[str]:
        """Take in the answers so far; returns the names of the images that those which stay are about."""
        methods = {identity(from_dict(stored).to_dict()) for stored in config.methods}
        known: tuple[set[Any], ...] = (set(items), methods, set(config.corruptions), set(config.seeds))
        about: set[str] = set()
        for where, record in self._records():
            key = key_of(record)
            for name, value, accepted in zip(("item", "method", "corruption", "seed"), key, known, strict=True):
                if value not in accepted:
                    raise ValueError(f"{where}: {name} {excerpt(value)} does not belong to this run")
            if key in self.done or key in self.retried:
                raise ValueError(f"{where}: {excerpt(record.item)} was answered with this method and corruption before")
            if record.error is not None and retry:
                self.retried.add(key)
                continue
            self.done.add(key)
            about.add(record.image)
            if record.error is not None:
                self.failed.add(key)
        return about

    def _records(self) -> Iterator[tuple[str, AnswerRecord]]:
        """Where each answer stands, and the answer."""
        if self.answers.exists():
            for number, record in read_records(self.answers, AnswerRecord):
                yield location(self.answers, number), record

    def _check_images(self, about: set[str], now: ImageChecksums) -> None:
        """Refuse images that have changed since they were asked about. One that could not be read has no checksum."""
        path = self.folder / "images.json"
        before = read_object(path) if path.exists() else {}
        if about and not path.exists():
            raise ValueError(f"run {str(self.folder)!r} has answers but no images.json: give another folder")
        for name in sorted(about):
            old, new = before.get(name), now.get(name)
            if old is not None and new is not None and old != new:
                raise ValueError(
                    f"run {str(self.folder)!r}: image {excerpt(name)} has changed since it was asked about (was "
                    f"{excerpt(old)}, now {excerpt(new)}): give the same images, or another folder with --output"
                )
        self.images = {name: checksum or before.get(name) for name, checksum in now.items()}
        if self.images != before:
            self._write_images()

    def _write_images(self) -> None:
        write_whole(self.folder / "images.json", json.dumps(self.images, indent=0) + "\n")

    def _drop_retried(self) -> None:
        """Take the answers that are asked again out of the file, all at once."""
        if self.retried:
            decoder = msgspec.json.Decoder(AnswerRecord)
            partial = self.answers.with_name(self.answers.name + ".partial")
            with partial.open("wb") as file:
                for _, line in raw_lines(self.answers):
                    if key_of(decoder.decode(line)) not in self.retried:
                        file.write(line)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.answers)


def today() -> str:
    """The day in UTC, as reports show it; the variable SOURCE_DATE_EPOCH, where it is set, stands for now."""
    seconds = source_date()
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return now.date().isoformat()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there with all its text or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run, and what is stored beside it."""
    path = Path(folder) / "config.json"
    if not os.path.isfile(path):  # unlike Path.is_file, also for names that are too long
        raise ValueError(f"run {str(folder)!r}: there is no config.json, it is not the folder of a run")
    return read_object(path)


def read_answers(folder: Path) -> Iterator[AnswerRecord]:
    """The answers so far; a torn last line is left out."""
    path = Path(folder) / "answers.jsonl"
    if os.path.exists(path):
        for _, record in read_records(path, AnswerRecord):
            yield record
