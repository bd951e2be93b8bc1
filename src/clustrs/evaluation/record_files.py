"""Files of typed records, one JSON object per line, read quickly and with clear errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from clustrs.corruptions.images import open_regular
from clustrs.evaluation.jsonl import parse
from clustrs.validation import excerpt

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
