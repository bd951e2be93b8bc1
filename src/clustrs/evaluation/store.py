"""The folder of a run: its configuration, and every answer as one JSON line as soon as it is there.

| file | content |
|---|---|
| `config.json` | the configuration, and metadata such as versions and the model's checksums |
| `answers.jsonl` | an `AnswerRecord` a line |
| `images.json` | the checksum of every image |
| `verdicts.jsonl` | a `VerdictRecord` a line, written by `clustrs.evaluation.judge` |

Every line is on the disk before the next batch is answered. A killed process leaves at most a torn last line, which
readers skip and the next writer cuts off.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from filelock import FileLock, Timeout

from clustrs.evaluation.config import CHANGEABLE, Config, differences
from clustrs.evaluation.tasks import Item, Task, image_checksum
from clustrs.pruners import from_dict
from clustrs.validation import excerpt, open_regular, parse_json, read_text, source_date, write_whole

UNCHECKED = (*CHANGEABLE, "started")  # entries of config.json that may differ when a run is resumed
SAME_ANSWERS = {"0.1.0", "0.2.0"}  # versions that give the same answers: each resumes runs of the others

Key = tuple[str, str, str, int]  # identity of an answer: question, method with its parameters, corruption, seed
RecordT = TypeVar("RecordT", bound=msgspec.Struct)
Mark = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number from 0 to 1")]
Indices = Annotated[
    list[Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]],
    msgspec.Meta(description="token indices from 0 (or -1 for CLS)"),
]


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one answer; `method` is what `Pruner.to_dict` returns, a failed one has an `error` and no `text`.

    `average_tokens` is a mean over layers, of methods that prune inside the language model.
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
    score: Mark | None
    kept: Indices | None
    visual_tokens: int | None
    unpruned_tokens: int | None
    error: str | None
    average_tokens: float | None = None


class VerdictRecord(msgspec.Struct, frozen=True):
    """Record of a judge's verdict on one text. A failed one has an `error` and no `score`."""

    item: str
    text: str
    judge: str
    round: int
    score: Mark | None
    error: str | None


def new_record(item: Item, method: Mapping[str, Any], corruption: str, seed: int, **result: Any) -> AnswerRecord:
    known: dict[str, Any] = dict.fromkeys(AnswerRecord.__struct_fields__)
    known |= {"item": item.id, "image": item.image, "question": item.question, "answer": item.answer}
    known |= {"kinds": list(item.kinds), "method": dict(method), "corruption": corruption, "seed": seed}
    return AnswerRecord(**{**known, **result})


