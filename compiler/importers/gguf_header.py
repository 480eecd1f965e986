"""What a GGUF file says of itself, checked before the gguf package, which believes every count, reads it.

Of the specification's version 2 and 3, little-endian: magic, version, number of tensors, number of
key-values; each key-value; each tensor's name, axes, type and offset; then the data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from compiler.weights import WeightError
from runtime.errors import shown

MAX_KEYS = 4096
MAX_KEY_BYTES = 256
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 512
MAX_ELEMENTS = 1 << 22  # of all arrays of key-values: a vocabulary of 256,000 tokens has some 1,300,000
MAX_AXES = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
AGAIN = "Download the file again"

STRING, ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Stored:
    """A tensor. shape: innermost first. kind: ggml's number of its type. first: its first byte of data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    first: int


@dataclass(frozen=True)
class Header:
    """keys: numbers, and None for a text or an array. start, end: of the data, in bytes of the file."""

    keys: Mapping[str, Any]
    tensors: Sequence[Stored]
    alignment: int
    start: int
    end: int


def read_header(path: Path) -> Header:
    """Without the gguf package, which takes a second to import. Tensors' types and places are not checked.

    Raises WeightError where a count or a length leaves the file, or is absurd.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise WeightError(f"{size} bytes are too few for a GGUF file", where=str(path), todo=AGAIN)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()


def check_header(path: Path) -> None:
    """Raises WeightError where a count, a length or an offset leaves the file, or is absurd."""
    from gguf.constants import GGML_QUANT_SIZES

    header, sizes = read_header(path), {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    places = [(t.first, _stored_bytes(path, t, header.alignment, sizes), t.name) for t in header.tensors]
    end, before = 0, ""
    for first, size, name in sorted(places):
        if first < end:
            _fail(path, f"tensors {shown(before)} and {shown(name)} overlap")
        end, before = first + size, name
        if header.start + end > header.end:
            ends = f"ends at {header.start + end:,} of {header.end:,} bytes"
            _fail(path, f"truncated: tensor {shown(name)} {ends}")
    if len({name for _, _, name in places}) < len(places):
        _fail(path, "two tensors have one name")


def _stored_bytes(path: Path, tensor: Stored, alignment: int, sizes: Mapping[int, tuple[int, int]]) -> int:
    """sizes: elements and bytes of a group, of each type."""
    name, shape = shown(tensor.name), tensor.shape
    if tensor.kind not in sizes:
        _fail(path, f"tensor {name} is of an unknown type, {tensor.kind}")
    group, group_bytes = sizes[tensor.kind]
    if not all(shape) or shape[0] % group or math.prod(shape) >= 2**62:
        _fail(
            path,
            f"tensor {name} cannot have the shape {shown(list(shape[::-1]))} in {_type_name(tensor.kind)}",
        )
    if tensor.first % alignment:
        _fail(path, f"tensor {name} starts at {tensor.first}, which is not aligned to {alignment}")
    return math.prod(shape) // group * group_bytes


def _type_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def _fail(path: Path, what: str) -> NoReturn:
    raise WeightError(what, where=str(path), todo=AGAIN)


class _Reader:
    """A place in the file, which moves on with what is taken."""

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self._data, self._at, self._elements = path, data, 0, 0

    def read(self) -> Header:
        magic, version = self._take("4s"), self._take("I")
        if magic != b"GGUF":
            self._fail(f"it starts with {magic!r}, not with GGUF")
        if version not in (2, 3):
            self._fail(f"version {version}{' (big-endian?)' if version >> 16 else ''}; 2 and 3 are read")
        num_tensors, num_keys = self._count(MAX_TENSORS, "tensors"), self._count(MAX_KEYS, "key-values")
        keys = [self._key_value() for _ in range(num_keys)]
        alignment = dict(keys).get("general.alignment", DEFAULT_ALIGNMENT)
        if len(dict(keys)) < num_keys:
            self._fail("a key occurs twice")
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(
                f"general.alignment is {shown(alignment)}, not a power of two from 8 to {MAX_ALIGNMENT}"
            )
        tensors = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return Header(dict(keys), tensors, alignment, start, len(self._data))

    def _fail(self, what: str) -> NoReturn:
        _fail(self._path, what)

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            self._fail(
                f"truncated: {count:,} bytes are announced at {self._at:,}, of a file of {len(self._data):,}"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _take(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]

    def _count(self, most: int, what: str) -> int:
        count = self._take("Q")
        if count > most:
            self._fail(f"it announces {count:,} {what}; at most {most:,} are read")
        return count

    def _text(self, most: int, what: str) -> str:
        try:
            return self._bytes(self._count(most, f"bytes of {what}")).decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8 ({error})")

    def _key_value(self) -> tuple[str, Any]:
        key = self._text(MAX_KEY_BYTES, "a key")
        return key, self._value(self._take("I"), key)

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        """A number, or None for a text or array, which are only passed over."""
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == STRING:
            self._bytes(self._take("Q"))
            return None
        if kind != ARRAY or depth > 1:
            self._fail(
                f"{shown(key)} has a value of type {kind}{' nested too deep' if kind == ARRAY else ''}"
            )
        inner, count = self._take("I"), self._count(MAX_ELEMENTS, f"elements of {shown(key)}")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            self._fail(f"its arrays have more than {MAX_ELEMENTS:,} elements")
        if inner in _SCALARS:
            self._bytes(count * struct.calcsize(_SCALARS[inner]))
            return None
        for _ in range(count):
            self._value(inner, key, depth + 1)
        return None

    def _tensor(self) -> Stored:
        name, axes = self._text(MAX_NAME_BYTES, "a tensor's name"), self._take("I")
        if not 1 <= axes <= MAX_AXES:
            self._fail(f"tensor {shown(name)} has {axes} axes; 1 to {MAX_AXES} are read")
        shape = tuple(self._take("Q") for _ in range(axes))
        return Stored(name, shape, self._take("I"), self._take("Q"))
