"""The folder of a run: its configuration, and every answer as one JSON line as soon as it is there.

| file | content |
|---|---|
| `config.json` | the configuration, and metadata such as versions and the model's checksums |
| `answers.jsonl` | an `AnswerRecord` a line |
| `images.json` | the checksum of every image |
| `verdicts.jsonl` | a `VerdictRecord` a line, written by `clustrs.evaluation.verdicts` |

Every line is on the disk before the next batch is answered. A killed process leaves at most a torn last line, which
readers skip and the next writer cuts off.
"""

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
from clustrs.evaluation.tasks import Item
from clustrs.pruners import from_dict
from clustrs.validation import excerpt, source_date

BLOCK = 1 << 16
UNCHECKED = (*CHANGEABLE, "started")
"""Entries of config.json that may differ when a run is resumed."""
SAME_ANSWERS = {"0.1.0", "0.2.0"}
"""Versions of this package that give the same answers: each resumes runs of the others."""

Key = tuple[str, str, str, int]
"""Identity of an answer: question, method with its parameters, corruption, seed."""
ImageChecksums = dict[str, str | None]
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one answer: the question, the method and corruption, and what the model answered.

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
    """Record of a judge's verdict on one text. A failed one has an `error` and no `score`."""

    item: str
    text: str
    judge: str
    round: int
    score: float | None
    error: str | None


def new_record(item: Item, method: Mapping[str, Any], corruption: str, seed: int, **result: Any) -> AnswerRecord:
    """Make the record of a question; fields of the answer that are not given are None."""
    known: dict[str, Any] = dict.fromkeys(AnswerRecord.__struct_fields__)
    known |= {"item": item.id, "image": item.image, "question": item.question, "answer": item.answer}
    known |= {"kinds": list(item.kinds), "method": dict(method), "corruption": corruption, "seed": seed}
    return AnswerRecord(**{**known, **result})


def identity(value: Any) -> str:
    """Return a string that is equal for equal JSON values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True)


def key_of(record: AnswerRecord) -> Key:
    """Return the identity of an answer."""
    return record.item, identity(record.method), record.corruption, record.seed


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object of a file or a line; NaN and Infinity are refused."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not a number")

    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({excerpt(str(error))})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {excerpt(value)}")
    return value


def require(where: str, record: Mapping[str, Any], key: str, *kinds: type) -> Any:
    """Return the value under a key, which must be there and of one of these types."""
    value = record.get(key)
    if key not in record or not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {key} must be {names}, got {excerpt(value) if key in record else 'nothing'}")
    return value


def read_bytes(path: Path) -> bytes:
    """Read a regular file."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    return parse(read_bytes(path), repr(str(path)))


def location(path: Path, number: int) -> str:
    """Return a line's place as messages name it."""
    return f"{str(path)!r} line {number}"


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line but a torn last one, which has no line break."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, line
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line."""
    for number, line in raw_lines(path):
        where = location(path, number)
        yield where, parse(line, where)


def read_records(path: Path, kind: type[RecordT]) -> Iterator[tuple[int, RecordT]]:
    """Yield the number, from 1, and the record of each line; an error names file, line, field and what is expected."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in raw_lines(path):
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            record = _read_slowly(line, location(path, number), kind)
        yield number, record


def _read_slowly(line: bytes, where: str, kind: type[RecordT]) -> RecordT:
    """Explain what is wrong with a line; what only the quick decoder refuses, such as half a character, is read."""
    data = parse(line, where)
    for field in msgspec.structs.fields(kind):
        name, expected = field.encode_name, _type_name(field.type)
        if name in data:
            try:
                msgspec.convert(data[name], field.type)
            except (msgspec.ValidationError, RecursionError):
                raise ValueError(f"{where}: {name} must be {expected}, got {excerpt(data[name])}") from None
        elif field.required:
            raise ValueError(f"{where}: {name} must be {expected}, got nothing")
    return msgspec.convert(data, kind)


def _type_name(kind: Any) -> str:
    """Name a type as messages do: "str or null", "list of int"."""
    if isinstance(kind, UnionType):
        return " or ".join(map(_type_name, get_args(kind)))
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if kind is type(None):
        return "null"
    return getattr(get_origin(kind) or kind, "__name__", str(kind))


