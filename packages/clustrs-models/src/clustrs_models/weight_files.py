"""Readers of the two files that smol-llava's pretrained parts come in: ONNX (protobuf) and GGUF.

Neither needs the packages onnx or gguf. They read what these two files have, and refuse anything else.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ONNX_TYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64}
"""Number formats of ONNX tensors by their code."""


@dataclass(frozen=True)
class Node:
    """One operation of an ONNX graph: what it computes, its name, the names of its inputs."""

    operation: str
    name: str
    inputs: tuple[str, ...]


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read an integer of seven bits a byte; return it and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def protobuf_fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of a message's fields: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 2, 5):
            length = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                length, at = varint(data, at)
            if at + length > len(data):
                raise ValueError(f"the ONNX file must have {length} bytes at {at} of a message, got {len(data) - at}")
            value, at = data[at : at + length], at + length
        else:
            raise ValueError(f"the ONNX file must have fields of wire type 0, 1, 2 or 5, got {kind}")
        yield key >> 3, value


def onnx_tensor(data: memoryview) -> tuple[str, Array]:
    """Read a tensor's name and its values: raw bytes, packed floats, or packed integers."""
    shape: list[int] = []
    integers: list[int] = []
    kind, name, raw = 0, "", memoryview(b"")
    for number, value in protobuf_fields(data):
        if number == 1:  # the dimensions, one by one or packed
            shape += [value] if isinstance(value, int) else packed(value)
        elif number == 2:
            kind = value
        elif number == 5:
            integers += [value] if isinstance(value, int) else packed(value)
        elif number == 8:
            name = bytes(value).decode()
        elif number in (4, 9):
            raw = value
    if kind not in ONNX_TYPES:
        raise ValueError(f"tensor {name!r} must be of an ONNX type in {sorted(ONNX_TYPES)}, got {kind}")
    signed = [value - (value >> 63 << 64) for value in integers]
    values = np.array(signed, ONNX_TYPES[kind]) if signed else np.frombuffer(raw, ONNX_TYPES[kind])
    if values.size != np.prod(shape, dtype=int):
        raise ValueError(f"tensor {name!r} must have {shape} numbers, got {values.size}")
    return name, values.reshape(shape)


def packed(data: memoryview) -> list[int]:
    """Read integers that stand one after the other."""
    found, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


def read_onnx(data: bytes) -> tuple[list[Node], dict[str, Array]]:
    """Return the operations of an ONNX file, and its stored tensors by name."""
    nodes: list[Node] = []
    tensors: dict[str, Array] = {}
    graphs = [value for number, value in protobuf_fields(memoryview(data)) if number == 7]
    if len(graphs) != 1:
        raise ValueError(f"the ONNX file must have one graph, got {len(graphs)}")
    for number, value in protobuf_fields(graphs[0]):
        if number == 1:
            fields = list(protobuf_fields(value))
            text = {key: bytes(found).decode() for key, found in fields if key in (3, 4)}
            inputs = tuple(bytes(found).decode() for key, found in fields if key == 1)
            nodes.append(Node(text.get(4, ""), text.get(3, ""), inputs))
        elif number == 5:
            name, tensor = onnx_tensor(value)
            tensors[name] = tensor
    return nodes, tensors


GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_BLOCKS: dict[int, np.dtype[Any]] = {
    0: np.dtype([("values", "<f4")]),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)]),  # Q4_1: 32 numbers of four bits
    8: np.dtype([("scale", "<f2"), ("values", "i1", 32)]),  # Q8_0
}
"""A block of numbers by the code of its format."""


class Cursor:
    """A place in a GGUF file, from which its parts are read one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(GGUF_NUMBERS[kind])


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the settings of a GGUF file, and its tensors [out, in] in float32 by name."""
    cursor = Cursor(data)
    magic, version = data[:4], Cursor(data[4:8]).number("I")
    if (magic, version) != (b"GGUF", 3):
        raise ValueError(f"the file must be GGUF of version 3, got {magic!r}, version {version}")
    cursor.at = 8
    tensors, settings = cursor.number("Q"), cursor.number("Q")
    found = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(settings)}
    places = []
    for _ in range(tensors):
        name, dimensions = cursor.text(), cursor.number("I")
        shape = [cursor.number("Q") for _ in range(dimensions)][::-1]
        places.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = found.get("general.alignment", 32)
    first = -(-cursor.at // alignment) * alignment
    return found, {
        name: dequantized(data, first + at, shape, kind, name).reshape(shape) for name, shape, kind, at in places
    }


def dequantized(data: bytes, at: int, shape: list[int], kind: int, name: str) -> Array:
    """Return a tensor's numbers in float32."""
    if kind not in GGUF_BLOCKS:
        raise ValueError(f"tensor {name!r} must be F32, Q4_1 or Q8_0, got GGUF type {kind}")
    size = 1 if kind == 0 else 32
    blocks = np.frombuffer(data, GGUF_BLOCKS[kind], int(np.prod(shape)) // size, at)
    if kind == 0:
        return blocks["values"].astype(np.float32)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        return np.asarray(scale * blocks["values"].astype(np.float32))
    low, high = blocks["nibbles"] & 15, blocks["nibbles"] >> 4
    return np.asarray(scale * np.concatenate([low, high], 1) + blocks["least"].astype(np.float32)[:, None])
