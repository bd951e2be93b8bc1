"""Files of JSON lines, and single objects, that others may have written or a killed process left half done."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from clustrs.corruptions.images import open_regular
from clustrs.validation import excerpt

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
