"""What a GGUF file says of itself, checked before the gguf package, which believes every count, reads it.

Of the specification's version 2 and 3, little-endian: magic, version, number of tensors, number of
key-values; each key-value; each tensor's name, axes, type and offset; then the data.
"""

from __future__ import annotations

import math
import mmap
import struct
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


def check_header(path: Path) -> None:
    """Raises WeightError where a count, a length or an offset leaves the file, or is absurd."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise WeightError(f"{size} bytes are too few for a GGUF file", where=str(path), todo=AGAIN)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(path, data).check()


class _Header:
    """A place in the file, which moves on with what is taken."""

    def __init__(self, path: Path, data: Any) -> None:
        self._path, self._data, self._at, self._elements = path, data, 0, 0

    def check(self) -> None:
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
        tensors = [self._tensor(alignment) for _ in range(num_tensors)]
        self._check_places(tensors, -(-self._at // alignment) * alignment)

    def _fail(self, what: str) -> NoReturn:
        raise WeightError(what, where=str(self._path), todo=AGAIN)

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

    def _tensor(self, alignment: int) -> tuple[int, int, str]:
        """(first byte, bytes, name) in the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, axes = self._text(MAX_NAME_BYTES, "a tensor's name"), self._take("I")
        if not 1 <= axes <= MAX_AXES:
            self._fail(f"tensor {shown(name)} has {axes} axes; 1 to {MAX_AXES} are read")
        shape = [self._take("Q") for _ in range(axes)]
        kind, first = self._take("I"), self._take("Q")
        sizes = {int(k): v for k, v in GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            self._fail(f"tensor {shown(name)} is of an unknown type, {kind}")
        group, group_bytes = sizes[kind]
        if not all(shape) or (shape[0] if shape else 1) % group or math.prod(shape) >= 2**62:
            what = GGMLQuantizationType(kind).name
            self._fail(f"tensor {shown(name)} cannot have the shape {shown(shape[::-1])} in {what}")
        if first % alignment:
            self._fail(f"tensor {shown(name)} starts at {first}, which is not aligned to {alignment}")
        return first, math.prod(shape) // group * group_bytes, name

    def _check_places(self, tensors: list[tuple[int, int, str]], start: int) -> None:
        end, before = 0, ""
        for first, size, name in sorted(tensors):
            if first < end:
                self._fail(f"tensors {shown(before)} and {shown(name)} overlap")
            end, before = first + size, name
            if start + end > len(self._data):
                self._fail(
                    f"truncated: tensor {shown(name)} ends at {start + end:,} of {len(self._data):,} bytes"
                )
        if len({name for _, _, name in tensors}) < len(tensors):
            self._fail("two tensors have one name")
