"""The folder of a run: its configuration, and every answer as one JSON line as soon as it is there."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, TypeVar, get_args, get_origin

import msgspec
from filelock import FileLock, Timeout

from clustrs.corruptions.images import open_regular
from clustrs.evaluation.config import CHANGEABLE, Config, differences
from clustrs.pruners import from_dict
from clustrs.validation import excerpt, source_date

BLOCK = 1 << 16


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The JSON object that a file or a line holds; NaN and Infinity are not JSON."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({excerpt(str(error))})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {excerpt(value)} stands where an object is expected")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    return parse(read_bytes(path), repr(str(path)))


def read_bytes(path: Path) -> bytes:
    """Read a regular file; a ValueError says why it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Where each line stands, and its bytes. A last line without an end was torn and is left out."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield f"{str(path)!r} line {number}", line
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands, and the record as a dict."""
    for where, line in raw_lines(path):
        yield where, parse(line, where)


def drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without an end, which a killed process left."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(end)


def identity(value: Any) -> str:
    """What tells JSON values apart, such as methods with their parameters; the order of keys doesn't matter."""
    return json.dumps(value, sort_keys=True)


def need(where: str, record: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """The value under a key, which must be there and of one of these kinds."""
    value = record.get(key)
    if key not in record or not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {key} is {excerpt(value) if key in record else 'missing'}, {names} is expected")
    return value


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: what was asked, of which method under which corruption, and what came back.

    `method` is what `Pruner.to_dict` returns. A failed answer has an `error` and no `text`.
    """

    item: str
    image: str
    kinds: list[str]
    question: str
    answer: str
    method: dict[str, Any]
    corruption: str
    seed: int
    text: str | None
    score: float | None
    kept: list[int] | None
    visual_tokens: int | None
    unpruned_tokens: int | None
    error: str | None


class VerdictRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict of a judge on one text. Without a mark, `score` is None and `error` says why."""

    item: str
    text: str
    judge: str
    round: int
    score: float | None
    error: str | None


RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def read_records(path: Path, kind: type[RecordT]) -> Iterator[tuple[int, RecordT]]:
    """Yield each line's number, from 1, and its record. A torn last line, without a line break, is left out.

    A line that is not such a record is a ValueError that names the file, the line, the field and what is expected.
    """
    decoder = msgspec.json.Decoder(kind)
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    try:
                        record = decoder.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        record = _read_slowly(line, location(path, number), kind)
                    yield number, record
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def encode_record(record: msgspec.Struct) -> bytes:
    """A record as a line."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half a character, which JSON can only hold escaped
        return json.dumps(msgspec.structs.asdict(record)).encode() + b"\n"


def location(path: Path, number: int) -> str:
    """Where a record stands, as messages say it."""
    return f"{str(path)!r} line {number}"


def _read_slowly(line: bytes, where: str, kind: type[RecordT]) -> RecordT:
    """Say what is wrong with a line; what only the quick decoder refuses, such as half a character, is read."""
    data = parse(line, where)
    for field in msgspec.structs.fields(kind):
        if field.encode_name in data:
            value = data[field.encode_name]
            try:
                msgspec.convert(value, field.type)
            except (msgspec.ValidationError, RecursionError):
                expected = describe(field.type)
                raise ValueError(f"{where}: {field.encode_name} is {excerpt(value)}, {expected} is expected") from None
        elif field.required:
            raise ValueError(f"{where}: {field.encode_name} is missing, {describe(field.type)} is expected")
    return msgspec.convert(data, kind)


def describe(kind: Any) -> str:
    """A type as messages name it: "str or null", "list of int"."""
    if isinstance(kind, UnionType):
        return " or ".join(map(describe, get_args(kind)))
    if get_origin(kind) is list:
        return f"list of {describe(get_args(kind)[0])}"
    if kind is type(None):
        return "null"
    return getattr(get_origin(kind) or kind, "__name__", str(kind))


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