def encode_record(record: msgspec.Struct) -> bytes:
    """Encode a record as a line."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half a character, which JSON can only hold escaped
        return json.dumps(msgspec.structs.asdict(record)).encode() + b"\n"


def drop_torn_line(file: BinaryIO) -> None:
    """Cut off a last line without a line break, which a killed process left."""
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


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there with all its content or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def today() -> str:
    """Return the day in UTC, as reports show it; the variable SOURCE_DATE_EPOCH, if it is set, stands for now."""
    seconds = source_date()
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return now.date().isoformat()


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a run and the metadata stored with it."""
    path = Path(folder) / "config.json"
    if not os.path.isfile(path):  # unlike Path.is_file, also for names that are too long
        raise ValueError(f"run {str(folder)!r}: there is no config.json, it is not the folder of a run")
    return read_object(path)


def read_answers(folder: Path) -> Iterator[AnswerRecord]:
    """Yield the answers of a run so far."""
    path = Path(folder) / "answers.jsonl"
    if os.path.exists(path):
        for _, record in read_records(path, AnswerRecord):
            yield record


class RunFolder:
    """Folder of a run, opened to be continued; one process at a time writes to it.

    `done` are answers that need no more work, `failed` those of them that failed, `retried` those that failed before
    and are asked again now.
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
        """Start or resume the run, with a lock on the folder.

        `metadata` is stored with the configuration and must not have changed, nor must the images (by their checksums)
        that have answers. Failed answers are dropped to be asked again, unless `retry` is False.
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
        """Add answers; they are on the disk when this returns."""
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
        """Report in one line that the folder cannot be written: a full disk, a read-only folder, a long name."""
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
            now = {**config.decisive(), **metadata}
            if {before.get("clustrs"), now.get("clustrs")} <= SAME_ANSWERS:
                before["clustrs"] = now["clustrs"]
            changed = differences(before, now)
            if changed:
                raise ValueError(
                    f"run {str(self.folder)!r} was made with another configuration ({'; '.join(changed)}): "
                    "pass the same options, or another folder with --output"
                )
        elif self.answers.exists() and self.answers.stat().st_size:
            raise ValueError(
                f"run {str(self.folder)!r} has answers but no config.json, cannot verify how they were produced: "
                "pass another folder with --output"
            )
        else:
            content = {**config.to_json(), **metadata, "started": today()}
            write_whole(stored, json.dumps(content, indent=2) + "\n")

    def _read(self, config: Config, items: Sequence[str], retry: bool) -> set[str]:
        """Read the answers so far; returns the names of the images that the kept ones are about."""
        if not self.answers.exists():
            return set()
        methods = {identity(from_dict(stored).to_dict()) for stored in config.methods}
        known: tuple[set[Any], ...] = (set(items), methods, set(config.corruptions), set(config.seeds))
        about: set[str] = set()
        for number, record in read_records(self.answers, AnswerRecord):
            key = key_of(record)
            for name, value, accepted in zip(("item", "method", "corruption", "seed"), key, known, strict=True):
                if value not in accepted:
                    where = location(self.answers, number)
                    raise ValueError(f"{where}: {name} {excerpt(value)} does not belong to this run")
            if key in self.done or key in self.retried:
                where = location(self.answers, number)
                raise ValueError(f"{where}: {excerpt(record.item)} was answered with this method and corruption before")
            if record.error is not None and retry:
                self.retried.add(key)
                continue
            self.done.add(key)
            about.add(record.image)
            if record.error is not None:
                self.failed.add(key)
        return about

    def _check_images(self, about: set[str], now: ImageChecksums) -> None:
        """Refuse images that changed since they were asked about; one that could not be read has no checksum."""
        path = self.folder / "images.json"
        before = read_object(path) if path.exists() else {}
        if about and not path.exists():
            raise ValueError(f"run {str(self.folder)!r} has answers but no images.json: pass another folder")
        for name in sorted(about):
            old, new = before.get(name), now.get(name)
            if old is not None and new is not None and old != new:
                raise ValueError(
                    f"run {str(self.folder)!r}: image {excerpt(name)} has changed since it was asked about (was "
                    f"{excerpt(old)}, now {excerpt(new)}): restore the image, or pass another folder with --output"
                )
        self.images = {name: checksum or before.get(name) for name, checksum in now.items()}
        if self.images != before:
            self._write_images()

    def _write_images(self) -> None:
        write_whole(self.folder / "images.json", json.dumps(self.images, indent=0) + "\n")

    def _drop_retried(self) -> None:
        """Remove the answers that are asked again from the file, all at once."""
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