def identity(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def key_of(record: AnswerRecord) -> Key:
    return record.item, identity(record.method), record.corruption, record.seed


def parse(content: str | bytes, where: str) -> dict[str, Any]:
    value = parse_json(content, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {excerpt(value)}")
    return value


def require(where: str, record: Mapping[str, Any], key: str, kind: Any) -> Any:
    """Return an entry as an object of a type; an error names the place, the entry, and what is expected."""
    try:
        return msgspec.convert(record[key], kind)
    except (KeyError, msgspec.ValidationError, RecursionError):
        found = excerpt(record[key]) if key in record else "nothing"
        raise ValueError(f"{where}: {key} must be {_type_name(kind)}, got {found}") from None


def _type_name(kind: Any) -> str:
    """Name a type as messages do: "str or null", "list of int"."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return str(parts[1].description)
    if origin in (Union, UnionType):
        return " or ".join(map(_type_name, parts))
    if origin is list:
        return f"list of {_type_name(parts[0])}"
    return "null" if kind is type(None) else (origin or kind).__name__


def read_object(path: Path) -> dict[str, Any]:
    return parse(read_text(path), repr(str(path)))


def raw_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place, as messages name it, and the bytes of each line but a torn last one, without a line break."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield f"{str(path)!r} line {number}", line
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((where, parse(line, where)) for where, line in raw_lines(path))


def read_records(path: Path, kind: type[RecordT]) -> Iterator[tuple[str, RecordT]]:
    """Yield the place and the record of each line; an error names file, line, field and what is expected."""
    decoder, known = msgspec.json.Decoder(kind), msgspec.structs.fields(kind)
    for where, line in raw_lines(path):
        try:
            yield where, decoder.decode(line)
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            data = parse(line, where)
        given = (field for field in known if field.required or field.name in data)
        yield where, kind(**{field.name: require(where, data, field.name, field.type) for field in given})


def encode_record(record: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:  # half a character, which JSON can only hold escaped
        return json.dumps(msgspec.structs.asdict(record)).encode() + b"\n"


def append_records(path: Path, records: Iterable[msgspec.Struct]) -> None:
    """Add records to a file; they are on the disk when this returns."""
    with path.open("ab") as file:
        file.write(b"".join(map(encode_record, records)))
        file.flush()
        os.fsync(file.fileno())


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without a line break, which a killed process left."""
    whole = sum(len(line) for _, line in raw_lines(path))
    if whole < path.stat().st_size:
        os.truncate(path, whole)


@contextmanager
def locked(lock: Path, name: str) -> Iterator[None]:
    """Hold a lock; an error if another process does."""
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout:
        raise ValueError(f"{name}: another process is writing to it") from None


def today() -> str:
    """Return the day in UTC, as reports show it; the variable SOURCE_DATE_EPOCH, if it is set, stands for now."""
    seconds = source_date()
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).date().isoformat()


def read_config(folder: Path) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    if not os.path.isfile(path):  # unlike Path.is_file, also for names that are too long
        raise ValueError(f"run {str(folder)!r}: there is no config.json, it is not the folder of a run")
    return read_object(path)


def read_answers(folder: Path) -> Iterator[AnswerRecord]:
    path = Path(folder) / "answers.jsonl"
    if os.path.exists(path):
        for _, record in read_records(path, AnswerRecord):
            yield record


def some_answers(folder: Path) -> Iterator[AnswerRecord]:
    """Yield the answers of a run that has some; an error if there are none."""
    if not (folder / "answers.jsonl").is_file():
        raise ValueError(f"{str(folder)!r} is not a run: there is no answers.jsonl in it")
    record = None
    for record in read_answers(folder):
        yield record
    if record is None:
        raise ValueError(f"run {str(folder)!r} has no answers yet")


class RunFolder:
    """Folder of a run, opened to be continued. `retried` are answers that failed before and are asked again now."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder, self.task, self.name = Path(folder), task, f"run {str(folder)!r}"
        self.answers = self.folder / "answers.jsonl"
        self.images: dict[str, str | None] = {}
        self.done: set[Key] = set()
        self.failed: set[Key] = set()
        self.retried: set[Key] = set()

    @contextmanager
    def opened(self, config: Config, metadata: Mapping[str, Any], retry: bool = True) -> Iterator["RunFolder"]:
        """Start or resume the run, with a lock on the folder; metadata and images of answers must not have changed."""
        with ExitStack() as stack:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.folder / "lock", self.name))
                self._check_config(config, metadata)
                self._check_images(self._read(config, retry) if self.answers.exists() else set())
                if self.retried:
                    both = zip(raw_lines(self.answers), read_records(self.answers, AnswerRecord), strict=True)
                    kept = (line for (_, line), (_, record) in both if key_of(record) not in self.retried)
                    write_whole(self.answers, kept)
            yield self

    def append(self, records: Sequence[AnswerRecord]) -> None:
        """Add answers, and checksums of their images that could not be read when the run began, to the files."""
        late = {one.image for one in records if one.error is None and self.images.get(one.image) is None}
        with self._writing():
            self._write_images(self.images | {name: image_checksum(self.task, name) for name in sorted(late)})
            append_records(self.answers, records)
        self.done |= {key_of(record) for record in records}
        self.failed |= {key_of(record) for record in records if record.error is not None}

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
        """Write the configuration of a new run; refuse another one for a run that is there."""
        stored = self.folder / "config.json"
        if stored.exists():
            before = {key: value for key, value in read_config(self.folder).items() if key not in UNCHECKED}
            before = {"attention": "plain", **before}  # which older runs do not say
            now = {**config.decisive(), **metadata}
            if {before.get("clustrs"), now.get("clustrs")} <= SAME_ANSWERS:
                before["clustrs"] = now["clustrs"]
            if changed := "; ".join(differences(before, now)):
                advice = "pass the same options, or another folder with --output"
                raise ValueError(f"{self.name} was made with another configuration ({changed}): {advice}")
        elif self.answers.exists() and self.answers.stat().st_size:
            reason = "has answers but no config.json, cannot verify how they were produced"
            raise ValueError(f"{self.name} {reason}: pass another folder with --output")
        else:
            content = {**config.to_json(), **metadata, "started": today()}
            write_whole(stored, json.dumps(content, indent=2) + "\n")

    def _read(self, config: Config, retry: bool) -> set[str]:
        """Read the answers so far; returns the names of the images that the kept ones are about."""
        drop_torn_line(self.answers)
        known: dict[str, set[Any]] = {
            "item": {item.id for item in self.task.items},
            "method": {identity(from_dict(stored).to_dict()) for stored in config.methods},
            "corruption": set(config.corruptions),
            "seed": set(config.seeds),
        }
        about: set[str] = set()
        for where, record in read_records(self.answers, AnswerRecord):
            key = key_of(record)
            for value, (name, accepted) in zip(key, known.items(), strict=True):
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

    def _check_images(self, about: set[str]) -> None:
        """Refuse images that changed since they were asked about; one that could not be read has no checksum."""
        path = self.folder / "images.json"
        self.images = read_object(path) if path.exists() else {}
        if about and not path.exists():
            raise ValueError(f"{self.name} has answers but no images.json: pass another folder")
        images = dict.fromkeys(item.image for item in self.task.items)
        now = {name: image_checksum(self.task, name) or self.images.get(name) for name in images}
        for name in sorted(about):
            old, new = self.images.get(name), now.get(name)
            if old is not None and old != new:
                change = f"has changed since it was asked about (was {excerpt(old)}, now {excerpt(new)})"
                advice = "restore the image, or pass another folder with --output"
                raise ValueError(f"{self.name}: image {excerpt(name)} {change}: {advice}")
        self._write_images(now)

    def _write_images(self, images: dict[str, str | None]) -> None:
        if images != self.images:
            self.images = images
            write_whole(self.folder / "images.json", json.dumps(images, indent=0) + "\n")
